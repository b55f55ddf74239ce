"""Simulation of a whole run on several hosts: elections of the controller's host, lost hosts and partitions.

The state machines of agents, elections, controllers and steps are the real ones. One seed and one case determine one
run. The workers, the store, the spares and most checks are those of ``sim/world.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from holdfast.core.agent import Agent
from holdfast.core.config import Config
from holdfast.core.controller import Controller
from holdfast.core.election import Election, ElectionConfig, HardState
from holdfast.core.ids import MemberId, NodeId
from holdfast.core.job.log_replay import ReplayedState
from holdfast.core.job.membership import place_alone
from holdfast.core.protocol.messages import (
    Command,
    ExitRun,
    Finish,
    KillMember,
    LogRecord,
    MemberStarted,
    Message,
    RankState,
    Send,
    StartMembers,
)
from holdfast.core.protocol.peer_messages import Claim, JobFormed, VoterSet, WitnessReply
from holdfast.exit_codes import Exit
from holdfast.sim.faults import SimFault
from holdfast.sim.hosts.controller_process import ControllerProcess
from holdfast.sim.hosts.host_checks import HostChecks
from holdfast.sim.hosts.host_collectives import HostCollectives
from holdfast.sim.hosts.host_faults import HostFault, HostInjector
from holdfast.sim.hosts.network import Network
from holdfast.sim.hosts.sim_council import SimCouncil
from holdfast.sim.hosts.sim_disk import SimDisk
from holdfast.sim.hosts.sim_host import SimHost
from holdfast.sim.hosts.step_history import StepHistory
from holdfast.sim.injector import NO_PHASE
from holdfast.sim.sim_agent import SimAgent
from holdfast.sim.worker import SimWorker
from holdfast.sim.world import PIDS_PER_NODE, World

BOOT_S = (0.0, 0.1)
SUCCESSOR_S = (0.2, 0.5)
UNMET_S = 30.0
END_S = 5.0
NOTICE_S = 0.05  # longest time until a controller knows a change of the electorate that its host has stored
LEASE_S = 3.0  # a controller suspects a voter that sends nothing before this time has passed
CLOCK_OFFSET_S_MAX = 1e6
CLOCK_RATE_ERROR_MAX = 2e-4


class HostsCase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One schedule: the size of a job and its faults.

    Attributes:
        nodes: number of hosts that hold ranks.
        spares: number of spare hosts.
        per_node: number of ranks per host.
        shards: number of distinct boxes; rank r holds box ``r % shards``.
        nodes_min: smallest number of hosts with which the job continues after it has lost hosts and their ranks; 0 if
            the job never continues with fewer ranks. Another value than 0 needs ``shards`` 1.
        witness: True if the job has a witness.
        until: number of steps of the run.
    """

    nodes: int = 3
    spares: int = 0
    per_node: int = 1
    shards: int = 1
    nodes_min: int = 0
    witness: bool = False
    until: int = 16
    faults: tuple[SimFault, ...] = ()
    host_faults: tuple[HostFault, ...] = ()


