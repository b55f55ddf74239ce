"""The integration of Hugging Face's ``Trainer``: call ``protect(trainer)`` before ``trainer.train()``.

``trainer`` drives the session. ``position`` has the progress of the Trainer and the state of its callbacks. ``losses``
keeps the values from which the Trainer reports losses, ``counted`` the values that a subclass of it counts.
``supported`` refuses by name the Trainers that cannot be protected.
"""

from holdfast.integrations.huggingface.trainer import protect

__all__ = ["protect"]
