"""Bounded exhaustive search: every order of messages, votes and deaths of a few ranks around one step.

Theory. A state consists of the step machines, the vote of each rank, the messages in flight (in order per link), and
the fence and decision of the coordinator. The search takes every possible action from each state, and skips states that
it has already visited. The table of the step machine, the decision rule, and the test for outdated messages are the
real ones. The coordinator models the fencing part of ``core.job.recovery`` without timers. The coordinator may notice a
death at any moment after it. A second death starts the recovery again.

Invariants checked in every state:
1. No rank updates a step that another rank of the same generation has discarded.
2. After the decision, every living rank that is not torn can reach the decided step, and no rank is at a later step.
3. A step that a rank committed is never discarded while a living rank has its state or can apply its update.
4. A decision is made only when every living rank is fenced by the newest generation.
5. At the end of every order of events, all living ranks are at one step (or torn, or all ranks are dead).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from holdfast.core.decide.decision import RankReport, committed_floor, decide
from holdfast.core.ids import Generation
from holdfast.core.job.membership import is_stale
from holdfast.core.protocol.messages import RankState
from holdfast.core.worker.step import TRANSITIONS, StepEvent
from holdfast.sim.invariants import Violation

STEP = 5
_TABLE: dict[tuple[RankState, StepEvent, bool], RankState] = {
    (t.state, t.event, fenced): t.target
    for t in TRANSITIONS
    for fenced in (False, True)
    if t.when == "any" or (t.when == "fenced") == fenced
}


class RankNow(NamedTuple):
    """One rank in a state of the search. ``fence`` is the number of the newest fence that it has received, or 0."""

    state: RankState = "ready"
    step: int = STEP
    fence: int = 0
    alive: bool = True
    passed: bool = False  # the vote completed, and this rank has not received the result yet

    def on(self, event: StepEvent) -> RankNow | None:
        """Return the rank after ``event``, or None if the table of the step machine does not allow this event now."""
        target = _TABLE.get((self.state, event, self.fence > 0))
        if target is None:
            return None
        return self._replace(state=target, step=self.step + (event is StepEvent.END))


class Mail(NamedTuple):
    """A message between the coordinator and a rank.

    Attributes:
        kind: ``fence`` (an order to a rank), ``settle`` (the decision, to a rank) or ``settled`` (a rank's report).
        generation: number of the fence to which the message belongs.
        state: state of the rank in its report.
        step: step of the rank in its report, or the decided step.
    """

    kind: str
    generation: int
    state: RankState = "ready"
    step: int = 0


class CheckedState(NamedTuple):
    """One state of all ranks, the coordinator and the messages between them.

    Attributes:
        ranks: all ranks.
        up: for each rank, the queue of its messages to the coordinator.
        down: for each rank, the queue of messages that the coordinator sent to it.
        known: for each rank, True if the coordinator knows that the rank is dead.
        reports: for each rank, its report under the present fence; None if it has not reported.
        fence: number of the newest fence that the coordinator has sent; 0 if there is none.
        decided: the decided step; -1 if there is no decision yet.
        deaths: number of ranks that have died.
        updated: True if a rank has entered the update of ``STEP``, the step that the search is about.
        discarded: True if a decision has made a rank discard this step.
    """

    ranks: tuple[RankNow, ...]
    up: tuple[tuple[Mail, ...], ...]
    down: tuple[tuple[Mail, ...], ...]
    known: tuple[bool, ...]
    reports: tuple[Mail | None, ...]
    fence: int = 0
    decided: int = -1
    deaths: int = 0
    updated: bool = False
    discarded: bool = False


class SearchResult(NamedTuple):
    """The result of a search.

    Attributes:
        states: number of visited states.
        ends: number of states in which no further action is possible.
        forward: number of decisions that make ranks in doubt apply the update.
        back: number of decisions that make ranks in doubt discard the update.
    """

    states: int
    ends: int
    forward: int
    back: int


def search(ranks: int = 3, deaths: int = 1, states_max: int = 2_000_000) -> SearchResult:
    """Visit every reachable state of a job around one step.

    Args:
        ranks: number of ranks.
        deaths: largest number of ranks that die in one order of events.
        states_max: largest number of states to visit.

    Raises:
        Violation: an invariant is broken (the text contains the state), or there are more states than ``states_max``.
    """
    empty: tuple[tuple[Mail, ...], ...] = ((),) * ranks
    first = CheckedState((RankNow(),) * ranks, empty, empty, (False,) * ranks, (None,) * ranks)
    seen = {first}
    todo = deque([first])
    ends = forward = back = 0
    while todo:
        state = todo.popleft()
        followers = list(_actions(state, deaths))
        if not followers:
            _check_end(state)
            ends += 1
        for follower in followers:
            if (
                follower.decided >= 0
                and state.decided < 0
                and any(r.state == "in_doubt" for r in state.ranks)
            ):
                forward += follower.decided > STEP
                back += follower.decided == STEP
            if follower not in seen:
                _check(follower)
                seen.add(follower)
                todo.append(follower)
        if len(seen) > states_max:
            raise Violation("search_is_bounded", f"more than {states_max} states")
    return SearchResult(len(seen), ends, forward, back)


def _actions(state: CheckedState, deaths: int) -> Iterator[CheckedState]:
    for i, rank in enumerate(state.ranks):
        if rank.alive:
            yield from _rank_actions(state, i, rank)
            if state.deaths < deaths:
                yield _with_rank(state, i, rank._replace(alive=False))._replace(deaths=state.deaths + 1)
        elif not state.known[i] and not state.up[i]:
            yield _death_noticed(state, i)
        if state.up[i]:
            yield _report_heard(state, i)


def _rank_actions(state: CheckedState, i: int, rank: RankNow) -> Iterator[CheckedState]:
    if state.down[i]:
        yield _order_heard(state, i)
    if rank.state == "ready" and rank.step == STEP and not rank.fence:
        yield _moved(state, i, rank.on(StepEvent.BEGIN))
    elif rank.state == "compute":
        yield _vote_entered(state, i)
        if any(not r.alive for r in state.ranks):
            yield _moved(state, i, rank.on(StepEvent.FAIL))
    elif rank.state == "voting":
        if rank.passed:
            yield _moved(state, i, rank.on(StepEvent.PASSED))
        if any(not r.alive for r in state.ranks) or rank.fence:
            yield _moved(state, i, rank.on(StepEvent.BROKEN))
    elif rank.state == "updating":
        yield _moved(state, i, rank.on(StepEvent.END))
        yield _moved(state, i, rank.on(StepEvent.FAIL))


def _with_rank(state: CheckedState, i: int, rank: RankNow) -> CheckedState:
    return state._replace(ranks=(*state.ranks[:i], rank, *state.ranks[i + 1 :]))


def _put(boxes: tuple[tuple[Mail, ...], ...], i: int, mail: Mail) -> tuple[tuple[Mail, ...], ...]:
    return (*boxes[:i], (*boxes[i], mail), *boxes[i + 1 :])


def _moved(state: CheckedState, i: int, rank: RankNow | None) -> CheckedState:
    """Return ``state`` with rank ``i`` replaced by ``rank``.

    If the rank is fenced and has settled, its report to the coordinator is also queued.

    Raises:
        Violation: ``rank`` is None, because the table of the step machine has no row for the event.
    """
    if rank is None:
        raise Violation("table_has_the_row", f"rank {i} in {state}")
    after = _with_rank(state, i, rank)
    if rank.state == "updating" and rank.step == STEP:
        after = after._replace(updated=True)
    if rank.fence and rank.state in ("ready", "aborted", "in_doubt", "torn"):
        after = after._replace(up=_put(after.up, i, Mail("settled", rank.fence, rank.state, rank.step)))
    return after


def _vote_entered(state: CheckedState, i: int) -> CheckedState:
    rank = state.ranks[i].on(StepEvent.VOTE)
    if rank is None:
        raise Violation("table_has_the_row", f"vote of rank {i} in {state}")
    after = _with_rank(state, i, rank)
    if all(r.state == "voting" and r.alive for r in after.ranks):
        after = after._replace(ranks=tuple(r._replace(passed=True) for r in after.ranks))
    return after


def _death_noticed(state: CheckedState, i: int) -> CheckedState:
    known = (*state.known[:i], True, *state.known[i + 1 :])
    after = state._replace(known=known)
    if state.fence and state.decided < 0:
        return _decided_if_settled(after)
    after = after._replace(fence=state.fence + 1, decided=-1, reports=(None,) * len(state.ranks))
    for j in range(len(state.ranks)):
        if not known[j]:
            after = after._replace(down=_put(after.down, j, Mail("fence", after.fence)))
    return _decided_if_settled(after)


def _report_heard(state: CheckedState, i: int) -> CheckedState:
    mail, rest = state.up[i][0], state.up[i][1:]
    after = state._replace(up=(*state.up[:i], rest, *state.up[i + 1 :]))
    if is_stale(Generation(1, mail.generation), Generation(1, state.fence)) or state.known[i]:
        return after
    if state.decided >= 0:
        return after
    reports = (*state.reports[:i], mail, *state.reports[i + 1 :])
    return _decided_if_settled(after._replace(reports=reports))


def _decided_if_settled(state: CheckedState) -> CheckedState:
    if not state.fence or not all(
        k or r is not None for k, r in zip(state.known, state.reports, strict=True)
    ):
        return state
    found = []
    for i, (rank, report) in enumerate(zip(state.ranks, state.reports, strict=True)):
        if state.known[i]:
            found.append(RankReport(i, rank.state, rank.step, False))
        elif report is not None:
            if rank.alive and rank.fence != state.fence:
                raise Violation("decided_after_all_settled", f"rank {i} in {state}")
            found.append(RankReport(i, report.state, report.step, True))
    decided = decide(found)
    assert decided.step is not None
    after = state._replace(decided=decided.step)
    for source in decided.sources:
        mail = Mail("settle", state.fence, step=decided.step)
        after = after._replace(down=_put(after.down, source, mail))
    return after


def _order_heard(state: CheckedState, i: int) -> CheckedState:
    mail, rest = state.down[i][0], state.down[i][1:]
    rank = state.ranks[i]
    after = state._replace(down=(*state.down[:i], rest, *state.down[i + 1 :]))
    if mail.kind == "fence":
        free = rank._replace(fence=0) if rank.state == "compute" else rank._replace(fence=mail.generation)
        fenced = free.on(StepEvent.FENCE)
        return _moved(after, i, None if fenced is None else fenced._replace(fence=mail.generation))
    if mail.generation < rank.fence or rank.state != "in_doubt":
        return after
    if mail.step > rank.step:
        return _moved(after, i, rank.on(StepEvent.APPLY))
    return _moved(after._replace(discarded=True), i, rank.on(StepEvent.DISCARD))


def _check(state: CheckedState) -> None:
    if state.updated and state.discarded:
        raise Violation("one_fate_per_step", str(state))
    if state.decided >= 0:
        floors = [committed_floor(RankReport(i, r.state, r.step, r.alive)) for i, r in enumerate(state.ranks)]
        above = [f for f in floors if f is not None and f > state.decided]
        if above:
            raise Violation("decision_is_true", str(state))


def _check_end(state: CheckedState) -> None:
    places = {(r.state, r.step) for r in state.ranks if r.alive}
    steps = {step for where, step in places if where in ("ready", "aborted")}
    stuck = {where for where, _ in places} - {"ready", "aborted", "torn"}
    if stuck or len(steps) > 1:
        raise Violation("every_path_ends", str(state))
