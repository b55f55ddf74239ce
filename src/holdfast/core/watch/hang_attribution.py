"""The culprit of a hang: a pure function of the evidence, which also returns its confidence and its reason.

Theory. All ranks run the same program and meet in collectives, so the culprit is the rank that differs. The differences
are tried in this order:

- the process: it is stopped, or in an uninterruptible wait;
- the loop: a rank has left its loop while others are in a block of the same step or a later one;
- the count: a replacement has made more or fewer collectives between two steps than another rank, which has begun the
  next block;
- the collective: all ranks of one group must run the same collectives in the same order;
- the position: a rank has not reached the position in the step where all others wait, or has passed it;
- the device, if hosts queue collectives and do not wait for them;
- the work: a rank computes while all others sleep.

If no rank differs, no rank is killed. If all ranks compute, the job is slow and not stuck. If all ranks wait, a fence
frees them and they run the step again.

Invariants:
1. No rank is named without a reason that can be checked by hand against the evidence.
2. Several ranks at one position are killed together only if the evidence against each of them is enough alone. A
   majority of the ranks is never killed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from holdfast.core.decide.unmatched_collectives import RankSeen, unmatched
from holdfast.core.protocol.health_messages import DeviceSeen, RankEvidence

Confidence = Literal["certain", "likely", "unclear"]
Answer = Literal["kill", "retry", "wait"]

BUSY = 0.5  # a process computes if it used at least this share of a core during the inspection
CROWDED = 0.2  # the same limit for a process in state R (running): its host may be overloaded
PLACE: dict[str, float] = {
    "resuming": 0.5, "save": 0, "ready": 0, "section": 0, "loading": 0, "meet": 0.75,
    "forward": 1, "backward": 2, "vote": 3, "update": 4, "commit": 5,
}  # fmt: skip
"""Order of the phases within a step. Phases that may come between two steps in any order have the same number."""
OUT = frozenset({"aborted", "in_doubt", "torn", "finished", "left"})
STOPPED = frozenset("Tt")
LEAVING = frozenset({"ready", "save", "finished"})
"""Phases of a rank whose session is about to end."""


class HangVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on a hang: the answer, the ranks, the confidence and the reason.

    The answer is to kill ``ranks``, to let all ranks try again, or to wait because no rank is stuck.
    """

    answer: Answer
    ranks: tuple[int, ...] = ()
    confidence: Confidence = "unclear"
    reason: str
    by_process: bool = False  # the state of the process is the reason, for any code that it runs


def blame(evidence: Sequence[RankEvidence]) -> HangVerdict:
    """Return the verdict on the ranks of a stalled job, from the evidence about each rank."""
    seen = [e for e in evidence if e.phase not in OUT]
    if not seen:
        return HangVerdict(answer="wait", reason="every rank waits for the control plane")
    found = (
        _by_process(seen)
        or _by_leaving(evidence)
        or _by_count(seen)
        or _by_collective(seen)
        or _by_skipping(seen)
        or _by_place(seen)
        or _by_device(seen)
        or _by_work(seen)
    )
    if found is not None:
        return found
    if all(_computes(e) for e in seen):
        reason = f"{_count(seen)} compute at the same place ({where(seen[0])}): slow, not stuck"
        return HangVerdict(answer="wait", reason=reason)
    if len(seen) == 1:
        one = seen[0]
        return HangVerdict(
            answer="kill",
            ranks=(one.rank,),
            confidence="likely",
            reason=f"it neither moves nor computes in {where(one)}",
        )
    return HangVerdict(answer="retry", reason=f"{_count(seen)} wait at the same place ({where(seen[0])})")


def where(one: RankEvidence) -> str:
    """Return the position of a rank as text, for example ``backward of step 20, collective 3``."""
    if one.phase == "starting" and one.sequence:
        return f"collective {one.sequence} of a script without a session"
    if one.phase == "starting":
        return "its start"
    if one.phase == "resuming":
        return f"its return to step {one.step}"
    if one.phase == "after":
        return "what follows the training"
    name = f"section {one.section!r}" if one.phase == "section" else one.phase
    place = f"{name} of step {one.step}"
    return f"{place}, collective {one.sequence}" if PLACE.get(one.phase) and one.sequence else place


