"""A whole run on a virtual clock: the real state machines of controller and agents, and simulated workers.

Every future event is an entry of one heap, ordered by (time, number). All randomness comes from one seed. Equal
(ranks, seed, faults) therefore give equal runs, and a digest of all events confirms that. The journal survives the
death of the controller. The workers survive the death of their agent.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import random
from collections.abc import Callable
from functools import partial
from typing import Literal

from holdfast.core.agent import REPEATED
from holdfast.core.config import Config
from holdfast.core.controller import Controller
from holdfast.core.ids import LayoutVersion, MemberId, NodeId, SaveId
from holdfast.core.job.log_replay import ReplayedState
from holdfast.core.protocol.layout_messages import Layouts
from holdfast.core.protocol.messages import (
    AgentGone,
    CancelTimer,
    Command,
    ControllerGone,
    ControllerHere,
    ExitRun,
    Finish,
    KillMember,
    LogRecord,
    MemberExited,
    MemberStarted,
    Message,
    RankState,
    RestartController,
    ResumeInPlace,
    Send,
    SetTimer,
    Settle,
    StartMembers,
    Tick,
    WorkerHello,
)
from holdfast.core.protocol.peer_messages import JobFormed
from holdfast.errors import InternalError
from holdfast.sim.collectives import FEW_RANKS, Collectives
from holdfast.sim.faults import SimFault
from holdfast.sim.injector import NO_PHASE, SimInjector
from holdfast.sim.invariants import Checks, Violation
from holdfast.sim.sim_agent import SimAgent
from holdfast.sim.sim_memory_tier import Memory
from holdfast.sim.sim_result import SimResult
from holdfast.sim.sim_store import SimStore
from holdfast.sim.spares import SimSpares
from holdfast.sim.worker import SimWorker

RANKS_CHECKED_ALWAYS = 16
RANKS_PER_NODE = 8
PIDS_PER_NODE = 100
CHECK_EVERY = 1000
TIME_S_MAX = 3600.0
EVENTS_MAX = 5_000_000


class World:
    """One simulated run: its clock, processes, checkpoint store, faults and checks.

    Args:
        ranks: world size. Up to 8 ranks run on one node, up to ``FEW_RANKS`` on two nodes, more on nodes of 8 ranks.
        until: number of steps of the run.
        shards: number of distinct boxes; rank r holds box ``r % shards``.
        memory: number of steps between two states that each rank keeps in memory; 0 if no rank keeps any.
    """

    controller_type = Controller
    worker_type = SimWorker
    store_type = SimStore
    memory_type = Memory
    collectives_type: type[Collectives] = Collectives
    checks_type: type[Checks] = Checks

    def __init__(
        self, ranks: int, seed: int, faults: tuple[SimFault, ...], until: int, shards: int, memory: int = 0
    ) -> None:
        self.now = 0.0
        self.world_size = ranks
        self.everyone = tuple(range(ranks))
        self.until = until
        self.rng = random.Random(seed)
        self.whims = random.Random(seed)
        # Some seeds simulate the answer "restart" to every fault, the other seeds the automatic choice.
        self.on_fault: Literal["auto", "restart"] = "restart" if seed % 4 == 3 else "auto"
        self.checks = self.checks_type(self)
        self.store = self.store_type(shards, self.checks.sealed)
        self.memory = self.memory_type(memory, self.checks.loaded)
        self.journal: list[LogRecord] = []
        self.workers: dict[MemberId, SimWorker] = {}
        self.seated: dict[int, SimWorker] = {}
        # Dead processes, replaced since all workers were last started together
        self.replaced: list[SimWorker] = []
        self.save_errors = 0
        self.flips = 0
        self.memory_losses: set[str] = set()
        self.events = 0
        self.outcome: Finish | None = None
        self._heap: list[tuple[float, int, str, Callable[[], None]]] = []
        self._number = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self._links: dict[tuple[str, str], float] = {}
        self.collectives = self.collectives_type(self)
        self.injector = SimInjector(self, faults)
        self._term = 0
        self._controller: Controller | None = None
        self._timers: dict[str, int] = {}
        # Term -> time after which no message of its dead controller arrives
        self._cut_s: dict[int, float] = {}
        nodes = 1 if ranks <= 8 else 2 if ranks <= FEW_RANKS else -(-ranks // RANKS_PER_NODE)
        per_node = -(-ranks // nodes)
        self.spares = SimSpares(self)
        with_spares = seed % 5 in (1, 3)  # some seeds simulate spares
        self._agents = {}
        for number in range(nodes):
            node = NodeId(f"n{number}")
            self._agents[node] = SimAgent(node, per_node, int(with_spares), ranks, 1 + number * PIDS_PER_NODE)
        if with_spares and seed % 2:
            self.later(self.jitter(0.3, 1.5), "fault spare", partial(self.spares.kill_one, NodeId("n0")))
        self.injector.start()

    # ---------------------------------------------------------------- clock

    def later(self, delay_s: float, label: str, action: Callable[[], None]) -> None:
        """Run ``action`` after ``delay_s`` virtual seconds."""
        self._number += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._number, label, action))

    def later_on(self, node_id: NodeId, delay_s: float, label: str, action: Callable[[], None]) -> None:
        """Run ``action`` on a host after ``delay_s`` virtual seconds. In this class no host ever fails."""
        self.later(delay_s, label, action)

    def clock(self, node_id: NodeId) -> float:
        """Return the reading of CLOCK_MONOTONIC on a host, in seconds. In this class all hosts share one clock."""
        return self.now

    def jitter(self, low_s: float, high_s: float) -> float:
        """Return a random duration in seconds, uniform between the two bounds."""
        return self.rng.uniform(low_s, high_s)

    def run(self) -> None:
        """Simulate the run until it is over and no process is left.

        Raises:
            Violation: an invariant is broken, or the run does not end.
        """
        self.begin()
        while self._heap and not self._is_over():
            self.now, number, label, action = heapq.heappop(self._heap)
            self.events += 1
            self._digest.update(f"{number} {self.now:.9f} {label}\n".encode())
            if self.now > TIME_S_MAX or self.events > EVENTS_MAX:
                raise Violation("the_run_ends", f"not over after {self.now:.0f} s: {self._where()}")
            action()
            if self.world_size <= RANKS_CHECKED_ALWAYS:
                self.checks.look_at_moved()
            elif self.events % max(CHECK_EVERY, self.world_size) == 0:
                self.check()
        if not self._is_over():
            raise Violation("the_run_ends", f"nothing happens any more: {self._where()}")
        if any(w.alive for w in self.workers.values()):
            raise Violation("nobody_is_left", self._where())

    def begin(self) -> None:
        """Start all agents and the first controller."""
        for agent in self._agents.values():
            self._execute_agent(agent, agent.machine.start(self.now))
            if len(self._agents) > 1:
                self._feed_agent(agent, JobFormed())
        self._start_controller()

    @property
    def controllers(self) -> list[Controller]:
        """The state machines of the living controllers."""
        return [] if self._controller is None else [self._controller]

    def phase(self) -> str:
        """Return the phase of the job according to its controller; ``NO_PHASE`` if no controller is alive."""
        return str(self.controllers[0].snapshot()["phase"]) if self.controllers else NO_PHASE

    def check(self) -> None:
        """Check the invariants of all controllers and workers, whether or not they have changed.

        A job of few ranks checks a state machine after each event of that machine instead.
        """
        for controller in self.controllers:
            controller.check()
        for worker in self.seated.values():
            worker.machine.check()
        self.checks.step_spread()

    def digest(self) -> str:
        """Return the digest of all simulated events so far, as hexadecimal text."""
        return self._digest.hexdigest()

    def _is_over(self) -> bool:
        return self.outcome is not None and all(a.machine.ended for a in self._agents.values() if a.alive)

    def _where(self) -> str:
        ranks = ", ".join(
            f"{rank}:{w.machine.state}({w.machine.step}){'' if w.alive else ' dead'}"
            for rank, w in sorted(self.seated.items())
        )
        deciding = ", ".join(str(each.snapshot()) for each in self.controllers)
        return f"{deciding or 'no controller'}; {ranks}"

    # ---------------------------------------------------------------- controller

    def _start_controller(self) -> None:
        self._term += 1
        config = Config(
            run_id="sim",
            world_size=self.world_size,
            nnodes=len(self._agents),
            term=self._term,
            max_restarts=64,
            on_fault=self.on_fault,
            verify=True,
        )
        past = ReplayedState.read(self.journal)
        self._controller = self.controller_type(config, past, self.store.uncovered)
        self._timers = {}
        self.execute_controller(self._controller.start(self.now))
        for agent in self._agents.values():
            if agent.alive:
                self._reach(agent)

    def _reach(self, agent: SimAgent) -> None:
        term = self._term

        def here() -> None:
            if agent.alive and self._controller is not None and self._term == term:
                self._links.pop((agent.node_id, "controller"), None)
                self._feed_agent(agent, ControllerHere())

        self.later(self.jitter(0.01, 0.05), f"join {agent.node_id}", here)

    def _feed_controller(self, event: Message) -> None:
        if self._controller is not None:
            controller = self._controller
            self.checks.hears(event)
            self.execute_controller(controller.handle(self.now, event))
            if self.world_size <= RANKS_CHECKED_ALWAYS:
                controller.check()

    def execute_controller(self, commands: list[Command]) -> None:
        """Append the event-log records among ``commands`` to the journal, then execute all commands."""
        for command in commands:
            if isinstance(command, LogRecord):
                self.journal.append(command)
        for command in commands:
            self._act_for_controller(command)

    def _act_for_controller(self, command: Command) -> None:
        match command:
            case LogRecord():
                self.checks.recorded(command)
            case SetTimer() | CancelTimer():
                self._set_timer(self._timers, command, f"c{self._term}", self._feed_controller)
            case Finish():
                self.outcome = command
                self._controller = None
            case Send():
                if isinstance(command.message, Settle):
                    self.checks.sending(command.message)
                elif isinstance(command.message, ResumeInPlace):
                    self.checks.resuming(command.message)
                self._downlink(command)
            case _:
                raise InternalError(f"a controller does not ask for {command}")

    def _set_timer(
        self,
        timers: dict[str, int],
        command: SetTimer | CancelTimer,
        owner: str,
        feed: Callable[[Message], None],
    ) -> None:
        self._number += 1
        token = timers[command.name] = self._number
        if isinstance(command, CancelTimer):
            return

        def fire() -> None:
            if timers.get(command.name) == token and (owner[0] != "c" or owner == f"c{self._term}"):
                feed(Tick(name=command.name))

        self.later_on(NodeId(owner), command.delay_s, f"tick {owner} {command.name}", fire)

    def _downlink(self, command: Send) -> None:
        kind, _, name = command.to.partition(":")
        if kind == "agent":
            agent = self._agents[NodeId(name)]
        else:
            worker = self.workers.get(MemberId(int(name)))
            if worker is None:
                return
            agent = self._agents[worker.node_id]
        instance, message, term = agent.machine, command.message, self._term

        def deliver() -> None:
            if agent.alive and agent.machine is instance and self.now < self._cut_s.get(term, math.inf):
                self._feed_agent(agent, message)

        self._link("controller", agent.node_id, type(message).__name__, deliver, agent.node_id)

    def _link(
        self, source: str, target: str, label: str, deliver: Callable[[], None], node_id: NodeId
    ) -> None:
        """Deliver a message to the host ``node_id`` after a random delay.

        Messages with the same source and target arrive in the order in which they were sent.
        """
        at_s = max(self.now + self.jitter(0.0002, 0.003), self._links.get((source, target), 0.0) + 1e-6)
        self._links[source, target] = at_s
        self.later_on(node_id, at_s - self.now, f"{source}>{target} {label}", deliver)

    # ---------------------------------------------------------------- agents

    def _feed_agent(self, agent: SimAgent, event: Message) -> None:
        if agent.alive and not agent.machine.ended:
            self._execute_agent(agent, agent.machine.handle(self.clock(agent.node_id), event))
            agent.machine.check()

    def _execute_agent(self, agent: SimAgent, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case SetTimer() | CancelTimer():
                    self._set_timer(agent.timers, command, agent.node_id, partial(self._feed_agent, agent))
                case RestartController():
                    self._want_controller(agent)
                case Send():
                    self._send_for_agent(agent, command)
                case Finish():
                    self._agent_ended(command)
                case _:
                    continue

    def _want_controller(self, agent: SimAgent) -> None:
        self.later(0.1, "restart controller", partial(self._successor, self._term))

    def _agent_ended(self, finish: Finish) -> None:
        if self.outcome is None and all(a.machine.ended for a in self._agents.values()):
            self.outcome = finish  # all have left without a controller
            self._controller = None

    def _successor(self, term: int) -> None:
        if self._term == term and self._controller is None and self.outcome is None:
            self._start_controller()

    def _send_for_agent(self, agent: SimAgent, command: Send) -> None:
        message = command.message
        if command.to == "controller":
            self.checks.goes_up(message)
            self._to_controller(agent, message)
        elif command.to == "shell" and self.spares.carry_out(agent.node_id, message):
            return
        elif command.to == "shell" and isinstance(message, StartMembers):
            self.spawn(agent.node_id, message)
        elif command.to == "shell" and isinstance(message, KillMember):
            worker = self.workers.get(message.member_id)
            if worker is not None:
                self._carry_out_kill(worker, message)
        elif command.to.startswith("member:"):
            worker = self.workers.get(MemberId(int(command.to[7:])))
            if worker is not None:
                self._link(
                    agent.node_id,
                    f"w{worker.member_id}",
                    type(message).__name__,
                    lambda: worker.receive(message) if agent.alive else None,
                    agent.node_id,
                )

    def _to_controller(self, agent: SimAgent, message: Message) -> None:
        term = self._term

        def up() -> None:
            if self._term == term:
                self._feed_controller(message)

        self._link(agent.node_id, "controller", type(message).__name__, up, agent.node_id)

    def _carry_out_kill(self, worker: SimWorker, order: KillMember) -> None:
        """Kill a process on the order of the agent of its node."""
        self.later_on(worker.node_id, 0.001, f"kill:{worker.rank}", partial(self.died, worker, None, 9))

    def tell_agent(self, node_id: NodeId, event: Message) -> None:
        """Pass an event to the agent of a node, if the agent lives."""
        agent = self._agents[node_id]
        if agent.alive:
            self._feed_agent(agent, event)

    def spawn(self, node_id: NodeId, order: StartMembers, delay_s: float = 0.0) -> None:
        """Start workers on a node after ``delay_s`` virtual seconds.

        If it is 0, the delay is the random time that a fork takes.
        """
        # A rank has no former process if an order to run without it is known to one host only.
        former = [self.seated[m.rank] for m in order.members if m.rank in self.seated]
        self.replaced = [*self.replaced, *former] if order.join else []
        for seat in order.members:
            worker = self.worker_type(self, node_id, seat, order)
            self.workers[seat.member_id] = worker
            self.seated[seat.rank] = worker

            def start(worker: SimWorker = worker) -> None:
                if worker.alive:
                    started = MemberStarted(
                        member_id=worker.member_id, node_id=worker.node_id, pid=int(worker.member_id)
                    )
                    self._feed_agent(self._agents[worker.node_id], started)
                    worker.start()

            self.later_on(node_id, delay_s or self.jitter(0.005, 0.03), f"start:{seat.rank}", start)

    def kill_controller(self) -> None:
        """Kill the controller. Its connections to all agents then close."""
        if self._controller is None:
            return
        self.memory_losses.add("controller")
        self._controller = None
        # Messages of the controller that are not delivered by then never arrive.
        self._cut_s[self._term] = self.now + self.jitter(0.0, 0.004)
        for agent in self._agents.values():
            self.later(0.002, f"lost {agent.node_id}", partial(self._feed_agent, agent, ControllerGone()))

    def ask_exit(self) -> None:
        """Request the exit of the run from the agent of the first node, as the command ``holdfast exit`` does."""
        agent = next(iter(self._agents.values()))
        self._feed_agent(agent, ExitRun(grace_s=60.0, source="test"))

    def kill_agent(self, node_id: NodeId) -> None:
        """Kill the agent of a node. The launcher starts a new agent, which adopts the workers that still live."""
        agent = self._agents[node_id]
        if not agent.alive or agent.machine.ended or self.outcome is not None:
            return
        agent.alive = False
        self.spares.agent_died(node_id)
        self.memory_losses.add("agent")
        gone = AgentGone(node_id=node_id)
        self._link(node_id, "controller", "closed", lambda: self._feed_controller(gone), node_id)
        self.later(self.jitter(0.2, 0.5), f"successor {node_id}", lambda: self._adopt(node_id))

    def _adopt(self, node_id: NodeId) -> None:
        old = self._agents[node_id]
        config = old.machine.config
        agent = SimAgent(node_id, config.slots, config.spares, self.world_size, config.pid + 1)
        self._agents[node_id] = agent
        self._execute_agent(agent, agent.machine.start(self.now))
        if self.outcome is not None:
            # The run is over on all other nodes. A launcher then kills the remaining workers.
            for worker in list(self.workers.values()):
                if worker.node_id == node_id:
                    self.died(worker, None, 9)
            agent.alive = False
            return
        if len(self._agents) > 1:
            self._feed_agent(agent, JobFormed())
        for member_id, worker in sorted(self.workers.items()):
            if worker.node_id == node_id and worker.alive:
                self._feed_agent(
                    agent, MemberStarted(member_id=member_id, node_id=node_id, pid=int(member_id))
                )
                self.later(self.jitter(0.01, 0.1), f"rejoin:{worker.rank}", partial(self._rejoin, worker))
            elif worker.node_id == node_id:
                self._report_exit(agent, self._exit_of(worker, None, None))
        if self._controller is not None:
            self._reach(agent)
        else:
            self.later(0.1, "start controller", partial(self._successor, self._term))

    def _rejoin(self, worker: SimWorker) -> None:
        if not worker.alive or worker.stopped:
            return
        queued, worker.queued = worker.queued, []
        worker.hello()
        for message in (*worker.repeated.values(), *queued):
            self.uplink(worker, message)

    # ---------------------------------------------------------------- workers

    def uplink(self, worker: SimWorker, message: Message) -> None:
        """Send a message from a worker to the agent of its node. While that agent is dead, queue the message."""
        agent = self._agents[worker.node_id]
        if not agent.alive or worker.queued:
            worker.queued.append(message)
            return
        if isinstance(message, REPEATED):
            worker.repeated[type(message)] = message
        self._link(
            f"w{worker.member_id}",
            worker.node_id,
            type(message).__name__,
            lambda: self._hear(agent, message),
            worker.node_id,
        )

    def _hear(self, agent: SimAgent, message: Message) -> None:
        # The shell of the agent refuses the connection of a process whose exit it has reported.
        if not (isinstance(message, WorkerHello) and message.member_id in agent.reported):
            self._feed_agent(agent, message)

    def _report_exit(self, agent: SimAgent, event: MemberExited) -> None:
        agent.reported.add(event.member_id)
        self._feed_agent(agent, event)

    def updates(self, worker: SimWorker) -> None:
        """Check the invariants when the rank of ``worker`` begins an update."""
        self.checks.updates(worker)

    def fetch(self, newcomer: SimWorker, rank: int) -> int | None:
        """Transfer the state of ``rank`` to a newcomer.

        Returns:
            The number of updates in the parameters of that state. None if ``rank`` is dead, or if its parameters
            are being changed now.
        """
        holder = self.holder(rank)
        if holder is None or not holder.alive:
            return None
        self.checks.given(holder)
        return holder.applied

    def holder(self, rank: int) -> SimWorker | None:
        """Return the process that gives the state of ``rank`` to newcomers; None if there is none."""
        return self.seated.get(rank)

    def holders(self, rank: int) -> list[int]:
        """Return the ranks that hold the same box as ``rank``, and whose copies can be compared now."""
        same = range(rank % self.store.shards, self.world_size, self.store.shards)
        return [r for r in same if r in self.seated and self.seated[r].can_be_compared]

    def lose_track(self) -> None:
        """Treat flipped bits as absent if no two copies of the state differ now: no comparison could detect them."""
        if not self.flips:
            return
        living = [w for _, w in sorted(self.seated.items()) if w.alive]
        if not any(w.flipped and w.can_be_compared and len(self.holders(w.rank)) > 1 for w in living):
            for worker in living:
                worker.flipped = worker.wrong = False
            self.collectives.forget_wrong()  # an update of these ranks with changed gradients may be in progress

    def stood(self, rank: int) -> None:
        """Raise ``Violation``: a rank that paused between two steps has waited until the time limit of the pause."""
        self.checks.stood(rank)

    def catalogued(self, version: LayoutVersion, layouts: Layouts) -> None:
        """Check a catalogue (the layouts of all ranks under one version) that a rank has received."""
        self.checks.catalogued(version, layouts)

    def plans(self, save_id: SaveId, version: LayoutVersion, has_own: bool) -> None:
        """Check the invariants when a rank plans its share of a save by the layouts of ``version``.

        ``has_own`` is True if these layouts contain the present layout of the rank.
        """
        self.checks.plans(save_id, version, has_own)

    def moved(self, worker: SimWorker, old: RankState, new: RankState) -> None:
        """Check that a rank may change from state ``old`` to ``new``. Inject the faults that wait for ``new``."""
        if new == "torn" and not self.checks.distrusted:
            self.lose_track()
        self.checks.moved(worker, old, new)
        self.injector.moved(worker, new)

    def died(self, worker: SimWorker, code: int | None, killed_by: int | None) -> None:
        """End a worker process, break the collectives of its generation, and report the exit to its agent.

        ``code`` is the exit code, and ``killed_by`` the number of the signal that killed the process. One of them is
        None.
        """
        if not worker.alive:
            return
        worker.alive = False
        if not self.checks.distrusted:
            self.lose_track()
        self.collectives.break_off(worker.machine.generation)
        agent = self._agents[worker.node_id]
        event = self._exit_of(worker, code, killed_by)
        self.later_on(
            worker.node_id,
            self.jitter(0.0005, 0.004),
            f"exited:{worker.rank}",
            lambda: self._report_exit(agent, event),
        )

    def _exit_of(self, worker: SimWorker, code: int | None, killed_by: int | None) -> MemberExited:
        machine = worker.machine
        return MemberExited(
            member_id=worker.member_id,
            node_id=worker.node_id,
            generation=machine.generation,
            code=0 if machine.state == "finished" and killed_by is None else code,
            signal=killed_by,
            state=machine.state,
            step=machine.step,
            detail=machine.state,
            died_ns=int(self.clock(worker.node_id) * 1e9),
            kept=self.memory.steps(worker.rank),
            replays=self.memory.replays(worker.rank),
        )


def run_sim(
    ranks: int,
    seed: int,
    faults: tuple[SimFault, ...] = (),
    *,
    until: int = 12,
    shards: int = 2,
    memory: int = 0,
    world: type[World] = World,
) -> SimResult:
    """Simulate one run of a job to its end.

    The arguments are those of :class:`World`; ``world`` is the class to use, for example with a planted error.

    Raises:
        Violation: an invariant is broken.
    """
    scene = world(ranks, seed, faults, until, shards, memory)
    scene.run()
    assert scene.outcome is not None
    steps = [int(str(r.data["step"])) for r in scene.journal if r.kind == "run_ended"]
    return SimResult(
        code=scene.outcome.code,
        reason=scene.outcome.reason,
        step=steps[-1] if steps else -1,
        digest=scene.digest(),
        events=scene.events,
        time_s=scene.now,
        forward=scene.checks.counts["forward"],
        back=scene.checks.counts["back"],
        spares_called=scene.spares.calls,
        recovered=sum(r.kind == "recovered" for r in scene.journal),
        records=tuple(scene.journal),
        coverage=dict(scene.injector.coverage),
    )
