"""The handling of copies of the state that differ: a majority of the holders identifies the wrong copy by its digest.

Theory. A vote shows that copies differ, but not which copy is wrong. Every rank therefore sends the digests of its
state, which is divided into the same parts on all ranks. If a majority of three or more holders agrees, the others are
wrong. Of two holders, either may be wrong. The name of the wrong rank matters only for the report and the kill. The
gradients of a wrong weight have already reached all ranks, so no living state is trusted. The job returns to a state
whose copies were compared, and computes the later steps again.

Invariants:
1. From the first report on, no state in a living process or in memory is used, until all ranks are new workers that
   start from a compared state.
2. A rank is killed for a wrong copy only when a majority of the holders of one part disagrees with it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping

import msgspec

from holdfast.core.decide.stop_policy import CORRUPTION, Failure
from holdfast.core.ids import NO_GENERATION, Generation
from holdfast.core.job.completion import AllOf
from holdfast.core.job.fault import Fault
from holdfast.core.job.job_state import Job
from holdfast.core.job.membership import Member
from holdfast.core.job.recovery import Recovery
from holdfast.core.protocol.health_messages import CopiesDiffer, CopyDigest, StateDigests, ranks_of
from holdfast.text import noun_of, plural

PLACES_MAX = 16


class Suspects(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks that may hold a wrong copy of the state.

    ``certain``: a majority of the holders shows that each of ``ranks`` is wrong; otherwise any of them may be wrong.
    """

    ranks: tuple[int, ...]
    certain: bool
    places: tuple[str, ...]  # the parts that differ, one line each


def suspects(reported: Mapping[int, tuple[CopyDigest, ...]], asked: Collection[int]) -> Suspects:
    """Compare the digests of the ranks part by part. Return the ranks with a wrong copy.

    Args:
        reported: the digests of each rank that has sent some.
        asked: all ranks that were asked for digests. A majority is counted among the holders that are in ``asked``.
    """
    places: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
    for rank, copies in sorted(reported.items()):
        for copy in copies:
            places[copy.holders, copy.what][rank] = copy.digest
    members = frozenset(asked)
    odd: set[int] = set()
    either: set[int] = set()
    lines = []
    for (holders, what), digests in sorted(places.items()):
        counts = Counter(digests.values())
        if len(counts) < 2:
            continue
        digest, most = counts.most_common(1)[0]
        wrong = {rank for rank, other in digests.items() if other != digest}
        voters = sum(rank in members for rank in ranks_of(holders))
        if 2 * most > voters:
            odd |= wrong
            lines.append(f"{what}: {_ranks(wrong)} against {most} of {plural(voters, 'rank')} that hold it")
        else:
            either |= set(digests)
            lines.append(
                f"{what}: {_ranks(set(digests))} differ, no majority of {plural(voters, 'rank')} that hold it"
            )
    ranks = odd or either
    return Suspects(ranks=tuple(sorted(ranks)), certain=bool(odd), places=tuple(lines[:PLACES_MAX]))


class Corruption:
    """The part of the controller that handles differing copies of the state.

    It shares the facts of the run (``job``) with the controller.
    """

    def __init__(self, job: Job, recovery: Recovery) -> None:
        self.job = job
        self.recovery = recovery
        self._generation: Generation = NO_GENERATION
        self._reported: dict[int, CopiesDiffer] = {}
        self._judged = False
        self._rollcall = AllOf()

    def differ(self, now: float, member: Member, event: CopiesDiffer) -> None:
        """Handle the digests that a rank sends after a vote found differing copies."""
        job = self.job
        if event.generation != job.roster.generation:
            return
        if event.generation != self._generation:
            self._generation, self._reported, self._judged = event.generation, {}, False
            job.distrust(event.step, member.rank)
            job.timer("copies", job.config.fault_grace_s)
        self._reported[member.rank] = event
        if self._rollcall.all(job.roster.living, lambda m: m.rank in self._reported):
            self._judge(now)

    def vouched(self, now: float, member: Member, event: StateDigests) -> None:
        """Handle the digests of a state that a source is about to save or to give to replacements."""
        if event.generation != self.job.generation:
            return
        digests = self.recovery.digests_reported(member.rank, event)
        if digests is None:
            return
        reported = {rank: each.copies for rank, each in digests.items()}
        found = suspects(reported, reported)
        if not found.ranks:
            self.recovery.digests_equal()
            return
        self.job.distrust(event.step, found.ranks[0])
        if self.job.ends is not None and self.job.ends.action == "stop_bad_input" and not found.certain:
            # The copies differ because of a mistake in the script, which is reported already. Only the save is refused.
            self.recovery.fence(now, f"nothing is saved: {self.job.unequal}")
            return
        self._accuse(now, found, event.step)

    def tick(self, now: float, name: str) -> bool:
        """End the wait for the digests of all ranks (timer ``copies``). Return False if ``name`` is another timer."""
        if name != "copies":
            return False
        if self._generation == self.job.roster.generation:  # otherwise the reporting workers have ended
            self._judge(now)
        return True

    def _judge(self, now: float) -> None:
        job = self.job
        if self._judged:
            return
        self._judged = True
        job.cancel("copies")
        living = [m.rank for m in job.roster.living]
        found = suspects({rank: event.copies for rank, event in self._reported.items()}, living)
        if not found.ranks:
            found = msgspec.structs.replace(found, ranks=tuple(sorted(self._reported)))
        self._accuse(now, found, min(event.step for event in self._reported.values()))

    def _accuse(self, now: float, found: Suspects, step: int) -> None:
        job = self.job
        members = {m.rank: m for m in job.roster.members}
        ranks = found.ranks
        job.record(
            "corrupted",
            ranks=list(ranks),
            nodes=[str(members[rank].node_id) for rank in ranks],
            certain=found.certain,
            step=step,
            sealed_step=job.sealed_step,
            evidence=list(found.places),
        )
        named = ranks if found.certain else ranks[:1]
        for rank in named:
            member = members[rank]
            self.recovery.fault(now, _fault(now, member, found, ranks, step, job.roster.generation.pack()))
            if found.certain:
                job.kill(member, "holds a wrong copy of the state", excused=True)


def _fault(
    now: float, member: Member, found: Suspects, ranks: tuple[int, ...], step: int, occurrence: int
) -> Fault:
    # Where a weight differs, its state in the optimizer differs as a consequence.
    place = min(
        found.places,
        key=lambda each: each.startswith("optimizer."),
        default="no rank has reported which copies differ",
    )
    who = "" if found.certain else f"or another of ranks {_text(set(ranks))} "
    what = f"{who}holds a wrong copy of the state: {place}"
    if place.startswith("optimizer."):
        what += "; state that an optimizer cuts for each rank must be declared: holdfast.torch.declare()"
    elif not found.certain:
        what += (
            "; where each rank has other values, they are parts of a larger weight, which must be declared "
            "(holdfast.torch.declare()), or other weights, which need other names"
        )
    digest = f"copies differ {'.'.join(map(str, ranks))}"
    failure = Failure(
        rank=member.rank, step=step, kind=CORRUPTION, what=what, digest=digest, occurrence=occurrence
    )
    fault = Fault.of(member, "corruption", what, now, failure)
    fault.step, fault.sure = step, found.certain
    return fault


def _ranks(ranks: set[int]) -> str:
    return f"{noun_of(len(ranks), 'rank')} {_text(ranks)}"


def _text(ranks: set[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
