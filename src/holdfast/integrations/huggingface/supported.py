"""The check that refuses the Trainers of Hugging Face that cannot be protected."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import transformers
from torch.utils.data import IterableDataset

from holdfast.errors import UnsupportedError

KEEPS_WEIGHTS = {"SyncRefModelCallback", "BEMACallback", "PEFTAdapterEMACallback"}
"""Callbacks of TRL that train weights of their own. A replacement would begin with fresh weights in them."""


def require_supported(trainer: object, methods: Iterable[str]) -> None:
    """Raise UnsupportedError for a Trainer that cannot be protected.

    It is refused if it is of another class, lacks one of ``methods``, or uses DeepSpeed, FSDP or an iterable dataset.
    It is also refused if the Trainer or a callback keeps tensors that a later step uses.
    """
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
    _require_no_kept_weights(trainer)
    _require_fresh_completions(trainer)


def _require_no_kept_weights(trainer: Any) -> None:
    keeping = [
        type(callback).__name__
        for callback in trainer.callback_handler.callbacks
        if KEEPS_WEIGHTS.intersection(base.__name__ for base in type(callback).__mro__)
    ]
    if keeping:
        raise UnsupportedError(
            f"{', '.join(keeping)}: it changes other weights than the model's during training, and a replacement "
            "would begin with fresh ones",
            hint="leave it out (sync_ref_model=False); a loop of your own: holdfast.session(state={'ref': ref_model})",
        )


def _require_fresh_completions(trainer: Any) -> None:
    """Refuse a TRL trainer whose generated completions serve several steps, because no checkpoint contains them."""
    args = trainer.args
    uses = getattr(args, "steps_per_generation", None)
    if uses is None or not hasattr(trainer, "_buffered_inputs"):
        return
    iterations = getattr(args, "num_iterations", 1)
    if args.gradient_accumulation_steps % (uses * iterations):
        raise UnsupportedError(
            f"this {type(trainer).__name__} uses the same completions in several steps (steps_per_generation={uses}, "
            f"num_iterations={iterations}, gradient_accumulation_steps={args.gradient_accumulation_steps}), and no "
            "checkpoint holds them",
            hint="num_iterations=1, and gradient_accumulation_steps a multiple of steps_per_generation",
        )
