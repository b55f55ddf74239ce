"""Nodes that will leave while other nodes of the job stay: by a notice, or because their launcher must end or has died.

Theory. ``core/job/leaving.py`` decides about a node each time the facts may have changed. A move of ranks has three
parts. First, new processes for the ranks are built on other nodes while the old processes train. Second, all ranks
agree by a vote to stop at the end of a step. Third, the old processes are killed at that stop, and the usual recovery
puts the new processes into their seats. All ranks are then at the same committed step, so no step is repeated. When
the job has resumed, the node is given up without waiting for its silence.

The order to stop cannot be taken back, because a vote may have carried it already. So the report of the stop is always
answered: a move fences the ranks, or they are ordered to continue. The order to continue names the step before which
they wait, so it cannot end a later stop.

A scheduler that ends a job of several nodes signals all launchers at nearly the same time. A scheduler that takes away
one node signals one launcher. Only the other launchers show which of the two cases it is. So the first request waits up
to ``depart_s`` seconds for further requests, while training continues.

Invariants:
1. A notice ends in the departure of its node, or in the graceful exit of the whole job, unless the notice is withdrawn.
2. A node departs only while the other nodes are a majority, have room for the job and hold its state.
3. Nodes depart one after the other: each loses its vote before the next one departs.
4. Without a majority of the voters no node departs, and no notice becomes the exit of the whole job.
5. Until a notice leads to an act, ranks are placed as if the notice did not exist.
6. A node that is left out because it failed too often loses its ranks by a move, and stays in the job.
7. The event that reports a stop of all ranks also ends the stop, even if another controller has ordered it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from holdfast.core.decide.ladder import Ladder
from holdfast.core.ids import NO_GENERATION, Generation, MemberId, NodeId
from holdfast.core.job.fault import Fault
from holdfast.core.job.job_state import Job
from holdfast.core.job.leaving import LeavingAnswer, LeavingFacts, answer_notice
from holdfast.core.job.membership import Member, node_order
from holdfast.core.job.node_faults import take_back
from holdfast.core.job.node_tracker import NodeTracker
from holdfast.core.job.recovery import Recovery
from holdfast.core.job.shutdown import Shutdown
from holdfast.core.protocol.messages import Assignment, EndRun, ExitRun, WorkerHello
from holdfast.core.protocol.notices import (
    BY_HAND,
    HoldOrder,
    HoldOver,
    HoldReached,
    Notice,
    NoticeOver,
    PrepareSeats,
    SeatsPrepared,
)
from holdfast.exit_codes import Exit

TIMER = "depart"
LOOK_S = 0.25  # while a move is in progress, or a deadline is near
REST_S = 5.0  # otherwise
NEAR_S = 120.0
LAST_S = 1.0  # seconds before a deadline in which a node departs without waiting for anything else
MOVE_S, STEPS_TO_MOVE = 5.0, 3.0
SAVE_S, SAVES_TO_SAVE = 15.0, 2.0
WHOLE_JOB = NodeId("")
FAILED = "it failed too often"
"""Source of the notice that a node is left out because it failed too often."""


class StandingNotice(msgspec.Struct, kw_only=True):
    """One notice that is in force: not withdrawn, and its node has not left."""

    source: str
    due_s: float  # on the controller's clock; infinite: no deadline
    at_once: bool  # the launcher of the node was asked to end
    only_ranks: bool = False  # the node is left out and stays in the job


class Move(msgspec.Struct, kw_only=True):
    """The move of the ranks of one node to other nodes, while it is in progress."""

    node_id: NodeId
    since_s: float  # time of the newest orders; before the first orders, the start of the move
    orders: tuple[PrepareSeats, ...] | None = None  # None: not sent yet
    ready: dict[NodeId, tuple[int, ...]] = {}  # ranks with a prepared process, by the node of that process
    failed: str = ""
    # The generation in which all ranks were asked to stop at the end of a step.
    asked_in: Generation = NO_GENERATION
    hold_until_s: float = 0.0  # the time until which the move waits for all ranks to stop
    holds: bool = False  # all ranks have stopped

    @property
    def is_prepared(self) -> bool:
        """True if every rank that moves has a process that was built for it."""
        return self.orders is not None and all(
            {seat.rank for seat in order.members} <= set(self.ready.get(order.node_id, ()))
            for order in self.orders
        )


class Departures:
    """The part of the controller that handles leaving nodes.

    It shares the facts of the run (``job``) with the controller. ``now`` is in seconds on the controller's clock.
    """

    def __init__(self, job: Job, fleet: NodeTracker, recovery: Recovery, ending: Shutdown) -> None:
        self.job = job
        self.fleet = fleet
        self.recovery = recovery
        self.ending = ending
        self._standing: dict[tuple[NodeId, str], StandingNotice] = {}
        self._window_s = 0.0  # no launcher's node departs before this
        self._move: Move | None = None
        self._over: tuple[Generation, int] = (NO_GENERATION, 0)  # the newest stop that was ended by HoldOver
        self._departed: NodeId | None = None  # the voters may still include it
        self._save_s = 0.0  # of the longest save so far

    # ---------------------------------------------------------------- events

    def asked(self, now: float, request: ExitRun) -> None:
        """Handle a request to end the whole job, or only the node whose launcher was asked to end."""
        job, node_id = self.job, NodeId(request.node_id)
        if not node_id or job.exit_source or self.ending.stopping is not None or not job.roster.members:
            self._leave_all(now, request.source, request.grace_s)
            return
        launchers = {node for (node, _), standing in self._standing.items() if standing.at_once}
        if node_id in launchers:
            return
        if not launchers:
            self._window_s = now + min(job.config.depart_s, request.grace_s / 4)
        standing = StandingNotice(source=request.source, due_s=now + request.grace_s, at_once=True)
        self._note(now, node_id, standing)

    def noticed(self, now: float, notice: Notice) -> None:
        """Handle a notice that a node or the whole job will end, or the withdrawal of a notice."""
        key = (notice.node_id, notice.source)
        if notice.withdrawn:
            if self._standing.pop(key, None) is not None:
                self.job.record("node_stays", node=str(notice.node_id), source=notice.source)
            if notice.source == BY_HAND:
                take_back(self.job, notice.node_id)
            self._tell_over(notice.node_id, notice.source)
            self.look(now)
            return
        due_s = now + notice.left_s if notice.left_s >= 0 else math.inf
        known = self._standing.get(key)
        if known is not None:
            known.due_s = due_s
            self.look(now)
        else:
            self._note(now, notice.node_id, StandingNotice(source=notice.source, due_s=due_s, at_once=False))

    def _note(self, now: float, node_id: NodeId, standing: StandingNotice) -> None:
        self._standing[node_id, standing.source] = standing
        left_s = None if standing.due_s == math.inf else round(standing.due_s - now, 3)
        self.job.record("node_leaves", node=str(node_id), source=standing.source, left_s=left_s)
        self.look(now)

    def cancel(self) -> None:
        """Drop all requests from launchers that have to end, and cancel the move in progress."""
        for (node_id, source), standing in list(self._standing.items()):
            if standing.at_once:
                del self._standing[node_id, source]
        self._abandon()

    def joined(self, now: float, node_id: NodeId) -> None:
        """Decide again about leaving nodes. A node that has joined may have room for their ranks."""
        if node_id == self._departed:
            self._departed = None
        self.look(now)

    def seats_prepared(self, now: float, event: SeatsPrepared) -> None:
        """Record that an agent has built processes for a move, or why it could not build them."""
        move = self._move
        if move is None or event.node_id not in {order.node_id for order in move.orders or ()}:
            return
        was = move.is_prepared
        move.ready = {**move.ready, event.node_id: event.ranks}
        move.failed = event.failed
        if event.failed or (move.is_prepared and not was):
            self.job.record(
                "move_prepared",
                node=str(move.node_id),
                ranks=sorted(rank for ranks in move.ready.values() for rank in ranks),
                failed=event.failed,
                took_s=round(now - move.since_s, 3),
            )
        self.look(now)

    def holding(self, now: float, event: HoldReached) -> None:
        """Handle the report that all ranks stop before a step.

        If a move needs the stop, carry out the move. Otherwise order all ranks to continue.
        """
        job, move, here = self.job, self._move, (event.generation, event.step)
        if here <= self._over:
            return  # an agent has repeated the report
        if move is not None and move.asked_in == event.generation:
            move.holds = True
            job.record("holding", node=str(move.node_id), step=event.step)
            self.look(now)
            if job.generation != event.generation:
                return  # all are fenced
            move.asked_in, move.holds = NO_GENERATION, False
        self._over = here
        for member in job.roster.living:
            self._tell_continue(member)

    def worker_hello(self, event: WorkerHello) -> None:
        """Repeat the order to continue after a stop: it may have been lost with the last connection of this worker."""
        member = self.job.roster.get(event.member_id)
        if member is not None and self.job.generation == self._over[0] != NO_GENERATION:
            self._tell_continue(member)

    def _tell_continue(self, member: Member) -> None:
        generation, step = self._over
        self.job.send(member, HoldOver(member_id=member.member_id, generation=generation, step=step))

    def saved(self, duration_s: float) -> None:
        """Record how long the save of a share of a checkpoint took, in seconds."""
        self._save_s = max(self._save_s, duration_s)

    def tick(self, now: float, name: str) -> bool:
        """Handle the timer of this class. Return False if ``name`` is another timer."""
        if name == TIMER:
            self.look(now)
        return name == TIMER

    # ---------------------------------------------------------------- what to do

    def look(self, now: float) -> None:
        """Decide what to do about each node with a notice. Act on the first node that does not have to wait."""
        job, notices = self.job, self._notices
        if not notices and self._move is None:
            return
        if not notices or job.exit_source or self.ending.stopping is not None or job.released:
            self._abandon()
            return
        waits = job.roster.adopting or self._departed in job.liveness.voters or not job.roster.members
        if waits or not job.decides:
            job.timer(TIMER, LOOK_S)
            return
        here = {WHOLE_JOB, *job.slots}
        self._standing = {key: standing for key, standing in self._standing.items() if key[0] in here}
        notices = self._notices
        gone: set[NodeId] = {n for (n, _), standing in self._standing.items() if standing.at_once}
        for node_id in self._in_order(notices):
            gone.add(node_id)
            own = [notices[key] for key in sorted(notices) if key[0] == node_id]
            facts = self._facts_about(now, node_id, own, gone)
            answer = answer_notice(facts)
            if answer != "wait":
                self._act(now, node_id, own[0].source, answer, facts, gone)
                break
        else:
            self._abandon()
        if notices := self._notices:
            due_s = min(standing.due_s for standing in notices.values())
            job.timer(TIMER, LOOK_S if self._move is not None or due_s - now < NEAR_S else REST_S)

    @property
    def _notices(self) -> dict[tuple[NodeId, str], StandingNotice]:
        """All notices in force, and one notice for each left-out node that still has ranks."""
        job = self.job
        found = dict(self._standing)
        if not job.failed.nodes.failing or not self._is_smooth or not self._moves:
            return found
        up = {node_id for node_id in job.slots if job.liveness.is_up(node_id)}
        known = {node_id for node_id, _ in found}
        for node_id in up - job.without_left_out(up) - known:
            if job.roster.on_node(node_id):
                found[node_id, FAILED] = StandingNotice(
                    source=FAILED, due_s=math.inf, at_once=False, only_ranks=True
                )
        return found

    def _in_order(self, notices: Mapping[tuple[NodeId, str], StandingNotice]) -> list[NodeId]:
        """Return the nodes with a notice in the order of treatment.

        The node whose ranks move already is first. Nodes without ranks follow, then the others by deadline. Nodes that
        are left out come after them. The whole job comes last.
        """
        due: dict[NodeId, float] = {}
        for (node_id, _), standing in notices.items():
            due[node_id] = min(due.get(node_id, math.inf), standing.due_s)
        moving = None if self._move is None else self._move.node_id
        nodes = self.job.roster.nodes

        def order(node_id: NodeId) -> tuple[bool, bool, bool, bool, float, tuple[int, str]]:
            stays, place = (node_id, FAILED) in notices, node_order(node_id)
            return node_id == WHOLE_JOB, node_id != moving, stays, node_id in nodes, due[node_id], place

        return sorted(due, key=order)

    def _facts_about(
        self, now: float, node_id: NodeId, own: Sequence[StandingNotice], gone: set[NodeId]
    ) -> LeavingFacts:
        job = self.job
        only_ranks = any(standing.only_ranks for standing in own)
        due_s = min(standing.due_s for standing in own)
        step_s = max(job.step_s.values(), default=0.0)
        before, job.leaving = job.leaving, gone
        fits, room = job.fits, job.room()
        stands = self._state_stays() if only_ranks else node_id != WHOLE_JOB and self._others_stand()
        job.leaving = before
        return LeavingFacts(
            left_s=None if due_s == math.inf else due_s - now,
            move_s=max(MOVE_S, STEPS_TO_MOVE * step_s),
            save_s=max(SAVE_S, SAVES_TO_SAVE * self._save_s + STEPS_TO_MOVE * step_s),
            at_once=any(standing.at_once for standing in own),
            stands=stands,
            fits=fits and room >= job.world_size,
            fits_fewer=fits and room < job.world_size,
            holds_ranks=bool(job.roster.on_node(node_id)) or node_id == WHOLE_JOB,
            prepared=self._is_prepared(now, node_id),
            only_ranks=only_ranks,
        )

    def _is_prepared(self, now: float, node_id: NodeId) -> bool:
        if not self._is_smooth:
            return True  # all ranks start again: no process can be built for that before
        move = self._move
        if move is None or move.node_id != node_id:
            return False
        return bool(move.failed) or move.is_prepared or now - move.since_s > self.job.join_s

    @property
    def _is_smooth(self) -> bool:
        """True if ranks can be replaced while the other ranks keep their processes."""
        job = self.job
        return job.session and not self.recovery.replacement.barred(job.roster.living)

    @property
    def _moves(self) -> bool:
        """True if the configured ladder allows replacements of ranks on other nodes."""
        return Ladder.parse(self.job.config.on_fault).tries("node")

    def _others_stand(self) -> bool:
        """Return True if the remaining nodes are a majority of the voters, and hold the whole state."""
        job, voters = self.job, self.job.liveness.voters
        if job.config.library:
            return False
        staying = sum(job.liveness.is_up(voter) and voter not in job.leaving for voter in voters)
        return (not voters or staying * 2 > len(voters)) and self._state_stays()

    def _state_stays(self) -> bool:
        """Return True if the staying ranks hold the whole state, or staying nodes keep the leaving ranks' states."""
        job = self.job
        leaving = {m.rank for m in job.roster.members if m.node_id in job.leaving}
        if not job.session or not leaving:
            return True
        elsewhere = {rank for node, ranks in job.held.items() if node not in job.leaving for rank in ranks}
        staying = tuple(m.rank for m in job.roster.members if m.alive and m.rank not in leaving)
        return leaving <= elsewhere or not job.uncovered(job.roster.all_layouts(), staying)

    # ---------------------------------------------------------------- and doing it

    def _act(
        self,
        now: float,
        node_id: NodeId,
        source: str,
        answer: LeavingAnswer,
        facts: LeavingFacts,
        gone: set[NodeId],
    ) -> None:
        job, phase = self.job, self.recovery.phase
        if answer == "save":
            self._leave_all(now, source, max(0.0, facts.left_s or 0.0))
            return
        if self._move is None or self._move.node_id != node_id:
            self._abandon()
            self._move = Move(node_id=node_id, since_s=now)
        job.leaving = set(gone)
        last = facts.left_s is not None and facts.left_s <= LAST_S
        if answer in ("prepare", "move") and self._is_smooth and phase == "idle":
            self._prepare(now, self._move)
            answer = answer_notice(msgspec.structs.replace(facts, prepared=self._is_prepared(now, node_id)))
        if answer == "prepare" or (facts.at_once and now < self._window_s):
            return
        if answer == "leave":
            hard = phase in ("idle", "waiting", "starting") or last
        else:
            hard = not job.session or last or (phase == "idle" and not self._is_smooth)
        if hard:
            self._depart(now, node_id, source)
        elif answer != "leave" and phase == "idle" and self._held(now, self._move, facts):
            self._swap(now, node_id, source)

    def _prepare(self, now: float, move: Move) -> None:
        """Order other nodes to build the processes that will take the ranks of the leaving node.

        The orders are sent again only if the chosen nodes or slots of the ranks have changed.
        """
        job = self.job
        members = job.roster.on_node(move.node_id)
        places = job.places(members)
        seats: dict[NodeId, list[Assignment]] = {}
        for member in members:
            node_id, local_rank = places.get(member.rank, (move.node_id, 0))
            if node_id != move.node_id:
                seats.setdefault(node_id, []).append(Assignment(MemberId(0), member.rank, local_rank))
        orders = tuple(
            PrepareSeats(
                node_id=node_id,
                generation=job.generation,
                world_size=job.world_size,
                members=tuple(seats[node_id]),
            )
            for node_id in sorted(seats, key=node_order)
        )
        if orders != move.orders:
            move.orders, move.ready, move.failed, move.since_s = orders, {}, "", now
            for order in orders:
                job.send_node(order.node_id, order)

    def _held(self, now: float, move: Move, facts: LeavingFacts) -> bool:
        """Request that all ranks stop at the end of a step.

        Return True when all ranks have stopped, or when the time limit of the stop has passed.
        """
        job = self.job
        if move.asked_in != job.generation:
            move.asked_in, move.holds = job.generation, False
            bound_s = max(job.config.hold_s, facts.move_s)
            move.hold_until_s = now + min(bound_s, max(0.0, (facts.left_s or bound_s) - LAST_S))
            asked = job.roster.living[0]
            job.send(asked, HoldOrder(member_id=asked.member_id, generation=job.generation))
        return move.holds or now >= move.hold_until_s

    def _swap(self, now: float, node_id: NodeId, source: str) -> None:
        """Kill the ranks of the leaving node. The recovery then puts the prepared processes into their seats."""
        job = self.job
        what = f"moves, {node_id} {'is left out' if source == FAILED else 'leaves the job'} ({source})"
        faults = []
        for member in job.roster.on_node(node_id):
            faults.append(Fault.of(member, "leave", what, now))
            job.kill(member, what, excused=True)
        self.recovery.fault(now, *faults)

    def _depart(self, now: float, node_id: NodeId, source: str) -> None:
        job = self.job
        reason = f"it was asked to leave ({source}), the job continues without it"
        job.record("node_left", node=str(node_id), reason=reason)
        job.liveness.leave(node_id)
        self.fleet.node_lost(now, node_id, reason)
        self._standing = {key: s for key, s in self._standing.items() if key[0] != node_id}
        self._departed = node_id
        self._abandon()
        self._tell_over(node_id)
        job.send_node(node_id, EndRun(code=int(Exit.REQUEUE), reason=reason, node_only=True))

    def _abandon(self) -> None:
        """Cancel the move in progress, and end the processes that were built for it."""
        job, move = self.job, self._move
        job.leaving, self._move = set(), None
        if not self._standing:
            job.cancel(TIMER)
        if move is None:
            return
        for order in move.orders or ():
            job.send_node(order.node_id, msgspec.structs.replace(order, members=()))

    def _tell_over(self, node_id: NodeId, source: str = "") -> None:
        for node in sorted(self.job.slots, key=node_order):
            self.job.send_node(node, NoticeOver(node_id=node_id, source=source))

    def _leave_all(self, now: float, source: str, grace_s: float) -> None:
        self._standing = {}
        self._abandon()
        self.ending.request(now, source, grace_s)
