"""What a user sees of a run: the committed steps of each rank, with the digest of their loss.

Theory. The loss of a step is a function of the state before it and of the gradients of all ranks, so a step that is
made again has the digest that it had before, and all ranks see those of the run without faults. A rank whose process
was lost inside an update may never have shown that step, although the job has made it; a rank that a smaller job did
not have has not shown the steps of that job.

Invariants:
1. A rank commits step k only after it, or processes of its rank before it, have shown every step before k.
2. The digest of step k is that of the undisturbed run.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from holdfast.core.ids import MemberId
from holdfast.core.worker.step import StepMachine
from holdfast.sim.invariants import Violation

OWED = ("voting", "updating", "in_doubt", "torn", "aborted")


class Trainer(Protocol):
    """What the history needs of a rank."""

    @property
    def member_id(self) -> MemberId: ...
    @property
    def rank(self) -> int: ...
    @property
    def alive(self) -> bool: ...
    @property
    def machine(self) -> StepMachine: ...


class Contribution(NamedTuple):
    """The gradients of one rank: the updates that its parameters held when it made them."""

    rank: int
    applied: int | None


class StepHistory:
    """The committed steps of all ranks."""

    def __init__(self) -> None:
        self._shown: dict[int, int] = {}  # rank -> steps shown without a gap
        self._lives: dict[int, list[Trainer]] = {}
        self._next: dict[MemberId, int] = {}
        self._fewest: dict[int, int] = {}  # step -> ranks that made it, at the least

    def commits(self, worker: Trainer, step: int, loss: tuple[Contribution, ...], ranks: int) -> None:
        """A rank has committed ``step`` with this loss, in a job of so many ranks.

        Raises:
            Violation: a user would see a gap, or another loss than without faults.
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
        """The job starts again in another run, whose processes have other names."""
        self._next.clear()

    def begins(self, worker: Trainer) -> None:
        """Record that a new process of a rank exists."""
        self._lives.setdefault(worker.rank, []).append(worker)

    def ends(self, step: int, ranks: int) -> None:
        """Training is done at ``step``: every rank has shown all of it.

        Raises:
            Violation: a step is missing.
        """
        for rank in range(ranks):
            shown = self._shown.get(rank, 0)
            while shown < step and self._is_owed(None, shown, rank):
                shown += 1
            if shown < step:
                raise Violation("no_gap_in_the_history", f"rank {rank} ends with {shown} of {step} steps")

    def _is_owed(self, worker: Trainer | None, step: int, rank: int = -1) -> bool:
        """A process of this rank, not this one, was lost in ``step``: the job may have made it without showing it."""
        rank = worker.rank if worker is not None else rank
        if rank >= self._fewest.get(step, rank + 1):
            return True  # a job of fewer ranks made it
        lives = self._lives.get(rank, [])
        return any(
            life is not worker and life.machine.step == step and life.machine.state in OWED for life in lives
        )
