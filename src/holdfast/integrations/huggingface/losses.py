"""The values from which Hugging Face's ``Trainer`` reports losses, kept over faults.

The Trainer sums losses since its last log line, possibly over many steps. The Trainer has a sum of this rank and a sum
over all ranks. Losses of an aborted step may come from broken collectives, so they are removed from the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SAME_ON_ALL_RANKS = "_total_loss_scalar _globalstep_last_logged _initial_global_step".split()


class ReportedLosses:
    """The losses that one Trainer sums for its log lines."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._norm: Any = None  # gradient norm of the newest run of a block

    def begin(self) -> None:
        """Begin a step: keep the Trainer's sum of losses from before the step."""
        self._before = self._trainer._tr_loss.clone()
        self._losses: list[Any] = []  # losses of the newest run of this step's block
        self._added: list[Any] = []  # losses that the Trainer has added to its sum

    def place(self) -> int:
        """Reserve an index for the loss of the next micro-batch, and return it."""
        self._losses.append(None)
        return len(self._losses) - 1

    def put(self, place: int, loss: Any) -> None:
        """Set the loss at the index ``place``. Each run of the step's block sets it again."""
        self._losses[place] = loss

    def add(self) -> Any:
        """Return the newest loss, which the Trainer then adds to its sum."""
        self._added.append(self._losses[-1])
        return self._losses[-1]

    def clip(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Clip the gradients with the Trainer's own function ``original``. Keep and return their norm."""
        self._norm = original(*args, **kwargs)
        return self._norm

    def newest(self, norm: Any) -> Any:
        """Return the gradient norm of the block's newest run, or ``norm`` if no run has clipped gradients.

        The Trainer's own ``norm`` may be from an aborted run.
        """
        return norm if self._norm is None else self._norm

    def correct(self) -> None:
        """Replace the losses of aborted runs of the block in the Trainer's sum by the losses of the committed run."""
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
        """Return the values to save that are equal on all ranks: total loss, step of the last log, first step."""
        return {name: getattr(self._trainer, name) for name in SAME_ON_ALL_RANKS}

    def own(self) -> dict[str, Any]:
        """Return the values to save that only this rank has: sum of losses, number of float operations."""
        return {"loss": self._trainer._tr_loss.item(), "flos": self._trainer.current_flos}

    def go_on(self, reported: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Set the Trainer's counts and sums of losses to those that were saved for the step at which the job continues.

        Args:
            reported: the values that are equal on all ranks, from :meth:`reported`.
            own: the values of this rank, from :meth:`own`.
        """
        trainer = self._trainer
        vars(trainer).update(reported)
        # If both are equal, the sums of this rank were logged and reset at this step.
        if trainer._globalstep_last_logged < trainer.state.global_step:
            trainer._tr_loss.fill_(own.get("loss", 0.0))
            trainer.current_flos = own.get("flos", 0)
