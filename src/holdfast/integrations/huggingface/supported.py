"""The Trainers of Hugging Face that can be protected; others are refused."""

from __future__ import annotations

from collections.abc import Iterable

import transformers
from torch.utils.data import IterableDataset

from holdfast.errors import UnsupportedError


def require_supported(trainer: object, methods: Iterable[str]) -> None:
    """Raise UnsupportedError for another class, missing ``methods``, DeepSpeed, FSDP or an iterable dataset."""
    if not isinstance(trainer, transformers.Trainer):
        raise UnsupportedError(
            f"a {type(trainer).__name__} is no transformers.Trainer",
            hint="give the Trainer itself; a loop of your own takes holdfast.session()",
        )
    missing = [name for name in methods if not hasattr(trainer, name)]
    foreign = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
    if missing or foreign or isinstance(trainer.train_dataset, IterableDataset):
        what = f"has no {', '.join(missing)}" if missing else "uses DeepSpeed, FSDP or an iterable dataset"
        raise UnsupportedError(
            f"this Trainer (transformers {transformers.__version__}) {what}",
            hint="transformers 5.23, a map-style dataset, one process or DDP; or a loop of your own",
        )
