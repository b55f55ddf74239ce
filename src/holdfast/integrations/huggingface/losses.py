"""What Hugging Face's ``Trainer`` needs to report losses, kept over faults.

The Trainer adds up losses since its last log line, which may be far behind: of this rank, and with all ranks. Those of
an aborted step may come from broken collectives; they are taken out again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SAME_ON_ALL_RANKS = "_total_loss_scalar _globalstep_last_logged _initial_global_step".split()


class ReportedLosses:
    """Of one ``trainer``."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._norm: Any = None  # of the newest attempt

    def begin(self) -> None:
        """A step begins."""
        self._before = self._trainer._tr_loss.clone()
        self._losses: list[Any] = []  # of the newest attempt
        self._added: list[Any] = []  # what the Trainer has added up

    def place(self) -> int:
        """Room for the loss of the next micro-batch."""
        self._losses.append(None)
        return len(self._losses) - 1

    def put(self, place: int, loss: Any) -> None:
        """The loss of a micro-batch, of whichever attempt."""
        self._losses[place] = loss

    def add(self) -> Any:
        """The loss that the Trainer adds up now."""
        self._added.append(self._losses[-1])
        return self._losses[-1]

    def clip(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Clip the gradients, and keep their norm."""
        self._norm = original(*args, **kwargs)
        return self._norm

    def newest(self, norm: Any) -> Any:
        """The Trainer may have got its ``norm`` from an attempt that was aborted."""
        return norm if self._norm is None else self._norm

    def correct(self) -> None:
        """The step counts: add those of its last attempt anew, if there were several."""
        trainer = self._trainer
        if all(new is old for new, old in zip(self._losses, self._added, strict=True)):
            return
        total = trainer._tr_loss.copy_(self._before)
        # As the Trainer counts: with this one.
        steps = trainer.state.global_step - trainer._globalstep_last_logged
        for loss in self._losses:
            usable = not trainer.args.logging_nan_inf_filter or loss.isfinite()
            total += loss if usable else total / steps

    def reported(self) -> dict[str, Any]:
        """The same on all ranks."""
        return {name: getattr(self._trainer, name) for name in SAME_ON_ALL_RANKS}

    def own(self) -> dict[str, Any]:
        """Of this rank."""
        return {"loss": self._trainer._tr_loss.item(), "flos": self._trainer.current_flos}

    def go_on(self, reported: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """From where the job is."""
        trainer = self._trainer
        vars(trainer).update(reported)
        # Else this rank's sums were logged, too.
        if trainer._globalstep_last_logged < trainer.state.global_step:
            trainer._tr_loss.fill_(own.get("loss", 0.0))
            trainer.current_flos = own.get("flos", 0)
