"""The invariants of a run, where several controllers may decide, each for the ranks that it has not lost.

Theory. A rank on a host that a controller gave up may live on and train until it is fenced. It does not belong to the
job, as that controller sees it. So each controller is judged by the ranks in its own view, and two ranks may part over
a step only where one of them was given up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol, cast

from holdfast.core.decide.decision import committed_floor
from holdfast.core.ids import Generation, MemberId, NodeId
from holdfast.core.protocol.messages import (
    KillMember,
    LogRecord,
    Message,
    RankState,
    ResumeInPlace,
    Send,
    Settle,
)
from holdfast.core.protocol.peer_messages import VoteReply
from holdfast.sim.invariants import CheckedScene, Checks, Violation
from holdfast.sim.sim_memory_tier import Memory
from holdfast.sim.sim_store import SimStore
from holdfast.sim.worker import SimWorker

LEFT_OVER = "a process from before a recovery"
BOUND = re.compile(r"^did not (.*) (?:within|in another) ([0-9.e+]+) s$")
"""Why a process is killed for a time-out (``core/job/wait_bounds.py``)."""


class DecidingProcess(Protocol):
    """A controller, as far as the checks look at it."""

    term: int
    alone: bool
    lost: set[MemberId]
    seats: dict[int, MemberId]


class HostsScene(CheckedScene, Protocol):
    """What the checks may look at."""

    @property
    def workers(self) -> Mapping[MemberId, SimWorker]: ...


class JudgedView:
    """A run as one controller sees it: without the ranks that it has given up. A controller that is alone decides for
    the processes that it knows: elsewhere others may have been started in their seats."""

    def __init__(self, scene: HostsScene) -> None:
        self._scene = scene
        self._process: DecidingProcess | None = None

    def of(self, process: DecidingProcess) -> None:
        """Make this the view of the given controller."""
        self._process = process

    def given_up(self, members: set[MemberId]) -> list[SimWorker]:
        """These processes, as far as they ever existed."""
        workers = self._scene.workers
        return [workers[member] for member in sorted(members) if member in workers]

    @property
    def _lost(self) -> set[MemberId]:
        return self._process.lost if self._process is not None else set()

    @property
    def now(self) -> float:
        """Virtual seconds."""
        return self._scene.now

    @property
    def events(self) -> int:
        """Events so far."""
        return self._scene.events

    @property
    def store(self) -> SimStore:
        """All checkpoints."""
        return self._scene.store

    @property
    def memory(self) -> Memory:
        """States in memory."""
        return self._scene.memory

    @property
    def save_errors(self) -> int:
        """Saves that were made to fail."""
        return self._scene.save_errors

    @property
    def memory_losses(self) -> set[str]:
        """Kinds of processes that died with what they knew."""
        return self._scene.memory_losses

    @property
    def journal(self) -> list[LogRecord]:
        """Of all controllers."""
        return self._scene.journal

    @property
    def seated(self) -> dict[int, SimWorker]:
        """The processes in their seats that are not given up."""
        process, workers = self._process, self._scene.workers
        seats = process.seats if process is not None else {}  # an order to start may never have come
        seated = {rank: workers[member] for rank, member in sorted(seats.items()) if member in workers}
        return {rank: worker for rank, worker in seated.items() if worker.member_id not in self._lost}

    @property
    def replaced(self) -> list[SimWorker]:
        """The dead beside whom newcomers sit."""
        alone = self._process is not None and self._process.alone
        return [w for w in self._scene.replaced if w.member_id not in self._lost and not alone]

    @replaced.setter
    def replaced(self, workers: list[SimWorker]) -> None:
        self._scene.replaced = workers


class HostChecks(Checks):
    """See the module."""

    def __init__(self, scene: HostsScene) -> None:
        self.view = JudgedView(scene)
        super().__init__(cast(CheckedScene, self.view))  # whose attributes the checks only read
        self._given_up: set[MemberId] = set()
        self._fates: dict[tuple[Generation, int], dict[bool, list[SimWorker]]] = {}
        self._committed: dict[Generation, int] = {}  # steps that a rank has
        self._is_judged = False  # since the last start there was a verdict
        self._thrown_away = -1  # step of a living process that a controller did not know
        self._acted_s: dict[MemberId, float] = {}
        self._leaders: dict[int, NodeId] = {}
        self._votes: dict[tuple[NodeId, int], str] = {}

    def decided(self, process: DecidingProcess, record: LogRecord) -> None:
        """Check the invariants after a controller has written a record to its event log."""
        self._given_up |= process.lost
        self.view.of(process)
        self.recorded(record)
        self._is_judged |= record.kind == "verdict"
        if record.kind == "session_opened":
            step, opened = int(str(record.data["step"])), Generation.parse(str(record.data["generation"]))
            before = max((s for g, s in self._committed.items() if g < opened), default=0)
            if step < before and not self._is_judged and self._thrown_away >= before:
                raise Violation("no_step_is_lost_unjudged", f"{before} steps, starts at {step}")
            self._committed, self._is_judged, self._thrown_away = {opened: step}, False, -1

    def sends(self, process: DecidingProcess, message: Message) -> None:
        """Check the invariants when a controller sends an order."""
        self.view.of(process)
        if isinstance(message, Settle):
            self.sending(message)
        elif isinstance(message, ResumeInPlace):
            self.resuming(message)

    def _planned(self, record: LogRecord) -> None:
        """A rank that was given up may be heard once more: what it proves is true as well."""
        try:
            super()._planned(record)
        except Violation as violation:
            proofs = [committed_floor(worker.told()) for worker in self.view.given_up(self._given_up)]
            if violation.name != "decision_is_true" or record.data["step"] not in proofs:
                raise

    def moved(self, worker: SimWorker, old: RankState, new: RankState) -> None:
        """A rank moved in the step protocol: two ranks part over a step only where one of them was given up."""
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
        # One that was given up and comes back proves a fate that others may have parted from; all start again then.
        if any(w.member_id in self._given_up for w in (worker, *fates[True])):
            return
        others = [w.rank for w in fates[not updates] if w.member_id not in self._given_up]
        if others:
            does, did = ("updates", "discarded") if updates else ("discards", "updated")
            text = f"rank {worker.rank} {does} step {machine.step}, ranks {sorted(others)} {did} it"
            raise Violation("one_fate_per_step", text)

    def acts(self, worker: SimWorker) -> None:
        """A process sends a message, or moves in the step protocol."""
        self._acted_s[worker.member_id] = self.scene.now

    def kills(self, worker: SimWorker, order: KillMember) -> None:
        """A process is killed: not for a bound in which it made progress, and not for what it has done."""
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
        """An election was won."""
        if self._leaders.setdefault(term, node_id) != node_id:
            raise Violation("one_leader_per_term", f"{self._leaders[term]} and {node_id} lead in term {term}")

    def voted(self, node_id: NodeId, command: Send) -> None:
        """An election sends a message."""
        reply = command.message
        if isinstance(reply, VoteReply) and reply.granted and not reply.trial:
            first = self._votes.setdefault((node_id, reply.term), command.to)
            if first != command.to:
                text = f"{node_id} grants term {reply.term} to {first} and {command.to}"
                raise Violation("one_vote_per_term", text)
