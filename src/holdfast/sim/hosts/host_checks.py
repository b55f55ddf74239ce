"""The invariants of a run on several hosts, in which more than one controller may decide at the same time.

Theory. A controller may give up a host whose ranks still live. Such a rank trains until it is fenced, but for that
controller it no longer belongs to the job. The decisions of each controller are therefore checked against only the
ranks that the controller has not given up. If one rank updates a step and another rank discards it, then one of the two
ranks must have been given up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol, cast

from holdfast.core.decide.decision import committed_floor
from holdfast.core.ids import Generation, MemberId, NodeId
from holdfast.core.job.log_replay import LinePlace, ReplayedState
from holdfast.core.protocol.messages import (
    ExitOrder,
    KillMember,
    LogRecord,
    Message,
    RankState,
    ResumeInPlace,
    Send,
    Settle,
)
from holdfast.core.protocol.peer_messages import RequestVote, VoteReply
from holdfast.sim.invariants import CheckedScene, Checks, Violation
from holdfast.sim.sim_memory_tier import Memory
from holdfast.sim.sim_store import SimStore
from holdfast.sim.worker import SimWorker

TRAINS = ("generation_started", "members_replaced", "resumed", "exit_requested", "exit_agreed")
"""Kinds of event-log records that a controller without a majority never writes."""
OF_THE_JOB = ("verdict", "exit_requested", "node_left")
"""Kinds of event-log records with which a controller ends, restarts, shrinks or moves the whole job."""
EXITS = ("exit_requested", "exit_agreed")
LEFT_OVER = "a process from before a recovery"
BOUND = re.compile(r"^did not (.*) (?:within|in another) ([0-9.e+]+) s$")
"""Pattern of the reason in an order to kill a process after a time-out (``core/job/wait_bounds.py``)."""


class DecidingProcess(Protocol):
    """The attributes of a controller process that the checks read."""

    host: NodeId
    term: int
    alone: bool
    lost: set[MemberId]
    past: ReplayedState


class HostsScene(CheckedScene, Protocol):
    """The interface of the simulated world that the checks use."""

    @property
    def workers(self) -> Mapping[MemberId, SimWorker]: ...
    def is_cut_off(self, node_id: NodeId) -> bool: ...
    def has_start(self, node_id: NodeId, term: int) -> bool: ...


class JudgedView:
    """The state of a run from the view of one controller: without the ranks that this controller has given up.

    A controller that is alone decides only for processes with a seat in its own event log. On other hosts, another
    controller may have started other processes for the same ranks.
    """

    def __init__(self, scene: HostsScene) -> None:
        self._scene = scene
        self._process: DecidingProcess | None = None
        self._passed: set[MemberId] = set()  # replaced processes whose reports have ceased to be evidence

    def of(self, process: DecidingProcess) -> None:
        """Switch this view to the controller ``process``."""
        self._process = process

    def given_up(self, members: set[MemberId]) -> list[SimWorker]:
        """Return the processes of ``members``. A member whose process was never started is left out."""
        workers = self._scene.workers
        return [workers[member] for member in sorted(members) if member in workers]

    @property
    def _lost(self) -> set[MemberId]:
        return self._process.lost if self._process is not None else set()

    @property
    def now(self) -> float:
        """Virtual time in seconds."""
        return self._scene.now

    @property
    def events(self) -> int:
        """Number of simulated events so far."""
        return self._scene.events

    @property
    def store(self) -> SimStore:
        """The simulated store with all checkpoints."""
        return self._scene.store

    @property
    def memory(self) -> Memory:
        """The simulated memory tier."""
        return self._scene.memory

    @property
    def save_errors(self) -> int:
        """Number of faults so far that make a save fail."""
        return self._scene.save_errors

    @property
    def memory_losses(self) -> set[str]:
        """The parts of the job whose data in memory was lost: ``agent``, ``controller``, ``node`` or ``page``.

        ``page`` means a status page.
        """
        return self._scene.memory_losses

    @property
    def journal(self) -> list[LogRecord]:
        """The event-log records of all controllers."""
        return self._scene.journal

    @property
    def seated(self) -> dict[int, SimWorker]:
        """The process of each rank, by rank, without the processes that the controller has given up."""
        process, workers = self._process, self._scene.workers
        # The order to start a member may have been lost.
        seats = process.past.seated_members if process is not None else {}
        seated = {rank: workers[member] for rank, member in sorted(seats.items()) if member in workers}
        return {rank: worker for rank, worker in seated.items() if worker.member_id not in self._lost}

    def pass_all(self) -> None:
        """Record that all ranks start again, maybe at an older step: no replaced process so far is evidence."""
        self._passed |= set(self._scene.workers)

    @property
    def is_overtaken(self) -> bool:
        """True if the controller is deposed: a living rank obeys a later leader, and refuses orders of this one.

        A paused host may have such a controller. It decides from the messages that have waited in its sockets, before
        it learns of the later leader.
        """
        process = self._process
        living = (worker.machine for worker in self.seated.values() if worker.alive)
        return process is not None and any(
            process.term < (machine.fenced or machine.generation).term for machine in living
        )

    @property
    def replaced(self) -> list[SimWorker]:
        """The dead processes whose seats newcomers have taken; empty for a controller that is alone.

        The order to start a newcomer may have been lost: then the event log alone shows that it has the seat.
        """
        process, workers = self._process, self._scene.workers
        if process is not None and process.alone:
            return []
        past = process.past if process is not None else ReplayedState()
        former = {w.member_id: w for w in self._scene.replaced}
        for seat in (*past.seats, *past.newcomers):
            if past.seated_members[seat.rank] != seat.member_id and seat.member_id in workers:
                former[seat.member_id] = workers[seat.member_id]
        return [w for member, w in former.items() if member not in self._lost | self._passed]

    @replaced.setter
    def replaced(self, workers: list[SimWorker]) -> None:
        self._passed |= {w.member_id for w in self.replaced} - {w.member_id for w in workers}
        self._scene.replaced = workers


class HostChecks(Checks):
    """The checks of a run on several hosts. Each controller is checked against the ranks that it has not given up."""

    def __init__(self, scene: HostsScene) -> None:
        self.view = JudgedView(scene)
        super().__init__(cast(CheckedScene, self.view))  # the checks only read attributes that the view has
        self.exit_asked = False  # a user has asked for the exit of the job
        self._hosts = scene
        self._given_up: set[MemberId] = set()
        self._fates: dict[tuple[Generation, int], dict[bool, list[SimWorker]]] = {}
        # Generation -> the largest number of steps that one of its ranks has committed
        self._committed: dict[Generation, int] = {}
        self._is_judged = False  # the loss of steps was recorded since the sessions last opened
        # Newest step of a living process that was killed because its controller did not know it
        self._thrown_away = -1
        self._acted_s: dict[MemberId, float] = {}
        self._leaders: dict[int, NodeId] = {}
        self._votes: dict[tuple[NodeId, int], str] = {}
        # By candidate and term: the newest line of the candidate's event log, as its request for votes names it
        self._asks: dict[tuple[NodeId, int], LinePlace] = {}

    def decided(self, process: DecidingProcess, record: LogRecord) -> None:
        """Check the invariants after a controller has written a record to its event log."""
        self._given_up |= process.lost
        self._entitled(process, record.kind)
        self.view.of(process)
        if self.view.is_overtaken:
            return
        if record.kind == "generation_started" and not record.data["in_place"]:
            self.view.pass_all()  # also if the orders to start are lost
        self.recorded(record)
        forgotten = record.kind == "start_forgotten" and not self._hosts.has_start(process.host, process.term)
        self._is_judged |= record.kind == "verdict" or forgotten
        if record.kind == "session_opened":
            step, opened = int(str(record.data["step"])), Generation.parse(str(record.data["generation"]))
            before = max((s for g, s in self._committed.items() if g < opened), default=0)
            if step < before and not self._is_judged and self._thrown_away >= before:
                raise Violation("no_step_is_lost_unjudged", f"{before} steps, starts at {step}")
            self._committed, self._is_judged, self._thrown_away = {opened: step}, False, -1

    def _entitled(self, process: DecidingProcess, kind: str) -> None:
        """Check that a controller may write a record of this kind.

        A decision about the whole job needs a majority. An exit needs the request of a user. Before the start of the
        first rank it needs no majority: nothing is trained, and a user may leave while hosts are missing. A recovery
        also ends, with ``resumed``, when all ranks have finished: then nothing is trained either.
        """
        if process.alone and kind in TRAINS and not (kind == "resumed" and self._is_done()):
            raise Violation("a_minority_only_saves", f"{process.host} is alone and writes {kind}")
        if kind in EXITS and not self.exit_asked:
            raise Violation("an_exit_is_asked_for", f"{process.host} writes {kind}, no user has asked")
        begins = kind == "exit_requested" and not process.past.seats
        if not process.alone and kind in OF_THE_JOB and not begins and self._hosts.is_cut_off(process.host):
            raise Violation("a_majority_decides", f"{process.host} writes {kind}, it hears no majority")

    def _is_done(self) -> bool:
        """Return True if no living rank has steps left."""
        return all(w.machine.state == "finished" for w in self.scene.seated.values() if w.alive)

    def sends(self, process: DecidingProcess, message: Message) -> None:
        """Check the invariants when a controller sends an order to a process."""
        if process.alone and isinstance(message, ExitOrder):
            raise Violation("a_minority_only_saves", f"{process.host} is alone and asks ranks for the exit")
        self.view.of(process)
        if self.view.is_overtaken:
            return
        if isinstance(message, Settle):
            self.sending(message)
        elif isinstance(message, ResumeInPlace):
            self.resuming(message)

    def _planned(self, record: LogRecord) -> None:
        """Check that the decided step follows from the steps that the ranks have committed.

        A rank that was given up may also prove the step, by its last report.
        """
        try:
            super()._planned(record)
        except Violation as violation:
            proofs = [committed_floor(worker.told()) for worker in self.view.given_up(self._given_up)]
            if violation.name != "decision_is_true" or record.data["step"] not in proofs:
                raise

    def moved(self, worker: SimWorker, old: RankState, new: RankState) -> None:
        """After a change of a rank's state, check that no rank updates a step that another rank discards.

        This is allowed only if one of the two ranks was given up. ``old`` and ``new`` are states of the step protocol.
        """
        if old == "updating" and new == "ready":
            generation = worker.machine.generation
            steps = max(self._committed.get(generation, 0), worker.machine.step)
            self._committed[generation] = steps
        updates = new == "updating" and old != "updating"
        discards = new == "aborted" and old in ("voting", "in_doubt", "compute")
        if not (updates or discards):
            return
        machine = worker.machine
        fates = self._fates.setdefault((machine.generation, machine.step), {True: [], False: []})
        fates[updates].append(worker)
        # A rank that was given up may return and report an update that other ranks discarded. All ranks then restart.
        if any(w.member_id in self._given_up for w in (worker, *fates[True])):
            return
        others = [w.rank for w in fates[not updates] if w.member_id not in self._given_up]
        if others:
            does, did = ("updates", "discarded") if updates else ("discards", "updated")
            text = f"rank {worker.rank} {does} step {machine.step}, ranks {sorted(others)} {did} it"
            raise Violation("one_fate_per_step", text)

    def acts(self, worker: SimWorker) -> None:
        """Record the time at which a process sent a message or changed its state in the step protocol."""
        self._acted_s[worker.member_id] = self.scene.now

    def kills(self, worker: SimWorker, order: KillMember) -> None:
        """Check an order of a controller to kill a process.

        A process must not be killed for a time-out if it was active within that time. It must also not be killed if it
        has done the expected action (to join, or to settle).
        """
        if order.reason == LEFT_OVER and worker.alive and worker.member_id not in self._given_up:
            self._thrown_away = max(self._thrown_away, worker.machine.step)
        bound = BOUND.search(order.reason)
        if bound is None or worker.stopped or not worker.alive:
            return
        idle_s = self.scene.now - self._acted_s.get(worker.member_id, 0.0)
        done = {"join": worker.opened, "settle": worker.machine.settled}.get(bound[1], False)
        if done or idle_s < float(bound[2]):
            text = f"rank {worker.rank}, active {idle_s:.3g} s ago: {order.reason}"
            raise Violation("no_progress_is_killed", text)

    def elected(self, node_id: NodeId, term: int) -> None:
        """When a node has won an election, check that its term has no other leader."""
        if self._leaders.setdefault(term, node_id) != node_id:
            raise Violation("one_leader_per_term", f"{self._leaders[term]} and {node_id} lead in term {term}")

    def voted(self, node_id: NodeId, command: Send, log: LinePlace) -> None:
        """When an election sends a message, check that a node votes once in a term, and for no older log than its own.

        ``log`` is (term, number) of the newest line in the event log of the node.

        A host that was installed again may vote a second time in a term. Its message then marks the vote as ``blank``,
        and this check skips it. The check ``one_leader_per_term`` finds a second leader that results from it.
        """
        reply = command.message
        if isinstance(reply, RequestVote):
            self._asks[node_id, reply.term] = reply.log
        if isinstance(reply, VoteReply) and reply.granted and not (reply.trial or reply.blank):
            theirs = self._asks.get((NodeId(command.to.removeprefix("node:")), reply.term), log)
            if theirs < log:
                text = f"{node_id} with the log {log} grants term {reply.term} to {command.to} with {theirs}"
                raise Violation("no_vote_for_an_older_log", text)
            first = self._votes.setdefault((node_id, reply.term), command.to)
            if first != command.to:
                text = f"{node_id} grants term {reply.term} to {first} and {command.to}"
                raise Violation("one_vote_per_term", text)
