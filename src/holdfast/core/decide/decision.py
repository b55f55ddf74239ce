"""The decision rule: the step at which the job continues, given the state and step of each rank of the old generation.

Theory. An update is applied only after every rank has voted for it. So if any rank has begun the update of step s,
every rank has complete gradients for s, and the ranks in doubt can make the update. If no rank has begun it, no rank
has changed a parameter, and all can discard step s. Therefore all survivors can reach one step: the newest one that a
report proves to be done or decided.

Invariants:
1. The decided step is never below a step that a report proves to be committed. If the update of step s is the newest
   one that some rank has begun, the decided step is at most s + 1.
2. Only living ranks that are at the decided step, or can be brought to it, are sources.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from holdfast.core.protocol.messages import RankState

STANDS: dict[RankState, str] = {
    "starting": "is on its way to step",
    "ready": "stands before step",
    "compute": "was in step",
    "voting": "was in the vote of step",
    "updating": "was in the update of step",
    "in_doubt": "has not heard the vote of step",
    "aborted": "has left, undone, step",
    "torn": "was cut off in the update of step",
    "finished": "has finished at step",
}


class RankReport(NamedTuple):
    """The state and step of one rank of the old generation, from its answer to the fence or its status page."""

    rank: int
    state: RankState
    step: int
    alive: bool

    def __str__(self) -> str:
        life = "" if self.alive else "dead "
        return f"{life}rank {self.rank} {STANDS[self.state]} {self.step}"


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The step at which the job continues, and the ranks that can serve its state (``sources``).

    ``step`` is None if no rank has opened a session.
    """

    step: int | None
    direction: Literal["forward", "back", "none"]
    in_doubt: int
    sources: tuple[int, ...]
    sound: bool  # every living rank is at the step or can be brought there
    evidence: tuple[str, ...]


def stands_in(ranks: tuple[int, ...], rank: int) -> bool:
    """Return True if ``rank`` is one of the sorted ``ranks``.

    The search is binary, because a job may have many ranks.
    """
    place = bisect_left(ranks, rank)
    return place < len(ranks) and ranks[place] == rank


def committed_floor(report: RankReport) -> int | None:
    """Return the number of updates that ``report`` proves to be done or decided; None if it proves nothing."""
    if report.state == "starting":
        return None
    return report.step + (1 if report.state in ("updating", "torn") else 0)


def decide(reports: Sequence[RankReport], sealed_step: int = -1) -> Decision:
    """Decide the step at which the job continues.

    Args:
        reports: one per rank of the old generation; for a dead rank from its status page. Dead ranks without a page are
            missing.
        sealed_step: newest step whose checkpoint the generation of these ranks has sealed, -1 for none.

    Returns:
        The step, the ranks that can serve its state, and the evidence.
    """
    floors = [floor for floor in map(committed_floor, reports) if floor is not None]
    in_doubt = [r for r in reports if r.alive and r.state == "in_doubt"]
    if not floors:
        return Decision(step=None, direction="none", in_doubt=0, sources=(), sound=False, evidence=())
    step = max(floors)
    sealed_ahead = bool(in_doubt) and sealed_step == step + 1 and all(r.step == step for r in in_doubt)
    if sealed_ahead and not any(r.alive and r.state in ("ready", "aborted", "finished") for r in reports):
        step = sealed_step
    here = [
        r
        for r in reports
        if r.alive
        and (
            (r.state in ("ready", "aborted", "finished") and r.step == step)
            or (r.state == "in_doubt" and r.step in (step, step - 1))
        )
    ]
    forward = any(r.step == step - 1 for r in in_doubt)
    proofs = [str(r) for r in reports if committed_floor(r) == step and r.state != "in_doubt"]
    if sealed_step == step:
        proofs.append(f"a checkpoint of step {step} is saved")
    return Decision(
        step=step,
        direction="forward" if forward else "back" if in_doubt else "none",
        in_doubt=len(in_doubt),
        sources=tuple(sorted(r.rank for r in here)),
        sound=len(here) == sum(r.alive for r in reports),
        evidence=tuple(proofs[:8] if in_doubt or not here else proofs[:1]),
    )