class HostsWorld(World):
    """One simulated run on several hosts: the hosts, their network, processes, faults and checks."""

    collectives_type = HostCollectives
    checks_type = HostChecks
    election_type = Election
    agent_type = Agent

    checks: HostChecks
    collectives: HostCollectives

    def __init__(self, seed: int, case: HostsCase) -> None:
        self.case = case
        self.hosts: dict[NodeId, SimHost] = {}
        self.network = Network(self)
        self.history = StepHistory()
        # (the controller decides alone, its order to end) of each controller that ended the run
        self.finishes: list[tuple[bool, Finish]] = []
        super().__init__(case.nodes * case.per_node, seed, case.faults, case.until, case.shards)
        names = [NodeId(f"n{number}") for number in range(case.nodes + case.spares)]
        for name in names:
            offset_s = self.rng.uniform(0.0, CLOCK_OFFSET_S_MAX)
            rate = 1.0 + self.rng.uniform(-CLOCK_RATE_ERROR_MAX, CLOCK_RATE_ERROR_MAX)
            self.hosts[name] = SimHost(name, case.per_node, offset_s, rate)
        self._with_spares = seed % 5 in (1, 3)
        self._agents = {n: self._make_agent(n, 1 + i * PIDS_PER_NODE) for i, n in enumerate(names)}
        self._claims: dict[int, tuple[NodeId, ...]] = {}
        self._lives: dict[MemberId, int] = {}  # the ``SimHost.life`` in which each process was started
        self._faults = HostInjector(self, names)
        self._faults.start(case.host_faults)

    def resume(self, before: HostsWorld) -> None:
        """Continue the job of the run ``before``, which asked to be queued again.

        This run takes over the checkpoints and the history of ``before``.
        """
        self.store.saves = {f"before/{name}": save for name, save in before.store.saves.items()}
        self.history = before.history
        self.history.requeued()

    # ---------------------------------------------------------------- hosts

    def begin(self) -> None:
        """Switch every host on."""
        for name in self.hosts:
            self.later_on(name, self.jitter(*BOOT_S), f"boot {name}", partial(self._boot, name))

    def later_on(self, node_id: NodeId, delay_s: float, label: str, action: Callable[[], None]) -> None:
        """Run ``action`` on a host after ``delay_s`` seconds.

        If the host loses power before that time, the action never runs. If the host is paused at that time, the action
        runs after the pause. A timer (``label`` begins with "tick") runs at the rate of the host's clock.
        """
        host = self.hosts.get(node_id)
        if host is None:
            self.later(delay_s, label, action)
            return
        life = host.life
        if label.startswith("tick"):
            delay_s = delay_s / host.rate + (self.jitter(0.0, host.late_s) if host.late_s else 0.0)

        def run() -> None:
            if host.life != life:
                return
            if host.paused_until_s > self.now:
                self.later(host.paused_until_s - self.now, label, run)
            else:
                action()

        self.later(delay_s, label, run)

    def clock(self, node_id: NodeId) -> float:
        """Return the present reading of CLOCK_MONOTONIC on a host, in seconds."""
        return self.hosts[node_id].reads(self.now)

    def is_steady(self, node_id: NodeId) -> bool:
        """Return True if no fault has delayed the processes, the timers or the syncs of a host."""
        return self.hosts[node_id].is_steady

    def is_up(self, node_id: NodeId) -> bool:
        """Return True if a host has power."""
        return self.hosts[node_id].is_up

    def others(self, node_id: NodeId) -> tuple[NodeId, ...]:
        """Return all hosts except ``node_id``."""
        return tuple(name for name in self.hosts if name != node_id)

    def council_of(self, node_id: NodeId) -> SimCouncil | None:
        """Return the council of the agent on a host, or None if that agent is not alive."""
        council = self.hosts[node_id].council
        return council if council is not None and not council.over else None

    def controller_on(self, node_id: NodeId) -> ControllerProcess | None:
        """Return the controller process that runs on a host, or None if no controller runs there."""
        process = self.hosts[node_id].process
        return process if process is not None and process.lives else None

    def _make_agent(self, name: NodeId, pid: int) -> SimAgent:
        slots = self.case.per_node
        agent = SimAgent(name, slots, int(self._with_spares), self.world_size, pid)
        config = msgspec.structs.replace(agent.machine.config, host=str(name), port=1, beat_s=0.5)
        agent.machine = self.agent_type(config)
        return agent

    def _boot(self, name: NodeId) -> None:
        """Start an agent on a host: the first agent of the host, or the successor of a dead agent."""
        host = self.hosts[name]
        host.booting = False
        if not host.is_up or host.left:
            return
        before = self._agents[name].machine.config.pid
        agent = self._agents[name] = self._make_agent(name, before + 1)
        self._execute_agent(agent, agent.machine.start(self.clock(name)))
        if host.in_job:
            self._feed_agent(agent, JobFormed())
        for member_id, worker in sorted(self.workers.items()):
            if worker.node_id != name or self._lives[member_id] != host.life:
                continue
            if worker.alive:
                started = MemberStarted(member_id=member_id, node_id=name, pid=int(member_id))
                self._feed_agent(agent, started)
                self.later_on(
                    name, self.jitter(0.01, 0.1), f"rejoin:{worker.rank}", partial(self._rejoin, worker)
                )
            else:
                self._report_exit(agent, self._exit_of(worker, None, None))
        first = name == next(iter(self.hosts)) and not any(each.in_job for each in self.hosts.values())
        # If all hosts were reinstalled, no host may found the job a second time: that would be another job.
        founders = len(self.hosts) if first and not self.journal else 0
        host.council = SimCouncil(self, name, host.disk, founders, witness=self.case.witness)
        if host.disk.ballot.electorate is None:
            self.later_on(name, UNMET_S, f"unmet {name}", partial(self._unmet, agent, host))
        host.council.begin()

    def _unmet(self, agent: SimAgent, host: SimHost) -> None:
        """End an agent that belongs to no job and knows no leader. Called ``UNMET_S`` after the start of the agent.

        If the agent belongs to no job but knows a leader, this method runs again after ``UNMET_S``.
        """
        council = host.council
        if not agent.alive or council is None or council.meeting.job or council.apart:
            return
        if council.election.lead is None:
            self._leave(host)
        else:
            self.later_on(host.node_id, UNMET_S, f"unmet {host.node_id}", partial(self._unmet, agent, host))

    def _leave(self, host: SimHost) -> None:
        """End the agent of a host, without a successor. A controller process on the host ends ``END_S`` later."""
        host.left = True
        self._agents[host.node_id].alive = False
        if host.council is not None:
            host.council.end()
        process = host.process
        if process is not None:
            self.later_on(host.node_id, END_S, f"{host.node_id} ends", process.die)

    # ---------------------------------------------------------------- faults

    def phase(self) -> str:
        """Return the phase of the job that the newest term's controller reports; ``NO_PHASE`` without a controller.

        Controllers that decide alone, only for their own host, do not count.
        """
        leading = self._leading()
        return NO_PHASE if leading is None else str(leading.machine.snapshot()["phase"])

    def _leading(self) -> ControllerProcess | None:
        processes = [host.process for host in self.hosts.values() if host.process is not None]
        living = [process for process in processes if process.lives and not process.alone]
        return max(living, key=lambda process: process.term, default=None)

    def lose_host(self, node_id: NodeId, back_s: float, *, empty: bool) -> None:
        """Cut the power of a host.

        The host starts again after ``back_s`` virtual seconds (0 means never), with an empty disk if ``empty``.
        """
        host, agent = self.hosts[node_id], self._agents[node_id]
        if not host.is_up or host.left:
            return
        self.memory_losses |= {"agent", "controller", "node"}
        host.life += 1
        host.is_up = host.booting = agent.alive = False
        self.network.vanished(node_id)
        if host.council is not None:
            host.council.end()
        if host.process is not None:
            host.process.die()
        self.spares.agent_died(node_id)
        generations = set()
        for worker in self.workers.values():
            if worker.node_id == node_id and worker.alive:
                worker.alive = False
                generations.add(worker.machine.generation)
        for generation in sorted(generations):
            self.collectives.break_off(generation)
        if empty:
            host.disk = SimDisk()
            host.in_job = False
        else:
            host.disk.lose_power(self.rng)
        if back_s:
            host.booting = True
            self.later(back_s, f"power {node_id}", partial(self._power_on, node_id))

    def _power_on(self, node_id: NodeId) -> None:
        self.hosts[node_id].is_up = True
        self.later_on(node_id, self.jitter(*SUCCESSOR_S), f"boot {node_id}", partial(self._boot, node_id))

    def pause(self, node_id: NodeId, duration_s: float) -> None:
        """Pause all processes of a host for ``duration_s`` virtual seconds. The clock of the host continues."""
        host = self.hosts[node_id]
        host.is_steady = False
        host.paused_until_s = max(host.paused_until_s, self.now + duration_s)

    def jump(self, node_id: NodeId, ahead_s: float) -> None:
        """Set the clock of a host ahead by ``ahead_s`` seconds."""
        self.hosts[node_id].offset_s += ahead_s

    def set_lateness(self, node_id: NodeId, late_s: float) -> None:
        """Delay each timer of a host by a random time of at most ``late_s`` virtual seconds."""
        self.hosts[node_id].late_s = late_s
        self.hosts[node_id].is_steady = False

    def set_disk(self, node_id: NodeId, *, slow_s: float, full: bool) -> None:
        """Make the disk of a host slow (each sync takes up to ``slow_s`` seconds longer), full, or normal again."""
        disk = self.hosts[node_id].disk
        disk.slow_s, disk.is_full = slow_s, full
        self.hosts[node_id].is_steady = False

    def kill_controller(self) -> None:
        """Kill the controller with the newest term, among those that do not decide alone."""
        leading = self._leading()
        if leading is not None:
            self.memory_losses.add("controller")
            leading.die()

    def kill_agent(self, node_id: NodeId) -> None:
        """Kill the agent of a host, but not its workers and controller. The launcher starts a new agent."""
        if self.hosts[node_id].is_up and not self._agents[node_id].machine.ended:
            self.agent_broke(node_id)

    def agent_broke(self, node_id: NodeId) -> None:
        """End an agent process with an error, and schedule its successor."""
        host, agent = self.hosts[node_id], self._agents[node_id]
        if not agent.alive:
            return
        agent.alive = False
        self.memory_losses.add("agent")
        self.spares.agent_died(node_id)
        if host.council is not None:
            host.council.end()
        host.booting = True
        self.later_on(node_id, self.jitter(*SUCCESSOR_S), f"boot {node_id}", partial(self._boot, node_id))

    def ask_exit(self) -> None:
        """Simulate the command ``holdfast exit`` on the first host with a living agent."""
        agents = [agent for agent in self._agents.values() if agent.alive]
        if agents:
            self._ask_exit_of(agents[0])

    def ask_exit_on(self, node_id: NodeId) -> None:
        """Simulate the command ``holdfast exit`` on one host. Without a living agent there it has no effect."""
        if self._agents[node_id].alive:
            self._ask_exit_of(self._agents[node_id])

    def _ask_exit_of(self, agent: SimAgent) -> None:
        self.checks.exit_asked = True
        self._feed_agent(agent, ExitRun(grace_s=60.0, source="test"))

    def has_start(self, node_id: NodeId, term: int) -> bool:
        """Return whether the event log of a host has a start of the job by a leader before ``term``."""
        lines = self.hosts[node_id].disk.lines
        return any(line.record.kind == "generation_started" and line.term < term for line in lines)

    def is_cut_off(self, node_id: NodeId) -> bool:
        """Return True if no majority of a host's electorate can have sent it messages in the last ``LEASE_S`` seconds.

        Return False if a fault has delayed timers or syncs of the host: the knowledge of the host may then be outdated.
        """
        host = self.hosts[node_id]
        electorates = [host.disk.ballot.electorate]
        if host.council is not None and self.now - host.council.notice.at_s <= NOTICE_S:
            electorates.append(host.council.notice.before)  # the controller may not know the change yet
        return host.is_steady and not any(self._may_hear_majority(node_id, each) for each in electorates)

    def _may_hear_majority(self, node_id: NodeId, electorate: VoterSet | None) -> bool:
        """Return True if a majority of ``electorate`` may be heard on a host, or if there is no electorate."""
        if electorate is None:
            return True
        return sum(self._may_hear(node_id, voter) for voter in electorate.voters) >= electorate.quorum

    def _may_hear(self, node_id: NodeId, other: NodeId) -> bool:
        return self.network.silence_s(other, node_id) <= LEASE_S

    # ---------------------------------------------------------------- controllers

    @property
    def controllers(self) -> list[Controller]:
        """The state machines of the living controllers of all hosts."""
        processes = [host.process for host in self.hosts.values()]
        return [process.machine for process in processes if process is not None and process.lives]

    def make_controller(self, config: Config, past: ReplayedState) -> Controller:
        """Make the state machine of a controller process, which starts with the state ``past`` from the event log."""
        return self.controller_type(config, past, self.store.uncovered)

    def make_election(self, config: ElectionConfig, kept: HardState) -> Election:
        """Make the state machine of an agent's election, which starts with ``kept`` from the election file."""
        return self.election_type(config, kept)

    def controller_config(self, disk: SimDisk, node_id: NodeId, term: int, alone: bool) -> Config:
        """Return the configuration of a controller on a host, as ``controllerd.config_of`` makes it.

        ``alone`` is True if the controller decides only for its own host.
        """
        voters = disk.ballot.electorate.voters if disk.ballot.electorate is not None else ()
        return Config(
            run_id="sim",
            world_size=self.world_size,
            nnodes=self.case.nodes,
            nodes_min=self.case.nodes_min,
            voters=voters if len(voters) > 1 else (),
            several=True,
            alone=place_alone(node_id) if alone else 0,
            term=term,
            max_restarts=64,
            on_fault=self.on_fault,
            verify=True,
            beat_s=0.5,
            lost_s=1.5,
            adoption_s=3.0,
        )

    def run_controller(self, node_id: NodeId, term: int, alone: bool) -> ControllerProcess | None:
        """Start a controller process of ``term`` on a host, and return the process.

        ``alone`` is True if the controller decides only for its own host.
        """
        host = self.hosts[node_id]
        if alone or term > 1:
            self.memory_losses.add("controller")
        process = host.process = ControllerProcess(self, node_id, host.disk, term, alone)
        process.begin()
        return process

    def decided(self, process: ControllerProcess, record: LogRecord) -> None:
        """Check the invariants after a controller has written a record to its event log."""
        self.journal.append(record)
        if process.lost:
            self.memory_losses |= {
                "node",
                "page",
            }  # a layout that reached no controller is also lost
        self.checks.decided(process, record)
        self._faults.moved()

    def hears(self, message: Message) -> None:
        """Record a message that a controller has received from an agent."""
        self.checks.hears(message)

    def sends(self, process: ControllerProcess, message: Message) -> None:
        """Check the invariants when a controller sends an order."""
        self.checks.sends(process, message)

    def finished(self, process: ControllerProcess, finish: Finish) -> None:
        """Record ``finish``, the order with which a controller ends the run for the agents connected to it."""
        self.finishes.append((process.alone, finish))

    # ---------------------------------------------------------------- agents and elections

    def agent_hears(self, node_id: NodeId, message: Message) -> None:
        """Pass a message from the controller, or about the connection to it, to the state machine of an agent."""
        self._feed_agent(self._agents[node_id], message)

    def joined(self, node_id: NodeId) -> None:
        """Record that a host belongs to the job, and notify the agent of the host."""
        self.hosts[node_id].in_job = True
        self._feed_agent(self._agents[node_id], JobFormed())

    def elected(self, node_id: NodeId, term: int) -> None:
        """Check the invariants when a node has won the election of ``term``."""
        self.checks.elected(node_id, term)

    def election_sends(self, node_id: NodeId, command: Send) -> None:
        """Check the invariants when the election on a node sends a message."""
        self.checks.voted(node_id, command, self.hosts[node_id].disk.last_place)

    def claim(self, node_id: NodeId, claim: Claim, answer: Callable[[WitnessReply], None]) -> None:
        """Send a claim to the witness on behalf of an agent.

        A claim proposes the voters of one electorate, which it names by number. The first claim of a number wins. Every
        reply about this number contains the voters of the first claim.

        Args:
            node_id: the host of the agent.
            claim: the claim.
            answer: called with the reply.
        """

        def ask() -> None:
            voters = self._claims.setdefault(claim.number, claim.voters)
            reply = WitnessReply(number=claim.number, voters=voters)
            self.later_on(node_id, self.jitter(0.001, 0.02), "witness", partial(answer, reply))

        self.later_on(node_id, self.jitter(0.001, 0.02), "claim", ask)

    def _want_controller(self, agent: SimAgent) -> None:
        council = self.council_of(agent.node_id)
        if council is not None:
            council.restart()

    def _to_controller(self, agent: SimAgent, message: Message) -> None:
        council = self.council_of(agent.node_id)
        if council is not None:
            council.send(message)

    def _execute_agent(self, agent: SimAgent, commands: list[Command]) -> None:
        super()._execute_agent(agent, commands)
        if agent.machine.ended and agent.alive:
            self._leave(self.hosts[agent.node_id])

    def _agent_ended(self, finish: Finish) -> None:
        self.outcome = self.outcome or finish

    def _is_over(self) -> bool:
        for host in self.hosts.values():  # after each event: a loop takes half of the time of a generator
            if not host.is_over:
                return False
        return True

    # ---------------------------------------------------------------- workers

    def uplink(self, worker: SimWorker, message: Message) -> None:
        """Send a message from a worker to the agent of its node."""
        self.checks.acts(worker)
        super().uplink(worker, message)

    def _carry_out_kill(self, worker: SimWorker, order: KillMember) -> None:
        self.checks.kills(worker, order)
        super()._carry_out_kill(worker, order)

    def moved(self, worker: SimWorker, old: RankState, new: RankState) -> None:
        """Check the change of a rank from state ``old`` to ``new``, and record a committed step in the history."""
        self.checks.acts(worker)
        super().moved(worker, old, new)
        if old == "updating" and new == "ready":
            loss = self.collectives.loss(worker.member_id)
            ranks = self.collectives.group(worker.machine.generation).world_size
            self.history.commits(worker, worker.machine.step - 1, loss, ranks)

    def spawn(self, node_id: NodeId, order: StartMembers, delay_s: float = 0.0) -> None:
        """Start workers on a host after ``delay_s`` virtual seconds.

        If it is 0, the delay is the random time that a fork takes. From then on the job has the number of ranks that
        ``order`` names. A host that was paused may carry out an order of an earlier generation: its processes get no
        seats.
        """
        seated = dict(self.seated)
        is_outdated = any(w.machine.generation > order.generation for w in self.workers.values())
        if order.world_size != self.world_size and not is_outdated:
            self.world_size = order.world_size
            self.everyone = tuple(range(order.world_size))
            self.seated = {rank: worker for rank, worker in seated.items() if rank < order.world_size}
        super().spawn(node_id, order, delay_s)
        if is_outdated:
            self.seated = seated
        for seat in order.members:
            self._lives[seat.member_id] = self.hosts[node_id].life
            self.history.begins(self.workers[seat.member_id])

    def fetch(self, newcomer: SimWorker, rank: int) -> int | None:
        """Transfer the state of ``rank`` to a newcomer.

        Returns:
            The number of updates in the parameters of that state. None if ``rank`` is dead, if its host is not
            connected to the newcomer's host, or if its parameters are being changed now.
        """
        holder = self.holder(rank)
        if holder is None or not self.network.connects(newcomer.node_id, holder.node_id):
            return None
        return super().fetch(newcomer, rank)

    def holder(self, rank: int) -> SimWorker | None:
        """Return the process that gives the state of ``rank`` to newcomers; None if there is none.

        A leader that is deposed and does not know it may have started the job with fewer ranks. Then the rank has no
        seat, and its newest living process gives the state.
        """
        living = (w for w in self.workers.values() if w.rank == rank and w.alive)
        return super().holder(rank) or max(living, key=lambda worker: worker.member_id, default=None)


class HostsResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a run on several hosts.

    Attributes:
        code: exit code of the job. It comes from a controller with a majority if such a controller ended the run,
            otherwise from a controller that decided alone. -1 if no controller has ended the run, and no host is
            left.
        step: the step at which training finished; -1 if training did not finish.
        time_s: virtual seconds of the run.
        digest: digest of all simulated events, equal for equal runs.
        coverage: number of faults by (kind, phase of the job).
    """

    code: int
    reason: str
    step: int
    time_s: float
    events: int
    digest: str
    coverage: dict[tuple[str, str], int]
    records: tuple[LogRecord, ...]


def run_hosts(seed: int, case: HostsCase, *, world: type[HostsWorld] = HostsWorld) -> HostsResult:
    """Simulate one run of a job on several hosts to its end.

    Args:
        seed: seed of all random numbers.
        case: the size of the job and its faults.
        world: the class of the simulated world, for example with a planted error.

    Raises:
        Violation: an invariant is broken.
    """
    scene = world(seed, case)
    scene.run()
    return _result(scene)


def run_requeued(seed: int, case: HostsCase, *, world: type[HostsWorld] = HostsWorld) -> HostsResult:
    """Simulate a job that starts again in a new run each time it exits with ``Exit.REQUEUE``.

    The arguments are those of :func:`run_hosts`. Only the first run has faults. The result is that of the last run.

    Raises:
        Violation: an invariant is broken.
    """
    scene = world(seed, case)
    scene.run()
    while (result := _result(scene)).code == Exit.REQUEUE:
        before, case = scene, msgspec.structs.replace(case, faults=(), host_faults=())
        scene = world(seed, case)
        scene.resume(before)
        scene.run()
    return result


def _result(scene: HostsWorld) -> HostsResult:
    ends = sorted(scene.finishes, key=lambda end: end[0])
    finish = ends[0][1] if ends else scene.outcome or Finish(code=-1, reason="no host is left")
    steps = [int(str(r.data["step"])) for r in scene.journal if r.kind == "finished"]
    step = steps[-1] if steps else -1
    if finish.code == Exit.OK:
        scene.history.ends(step, scene.world_size)
    return HostsResult(
        code=finish.code,
        reason=finish.reason,
        step=step,
        time_s=scene.now,
        events=scene.events,
        digest=scene.digest(),
        coverage=dict(scene.injector.coverage),
        records=tuple(scene.journal),
    )
