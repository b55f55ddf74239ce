"""The committed steps of each rank with their losses, as a user sees them in the output of a simulated run.

Theory. The loss of a step is a function of the state before the step and of the gradients of all ranks. A repeated step
therefore has the same loss as before, and every rank shows the losses of a run without faults. In two cases a rank does
not show a committed step: its process was lost inside the update, or the job committed the step with fewer ranks,
without this rank.

Invariants:
1. A rank commits step k only after this process, or earlier processes of the same rank, have shown every step before k.
2. The loss of step k is the loss of step k in a run without faults.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from holdfast.core.ids import MemberId
from holdfast.core.worker.step import StepMachine
from holdfast.sim.invariants import Violation

OWED = ("voting", "updating", "in_doubt", "torn", "aborted")


class Trainer(Protocol):
    """The attributes of a rank's process that the history reads."""

    @property
    def member_id(self) -> MemberId: ...
    @property
    def rank(self) -> int: ...
    @property
    def alive(self) -> bool: ...
    @property
    def machine(self) -> StepMachine: ...


class Contribution(NamedTuple):
    """The gradients of one rank in one step.

    ``applied`` is the number of updates that the rank's parameters contained when the gradients were computed; None if
    the parameters were then in the middle of a change. The simulation compares this number in place of the values of
    the gradients.
    """

    rank: int
    applied: int | None


class StepHistory:
    """The committed steps that the ranks of a simulated job have shown."""

    def __init__(self) -> None:
        self._shown: dict[int, int] = {}  # rank -> steps shown without a gap
        self._lives: dict[int, list[Trainer]] = {}
        self._next: dict[MemberId, int] = {}
        self._fewest: dict[int, int] = {}  # step -> the smallest number of ranks that committed it

    def commits(self, worker: Trainer, step: int, loss: tuple[Contribution, ...], ranks: int) -> None:
        """Record that a rank has committed ``step`` in a job of ``ranks`` ranks.

        Args:
            worker: the process of the rank.
            step: the step.
            loss: the gradients of all ranks that the update has used. They are compared in place of the loss.
            ranks: number of ranks of the job in this step.

        Raises:
            Violation: a user would see a missing step, or another loss than in a run without faults.
        """
        self._fewest[step] = min(ranks, self._fewest.get(step, ranks))
        undisturbed = tuple(Contribution(rank, step) for rank in range(ranks))
        if loss != undisturbed:
            raise Violation("loss_of_the_undisturbed_run", f"rank {worker.rank}, step {step}: {loss}")
        lives = self._lives.setdefault(worker.rank, [])
        if worker not in lives:
            lives.append(worker)
        shown = self._shown.get(worker.rank, 0)
        while shown < step and self._is_owed(worker, shown):
            shown += 1
        if step > shown:
            raise Violation(
                "no_gap_in_the_history", f"rank {worker.rank} shows step {step} after {shown - 1}"
            )
        expected = self._next.get(worker.member_id, step)
        if step > expected:
            raise Violation("no_gap_in_the_history", f"rank {worker.rank} shows {step}, {expected} was next")
        self._next[worker.member_id] = step + 1
        self._shown[worker.rank] = max(shown, step + 1)

    def requeued(self) -> None:
        """Record that the job starts again in a new run. Its processes have other member ids than before."""
        self._next.clear()

    def begins(self, worker: Trainer) -> None:
        """Record that a new process of a rank exists."""
        self._lives.setdefault(worker.rank, []).append(worker)

    def ends(self, step: int, ranks: int) -> None:
        """Check at the end of training, after ``step`` steps, that each of ``ranks`` ranks has shown all steps.

        Raises:
            Violation: a rank has not shown a step that it must have shown.
        """
        for rank in range(ranks):
            shown = self._shown.get(rank, 0)
            while shown < step and self._is_owed(None, shown, rank):
                shown += 1
            if shown < step:
                raise Violation("no_gap_in_the_history", f"rank {rank} ends with {shown} of {step} steps")

    def _is_owed(self, worker: Trainer | None, step: int, rank: int = -1) -> bool:
        """Return True if a rank need not have shown ``step``.

        This is the case if another process of the rank was lost in ``step``, or if a smaller job committed the step.

        ``worker`` is the present process of the rank. At the end of training it is None, and ``rank`` is given.
        """
        rank = worker.rank if worker is not None else rank
        if rank >= self._fewest.get(step, rank + 1):
            return True  # a job of fewer ranks committed the step
        lives = self._lives.get(rank, [])
        return any(
            life is not worker and life.machine.step == step and life.machine.state in OWED for life in lives
        )