def _by_process(seen: Sequence[RankEvidence]) -> HangVerdict | None:
    for states, what in (
        (STOPPED, "its process is stopped"),
        (frozenset("D"), "it is in an uninterruptible wait"),
    ):
        found = [e for e in seen if e.process in states or (e.child and states is STOPPED)]
        if found and 2 * len(found) <= max(len(seen), 2):
            return HangVerdict(
                answer="kill",
                ranks=_ranks(found),
                confidence="certain",
                by_process=True,
                reason=f"{_state(found[0], what)}, in {where(found[0])}",
            )
        if found and states is STOPPED:
            return HangVerdict(answer="wait", reason=f"{len(found)} of {len(seen)} processes are stopped")
    return None


def _state(one: RankEvidence, what: str) -> str:
    if one.child:
        return f"its {'data loader' if one.phase == 'loading' else 'child'} process {one.child} is stopped"
    detail = f" ({one.wchan})" if one.wchan not in ("", "0") else ""
    return f"{what} (state {one.process}){detail}"


def _by_leaving(evidence: Sequence[RankEvidence]) -> HangVerdict | None:
    """Return a verdict against ranks that left their loop while others run the block of the same or a later step."""
    inside = [e for e in evidence if not e.left and PLACE.get(e.phase, 0) >= 1]
    left = [e for e in evidence if e.left and e.phase in LEAVING and any(e.step <= i.step for i in inside)]
    if not left or 2 * len(left) > len(left) + len(inside):
        return None
    reason = f"it has left its loop at step {left[0].step}, {_others(len(inside), 'is', 'are')} in {where(inside[0])}"
    return HangVerdict(answer="kill", ranks=_ranks(left), confidence="certain", reason=reason)


def _by_count(seen: Sequence[RankEvidence]) -> HangVerdict | None:
    """Return a verdict against a replacement whose collectives between two steps are not those of the other ranks."""
    generations = [e.outside.generation for e in seen if e.outside is not None]
    if not generations:
        return None
    ranks = (
        RankSeen(e.rank, e.member_id, PLACE.get(e.phase, 0) > 0 or e.meets, e.step, e.outside) for e in seen
    )
    found = unmatched(max(generations), ranks)
    if found is None:
        return None
    reason = found.what.partition("\n")[0]
    return HangVerdict(answer="kill", ranks=(found.rank,), confidence="certain", reason=reason)


def _by_skipping(seen: Sequence[RankEvidence]) -> HangVerdict | None:
    """Return a verdict against ranks that passed a collective of their group without running it."""
    for one in seen:
        stuck = next((c for c in one.collectives if c.under_way and c.number), None)
        if stuck is None or one.sequence > one.usual_sequence:
            continue
        past = [e for e in seen if _place(e) > _place(one) and e.sequence < one.sequence]
        odd = [e for e in past if 0 < _made(e, stuck.group) < stuck.number]
        if odd and 2 * len(odd) <= len(seen):
            reason = (
                f"it has left out collective #{stuck.number} of group {stuck.group} ({stuck.what}) and is in "
                f"{where(odd[0])}, {_others(len(seen) - len(odd), 'waits', 'wait')} in {where(one)}"
            )
            return HangVerdict(answer="kill", ranks=_ranks(odd), confidence="likely", reason=reason)
    return None


def _place(one: RankEvidence) -> tuple[int, float]:
    return one.step, PLACE.get(one.phase, 0)


def _made(one: RankEvidence, group: str) -> int:
    """Return the number of the newest collective of ``group`` that this rank has begun; 0 if none is known."""
    return max((c.number for c in one.collectives if c.group == group), default=0)


def _by_collective(seen: Sequence[RankEvidence]) -> HangVerdict | None:
    """Return a verdict against ranks whose collective differs from the majority's collective of the same number."""
    made: dict[tuple[str, int], dict[int, str]] = {}
    stuck = {(c.group, c.number) for e in seen for c in e.collectives if c.under_way and c.number}
    for one in seen:
        for each in one.collectives:
            if (each.group, each.number) in stuck:
                made.setdefault((each.group, each.number), {})[one.rank] = each.what
    for (group, number), by_rank in sorted(made.items(), key=lambda item: item[0][1]):
        counts = Counter(by_rank.values())
        if len(counts) < 2:
            continue
        usual, most = counts.most_common(1)[0]
        odd = tuple(sorted(rank for rank, what in by_rank.items() if what != usual))
        where_ = f"collective #{number} of group {group}"
        if 2 * most > len(by_rank):
            reason = f"{where_}: it is in {by_rank[odd[0]]}, {most} others are in {usual}"
            return HangVerdict(answer="kill", ranks=odd, confidence="likely", reason=reason)
        each_ = "; ".join(f"rank {rank} is in {what}" for rank, what in sorted(by_rank.items())[:4])
        return HangVerdict(answer="retry", reason=f"{where_} is not the same everywhere: {each_}")
    return None


