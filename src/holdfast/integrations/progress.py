"""How far Hugging Face's ``Trainer`` is, and the state of its callbacks: what a position in its loop is made of."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from transformers.trainer_callback import ExportableState

# Of TrainerState what is the training's, not this run's or this process's.
OF_TRAINING = "epoch global_step num_input_tokens_seen total_flos log_history".split()
OF_TRAINING += "best_metric best_global_step best_model_checkpoint".split()


def progress_of(trainer: Any) -> dict[str, Any]:
    """The parts ``progress`` and ``callbacks`` of a position."""
    return {
        "progress": {name: copy.copy(getattr(trainer.state, name)) for name in OF_TRAINING},
        "callbacks": {type(c).__name__: dict(c.state().get("attributes", {})) for c in _exportable(trainer)},
    }


def go_on(trainer: Any, position: Mapping[str, Any]) -> None:
    """Set both."""
    vars(trainer.state).update(copy.deepcopy(position["progress"]))
    for callback in _exportable(trainer):
        vars(callback).update(position["callbacks"].get(type(callback).__name__, {}))


def _exportable(trainer: Any) -> list[Any]:
    return [c for c in trainer.callback_handler.callbacks if isinstance(c, ExportableState)]
