"""Hugging Face's ``Trainer``: ``protect(trainer)`` before ``trainer.train()``.

``trainer`` drives the session, ``position`` is how far the Trainer is and the state of its callbacks, ``losses``
what it needs to report losses, and ``supported`` refuses by name what cannot be protected.
"""

from holdfast.integrations.huggingface.trainer import protect

__all__ = ["protect"]