def _by_place(seen: Sequence[RankEvidence]) -> HangVerdict | None:
    counted = len({e.usual_sequence for e in seen}) == 1
    places = {e.rank: (e.step, PLACE.get(e.phase, 0), e.sequence if counted else 0) for e in seen}
    if len(set(places.values())) < 2:
        return None
    order = sorted(set(places.values()))
    behind = [e for e in seen if places[e.rank] == order[0]]
    ahead = [e for e in seen if places[e.rank] == order[-1]]
    if 2 * len(behind) <= len(seen):
        odd, others = behind, len(seen) - len(behind)
        reason = f"it is in {where(behind[0])}, {_others(others)} got to {where(ahead[0])}"
        if behind[0].phase == "loading":
            reason = f"it waits for its data loader: {reason}"
        sure: Confidence = "certain" if len(order) == 2 else "likely"
    else:
        odd, sure = ahead, "likely"
        reason = (
            f"it has reached {where(ahead[0])}, "
            f"{_others(len(seen) - len(ahead), 'waits', 'wait')} in {where(behind[0])}"
        )
    if len(odd) == 1:
        return HangVerdict(answer="kill", ranks=_ranks(odd), confidence=sure, reason=reason)
    busy = [e for e in odd if _computes(e)]
    if busy:
        return HangVerdict(
            answer="kill", ranks=_ranks(busy), confidence="likely", reason=f"{reason}, and it computes"
        )
    # One of ``odd`` delays the others of its group, and nothing shows which. A fence frees ranks that only wait.
    return HangVerdict(answer="retry", reason=f"one of ranks {', '.join(map(str, _ranks(odd)))}: {reason}")


def _by_device(seen: Sequence[RankEvidence]) -> HangVerdict | None:
    """Return a verdict against a rank whose device has not reached a collective in which other devices wait."""
    groups: dict[str, dict[int, DeviceSeen]] = {}
    for one in seen:
        for each in one.devices:
            groups.setdefault(each.group, {})[one.rank] = each
    inside = {r for by_rank in groups.values() for r, d in by_rank.items() if d.begun > d.ended}
    late: dict[int, str] = {}
    for group, by_rank in sorted(groups.items()):
        oldest = min(d.ended for d in by_rank.values()) + 1
        waits = next((d for d in by_rank.values() if d.ended + 1 == oldest and d.given >= oldest), None)
        if waits is None:
            continue
        begun = any(d.begun >= oldest for d in by_rank.values() if d.ended < oldest)
        for rank, device in by_rank.items():
            name = f"collective #{oldest} ({waits.what}) of group {group}"
            if device.given < oldest:
                late.setdefault(rank, f"its device has not been given {name}, in which others wait")
            elif begun and device.begun < oldest:
                late.setdefault(rank, f"its device has not begun {name}, in which others wait")
    odd = sorted(late.keys() - inside)  # a device that waits in another collective delays no other
    if len(odd) == 1 and 2 <= len(seen):
        return HangVerdict(answer="kill", ranks=tuple(odd), confidence="likely", reason=late[odd[0]])
    if odd:
        return HangVerdict(answer="retry", reason=f"one of ranks {', '.join(map(str, odd))}: {late[odd[0]]}")
    if inside and len(inside) == len(seen):
        return HangVerdict(answer="retry", reason=f"the devices of {_count(seen)} are in collectives")
    return None


def _by_work(seen: Sequence[RankEvidence]) -> HangVerdict | None:
    busy = [e for e in seen if _computes(e)]
    if busy and 2 * len(busy) <= len(seen):
        reason = f"it computes in {where(busy[0])} ({busy[0].cpu:.0%} of a core) while all others wait there"
        return HangVerdict(answer="kill", ranks=_ranks(busy), confidence="likely", reason=reason)
    return None


def _computes(one: RankEvidence) -> bool:
    return one.cpu >= (CROWDED if one.process == "R" else BUSY)


def _ranks(found: Sequence[RankEvidence]) -> tuple[int, ...]:
    return tuple(sorted(e.rank for e in found))


def _others(count: int, does: str = "", do: str = "") -> str:
    """Return a text such as ``3 others wait``, for the other ranks and their activity."""
    return f"the other {does}".rstrip() if count == 1 else f"{count} others {do}".rstrip()


def _count(seen: Sequence[RankEvidence]) -> str:
    return "the only rank" if len(seen) == 1 else f"all {len(seen)} ranks"
