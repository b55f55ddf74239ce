"""The values from which Hugging Face's ``Trainer`` reports losses, kept over faults.

The Trainer sums losses since its last log line, possibly over many steps: on this rank, and over all ranks. Losses of
an aborted step may come from broken collectives. They are removed from the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SAME_ON_ALL_RANKS = "_total_loss_scalar _globalstep_last_logged _initial_global_step".split()


class ReportedLosses:
    """The reported losses of one ``trainer``."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._norm: Any = None  # of the newest run of a block

    def begin(self) -> None:
        """Begin a step: keep the sum before it."""
        self._before = self._trainer._tr_loss.clone()
        self._losses: list[Any] = []  # of the newest run of this step's block
        self._added: list[Any] = []  # those that the Trainer has added to its sum

    def place(self) -> int:
        """Return the index for the loss of the next micro-batch."""
        self._losses.append(None)
        return len(self._losses) - 1

    def put(self, place: int, loss: Any) -> None:
        """Set the loss of a micro-batch, in each run of the step's block."""
        self._losses[place] = loss

    def add(self) -> Any:
        """Return the newest loss, which the Trainer then adds to its sum."""
        self._added.append(self._losses[-1])
        return self._losses[-1]

    def clip(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Clip the gradients, and keep their norm."""
        self._norm = original(*args, **kwargs)
        return self._norm

    def newest(self, norm: Any) -> Any:
        """Return the gradient norm of the block's newest run; the Trainer's ``norm`` may be from an aborted run."""
        return norm if self._norm is None else self._norm

    def correct(self) -> None:
        """Replace the losses of an aborted block in the Trainer's sum by those of the block that counts."""
        trainer = self._trainer
        if all(new is old for new, old in zip(self._losses, self._added, strict=True)):
            return
        total = trainer._tr_loss.copy_(self._before)
        # The Trainer's count includes this step.
        steps = trainer.state.global_step - trainer._globalstep_last_logged
        for loss in self._losses:
            usable = not trainer.args.logging_nan_inf_filter or loss.isfinite()
            total += loss if usable else total / steps

    def reported(self) -> dict[str, Any]:
        """Return the values for a position that are equal on all ranks."""
        return {name: getattr(self._trainer, name) for name in SAME_ON_ALL_RANKS}

    def own(self) -> dict[str, Any]:
        """Return this rank's own values for a position of the job: the sum of losses and the operation count."""
        return {"loss": self._trainer._tr_loss.item(), "flos": self._trainer.current_flos}

    def go_on(self, reported: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Restore the values of the position from which the job continues."""
        trainer = self._trainer
        vars(trainer).update(reported)
        # Otherwise the sums of this rank were logged and reset.
        if trainer._globalstep_last_logged < trainer.state.global_step:
            trainer._tr_loss.fill_(own.get("loss", 0.0))
            trainer.current_flos = own.get("flos", 0)
