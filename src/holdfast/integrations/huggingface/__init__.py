"""Hugging Face's ``Trainer``: ``protect(trainer)`` before ``trainer.train()``.

``trainer`` drives the session. ``position`` is the progress of the Trainer and the state of its callbacks. ``losses``
keeps the values from which it reports losses, ``counted`` those that a subclass counts. ``supported`` refuses by name
what cannot be protected.
"""

from holdfast.integrations.huggingface.trainer import protect

__all__ = ["protect"]
