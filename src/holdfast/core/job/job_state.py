"""The facts of one run and the commands of the current event, shared by the state machines inside the controller.

Theory. Several small state machines handle one event in turn. They read and write one set of facts, and append commands
to one list, in order. A record comes before the messages that depend on it. The driver writes a record to the event log
before it executes the commands after it.

Terms. A node is *heard* while its agent is connected and answers in time. A process is *seated* when it is a member.

Invariants:
1. Generations and member ids are issued in this module only, each once.
2. No command is issued after ``finish``.
3. ``decides`` is True only while a majority of the voters is heard, or for a controller that is alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from holdfast.core.config import Config
from holdfast.core.decide.stop_policy import Failure
from holdfast.core.ids import Generation, MemberId, NodeId, SaveId
from holdfast.core.job.failed_devices import FAILURES_MAX, DeviceFailure, FailedDevices
from holdfast.core.job.failed_nodes import FailedNodes, FailedParts, leave_out
from holdfast.core.job.liveness import Liveness
from holdfast.core.job.log_replay import ReplayedState
from holdfast.core.job.membership import Member, Roster, assign, node_order
from holdfast.core.protocol.layout_messages import Layouts
from holdfast.core.protocol.messages import (
    Assignment,
    CancelTimer,
    Command,
    EndRun,
    Field,
    Finish,
    KillMember,
    LogRecord,
    Message,
    Release,
    Send,
    SetTimer,
    StartMembers,
)
from holdfast.core.protocol.peer_messages import StepDown
from holdfast.exit_codes import Exit

WHAT_LENGTH_MAX = 500
MEMBERS_PER_TERM = 1_000_000
ALONE = "the loss of the majority of the agents"
"""The source of the exit request in a controller that has lost the majority of the agents."""
STEPS_TO_SETTLE = 2.0
STARTS_TO_JOIN = 2.0

Uncovered = Callable[[Layouts, tuple[int, ...]], str]
"""(layouts of all ranks, ranks that can write) -> why these ranks do not cover every box; empty: they cover all."""


class Job:
    """The facts of one run, and the commands of the event that is being handled."""

    def __init__(self, config: Config, past: ReplayedState, uncovered: Uncovered) -> None:
        self.config = config
        self.uncovered = uncovered
        self.roster = Roster()
        self.liveness = Liveness(config)
        self.world_size = config.world_size  # at the newest start
        if past.seats and not config.library:
            self.world_size = len(past.seats)
        self.slots: dict[NodeId, int] = {}
        self.leaving: set[NodeId] = set()  # nodes on which no new member is started
        self.failed = FailedParts(
            FailedDevices(past.device_failures),
            FailedNodes(past.node_faults, past.failing_nodes, config.node_faults_max, config.node_window_s),
        )
        self.step_s: dict[NodeId, float] = {}  # duration of the last step on each node
        # By node: the ranks of other nodes of which it keeps states in memory, with the steps of these states.
        self.held: dict[NodeId, dict[int, frozenset[int]]] = {}
        self.hosts: dict[NodeId, tuple[str, int]] = {}  # address and a free port of each node
        self.generation = past.generation
        apart = config.alone * MEMBERS_PER_TERM
        if past.generation.n < apart:
            # The majority issues generations as well. A save of this side must not have a generation of the majority.
            # The successor of a controller without a majority continues its numbers: with the offset added twice they
            # could be the numbers of another agent.
            self.generation = Generation(past.generation.term, past.generation.n + apart)
        # A record of the log may have been lost with its node, or may never have reached this node. So each term has
        # its own range of ids, also the term of a voter that continues alone.
        taken = (config.term - 1) * MEMBERS_PER_TERM if config.several else 0
        self.last_member = max(past.last_member, taken)
        self.attempts = past.attempts
        self.answered = list(past.answered)
        self.session = past.session
        self.base_step = past.base_step
        self.step = past.step  # of the newest decision
        self.sealed_step = past.sealed_step
        self._sealed_last = past.sealed_last
        self.sealed_directory = ""  # of the last checkpoint that was reported
        self.root = past.root
        self.begun_s = 0.0  # from the start of a process to its first step: the longest so far
        self.state_size_bytes = 0  # the largest state size that a rank has reported to this controller
        self.exit_source = ALONE if config.alone else past.exit_source
        self.agreed_step = (
            past.agreed_step
        )  # step at which all ranks save and leave; None: they have not agreed on one
        self.unequal = past.unequal  # why the state of the living ranks is not trusted; empty: it is trusted
        self.released = past.released
        self.ends = past.ends  # the verdict that ends the run; its save may need another attempt
        self.ended = False
        self._resume = ""
        self._out: list[Command] = []
        self._placed: tuple[object, tuple[tuple[NodeId, str], ...]] | None = None

    def held_elsewhere(self) -> dict[int, frozenset[int]]:
        """Return, by rank, the steps of the states that living nodes keep in memory for ranks of other nodes."""
        found: dict[int, frozenset[int]] = {}
        for node_id, ranks in sorted(self.held.items()):
            for rank, steps in ranks.items() if self.liveness.is_up(node_id) else ():
                found[rank] = found.get(rank, frozenset()) | steps
        return found

    def forget_held(self, rank: int) -> None:
        """Forget the states that other nodes keep in memory for this rank, because the rank refuses them."""
        for ranks in self.held.values():
            ranks.pop(rank, None)

    def seal(self, save_id: SaveId) -> None:
        """Record that the checkpoint ``save_id`` is complete."""
        self.sealed_step = max(self.sealed_step, save_id.step)
        self._sealed_last = max(self._sealed_last, (save_id.generation, save_id.step))

    @property
    def sealed_here(self) -> int:
        """The newest step that the present members, or the recovery that chose them, have sealed; -1 if none is sealed.

        A checkpoint that is sealed late for an older roster is not evidence. All ranks may have gone back since then,
        and may be running the step of that checkpoint again.
        """
        generation, step = self._sealed_last
        return min(step, self.sealed_step) if generation >= self.roster.generation else -1

    def take(self) -> list[Command]:
        """Return the commands issued since the last call, and clear the list of commands."""
        out, self._out = self._out, []
        return out

    def record(self, kind: str, /, **data: Field) -> None:
        """Append a record of this ``kind`` to the event log."""
        if not self.ended:
            self._out.append(LogRecord(kind=kind, data=data))

    def send(self, member: Member, message: Message) -> None:
        """Send a message to a worker if it is alive."""
        if member.alive:
            self.send_process(member.member_id, message)

    @property
    def repeats(self) -> bool:
        """True if the script's code after the training can run again: the training is saved, and this run may start
        workers.
        """
        saved = 0 <= self.step <= self.sealed_step
        return self.released and saved and not self.exit_source and not self.config.library

    def decide(self, step: int | None) -> None:
        """Set the step of the job to the step of a decision. None (no session has opened) changes nothing."""
        if step is not None:
            self.step = step

    def go_back(self, step: int) -> None:
        """Set the step of the job back to ``step``, of which each rank has a state in memory."""
        self.step = step
        self.base_step = min(self.base_step, step)

    def restored(self, step: int) -> None:
        """Set the step of the job to the step that all ranks of a new start have restored.

        The ranks have compared their copies of this state. So an earlier report of differing copies no longer counts.
        """
        self.unequal = ""
        self.base_step = self.step = step
        self.sealed_step = min(self.sealed_step, step)

    def distrust(self, step: int, rank: int) -> None:
        """Record that copies of the state differ.

        From then on no state of living ranks and no state in memory is used.
        """
        self.unequal = f"copies of the state of step {step} differ between ranks"
        self.record("copies_differ", step=step, rank=rank, reason=self.unequal)

    def finished(self, step: int, *, sealed: bool) -> None:
        """Record that the session of a rank has ended at ``step``.

        With ``sealed``, a checkpoint of this step is complete.
        """
        if sealed:
            self.sealed_step = max(self.sealed_step, step)

    def release(self, step: int) -> None:
        """Record that all sessions have ended at ``step``. The code of the script after the training begins."""
        self.released, self.step = True, step

    def join_generation(self, generation: Generation) -> None:
        """Take over the generation that the first worker reports in library mode."""
        self.generation = generation
        self.roster.renew(generation)

    def reopen(self, reason: str) -> None:
        """Because of a fault, kill the members that run the code after the training. All ranks then start again."""
        if not self.released:
            return
        self.released = False
        for member in self.roster.living:
            if member.failed is None:
                self.kill(member, reason, self.config.term_grace_s, excused=True)

    def let_go(self, member: Member) -> None:
        """Order a member to end within ``failing_s`` seconds: its user code raised, and no rank needs its state."""
        member.may_end = True
        self.send(member, Release(member_id=member.member_id, generation=self.generation))
        self.timer(f"failing:{member.member_id}", self.config.failing_s)

    def time_out(self, member: Member, reason: str, *, hung_at_s: float = 0.0) -> None:
        """Kill a member that has not answered in time. Its agent first collects evidence about the process.

        ``hung_at_s``: time since which the process hangs, on the controller's clock; 0 if it does not hang.
        """
        self.kill(member, reason, silent=True, hung_at_s=hung_at_s)

    def send_node(self, node_id: NodeId, message: Message) -> None:
        """Send a message to the agent of a node."""
        if not self.ended:
            self._out.append(Send(to=f"agent:{node_id}", message=message))

    def send_process(self, member_id: MemberId, message: Message) -> None:
        """Send a message to a process, even if it is not a member."""
        if not self.ended:
            self._out.append(Send(to=f"member:{member_id}", message=message))

    def timer(self, name: str, delay_s: float) -> None:
        """Set the timer ``name``: ``Tick(name)`` arrives after ``delay_s`` seconds."""
        if not self.ended:
            self._out.append(SetTimer(name=name, delay_s=delay_s))

    def cancel(self, name: str) -> None:
        """Cancel the timer ``name``."""
        if not self.ended:
            self._out.append(CancelTimer(name=name))

    def next_generation(self) -> Generation:
        """Issue and return a new generation. The caller records it before it sends any message."""
        self.generation = Generation(self.config.term, self.generation.n + 1)
        return self.generation

    def kill(
        self,
        member: Member,
        reason: str,
        grace_s: float = 0.0,
        *,
        silent: bool = False,
        excused: bool = False,
        hung_at_s: float = 0.0,
        hung_in: str = "",
    ) -> None:
        """Kill a member with SIGKILL. Repeated orders are harmless.

        Args:
            member: the member.
            reason: why, for the log and the report.
            grace_s: seconds between SIGTERM and SIGKILL; 0 sends no SIGTERM.
            silent: the member has not answered in time, so the agent first collects evidence about the process.
            excused: the fault of another member is the cause.
            hung_at_s: time since which the process hangs; 0 if it does not hang.
            hung_in: position of the hang if code of the process itself is the reason.
        """
        if not member.alive:
            return
        member.condemn(reason, excused=excused, hung_at_s=hung_at_s, hung_in=hung_in)
        who, node = member.member_id, member.node_id
        order = KillMember(member_id=who, node_id=node, reason=reason, grace_s=grace_s, silent=silent)
        self.send_node(member.node_id, order)
        self.timer(f"kill:{member.member_id}", grace_s + self.config.kill_s)

    def start_members(self, resume: str) -> bool:
        """Make a new roster in the newest generation and start its members. Return False if nodes are missing.

        ``resume``: name of the save to load; empty means the newest checkpoint.
        """
        before = {m.rank: m.node_id for m in self.roster.members}
        world_size = self.room()
        seats = assign(self._up(), world_size, self.last_member + 1, before)
        if not seats:
            return False
        if world_size != self.world_size:
            self.record("resized", ranks_before=self.world_size, ranks=world_size)
            self.world_size = world_size
            self.roster.forget_layouts()
        members = [
            Member(member_id=a.member_id, rank=a.rank, local_rank=local_rank, node_id=node)
            for node, here in seats.items()
            for a, local_rank in zip(here, self._seats_of(node, len(here)), strict=True)
        ]
        members.sort(key=lambda m: m.rank)
        self.last_member = max(m.member_id for m in members)
        self.roster.seat(self.generation, members)
        attempt, self.attempts = self.attempts, self.attempts + 1
        self.record(
            "generation_started",
            generation=str(self.generation),
            attempt=attempt,
            in_place=False,
            resume=resume,
            members=[int(m.member_id) for m in members],
            nodes=[str(m.node_id) for m in members],
            local_ranks=[m.local_rank for m in members],
        )
        self._resume = resume
        self.start_again(members)
        self.timer("startup", self.config.startup_s)
        return True

    @property
    def decides(self) -> bool:
        """True if this controller may end, restart, shrink or move the job.

        The leader of a term needs a majority of the voters. Without it, the other agents may have elected another
        leader. A controller that is alone decides about its own node only.
        """
        return bool(self.config.alone) or self.liveness.has_majority

    @property
    def is_assembled(self) -> bool:
        """True if all voters have connected to this controller, and as many nodes as at the start of the job."""
        return len(self.slots) >= self.config.nnodes and set(self.config.voters) <= set(self.slots)

    @property
    def settle_s(self) -> float:
        """Time limit in seconds for the answers to a fence.

        A rank that makes an update answers only after the update, which takes less than a step.
        """
        step_s = max((s for node, s in self.step_s.items() if node in self.roster.nodes), default=0.0)
        return max(self.config.quiesce_s, STEPS_TO_SETTLE * step_s)

    @property
    def gasp_s(self) -> float:
        """Time limit in seconds of a last-gasp save. A rank in doubt makes its update before it saves."""
        return max(self.config.gasp_s, self.settle_s)

    @property
    def join_s(self) -> float:
        """Time limit in seconds for a newcomer to join.

        It covers the longest time from the start of a process to its first step, because imports and the building or
        compilation of a model show no progress.
        """
        return max(self.config.startup_s, STARTS_TO_JOIN * self.begun_s)

    @property
    def fits(self) -> bool:
        """True if the nodes that are heard have room for all ranks that start now."""
        return sum(slots for _, slots in self._up()) >= self.room()

    def room(self) -> int:
        """Return the number of ranks to start now: all, or fewer if the living nodes cannot hold all and fewer are
        allowed.

        The number of nodes used divides the full number of nodes. Each rank then does the work of a whole number of the
        former ranks, so a step still has the same batches.
        """
        return self._room_on(self._up())

    def _room_on(self, up: Sequence[tuple[NodeId, int]]) -> int:
        config = self.config
        if not config.nodes_min or sum(slots for _, slots in up) >= config.world_size:
            return config.world_size
        per_node = config.world_size // config.nnodes
        usable = sum(slots >= per_node for _, slots in up)
        nodes = next(
            (n for n in range(usable, config.nodes_min - 1, -1) if config.nnodes % n == 0), config.nnodes
        )
        return nodes * per_node

    def _up(self) -> list[tuple[NodeId, int]]:
        """Return the nodes on which members may be started, in their order, with the number of their usable slots.

        These nodes are heard, will not leave, and are not left out.
        """
        return leave_out(self._all_up(), self.failed.nodes.failing, self._room_on)

    def without_left_out(self, nodes: Iterable[NodeId]) -> set[NodeId]:
        """Return ``nodes`` without the nodes that are left out because they failed too often."""
        here = [(node, len(self.failed.devices.usable(node, self.slots[node]))) for node in nodes]
        return {node for node, _ in leave_out(here, self.failed.nodes.failing, self._room_on)}

    def _all_up(self) -> list[tuple[NodeId, int]]:
        here = self.slots.keys() - self.leaving
        up = [n for n in sorted(here, key=node_order) if self.liveness.is_up(n)]
        return [(n, len(self.failed.devices.usable(n, self.slots[n]))) for n in up]

    def _seats_of(self, node_id: NodeId, count: int) -> list[int]:
        """Return local ranks for ``count`` members of a node that has no other member. Trusted devices come first."""
        slots = self.slots[node_id]
        trusted = self.failed.devices.trusted(node_id, slots)
        rest = [n for n in self.failed.devices.usable(node_id, slots) if n not in trusted]
        return sorted([*trusted, *rest][:count])

    def heard(self) -> set[str]:
        """Return the names of the nodes that are heard, will not leave and are not left out."""
        return {str(node) for node, _ in self._up()}

    def places(self, dead: Sequence[Member]) -> dict[int, tuple[NodeId, int]]:
        """Return, by rank, a node and a local rank for the newcomer of each dead member.

        The choices, in this order: the slot of the dead member if its device is trusted; the first free slot with a
        trusted device; the slot of the dead member if it can be used. Ranks without a possible choice are missing.
        """
        up = [node for node, _ in self._up()]
        trusted = {node: self.failed.devices.trusted(node, self.slots[node]) for node in up}
        taken = {(node, m.local_rank) for node in up for m in self.roster.on_node(node)}
        found: dict[int, tuple[NodeId, int]] = {}
        for member in dead:
            if member.local_rank in trusted.get(member.node_id, ()):
                found[member.rank] = (member.node_id, member.local_rank)
        taken.update(found.values())
        free = [(node, n) for node in up for n in trusted[node] if (node, n) not in taken]
        for member in dead:
            if member.rank in found:
                continue
            if free:
                found[member.rank] = free.pop(0)
            elif self._is_usable(member):
                found[member.rank] = (member.node_id, member.local_rank)
        return found

    def _is_usable(self, member: Member) -> bool:
        node = member.node_id
        if node in self.leaving or not self.liveness.is_up(node):
            return False
        return member.local_rank in self.failed.devices.usable(node, self.slots.get(node, 0))

    def device_failed(self, member: Member, failure: Failure, *, certain: bool) -> bool:
        """Record an error that the device of this member may have caused.

        Returns: True if the error does not count as an error of the script. Either a device has certainly failed, or
        the device may have failed and another device is free to try.
        """
        node, slot = member.node_id, member.local_rank
        noted = DeviceFailure(
            node_id=node,
            local_rank=slot,
            step=failure.step,
            digest=failure.digest,
            certain=certain,
            occurrence=failure.occurrence,
        )
        if self.failed.devices.note(noted):
            self.record(
                "device_failed",
                node=str(node),
                local_rank=slot,
                rank=member.rank,
                step=failure.step,
                certain=certain,
                what=failure.what[:WHAT_LENGTH_MAX],
                digest=failure.digest,
                occurrence=failure.occurrence,
                failures=self.failed.devices.count(node, slot),
                left_out=self.failed.devices.count(node, slot, certain=certain) >= FAILURES_MAX,
            )
        return certain or (not self.failed.devices.is_of_script(noted) and self._has_another(member))

    def _has_another(self, member: Member) -> bool:
        """Return whether a trusted device other than the device of this member is free."""
        taken = {(m.node_id, m.local_rank) for m in self.roster.living} | {
            (member.node_id, member.local_rank)
        }
        return any(
            (node, n) not in taken
            for node, _ in self._up()
            for n in self.failed.devices.trusted(node, self.slots[node])
        )

    @property
    def left_out(self) -> str:
        """The broken devices that are left out, as text for the end of a sentence; empty if none is."""
        broken = [
            f"device {n} of {node}"
            for node, slots in sorted(self.slots.items())
            for n in sorted(set(range(slots)) - set(self.failed.devices.usable(node, slots)))
        ]
        return f"; left out after {FAILURES_MAX} failures: {', '.join(broken)}" if broken else ""

    def replace_members(self, dead: Sequence[Member]) -> None:
        """Start a newcomer in place of each dead member, in the newest generation.

        There must be room for all of them.
        """
        places = self.places(dead)
        newcomers = [
            Member(
                member_id=MemberId(self.last_member + 1 + i),
                rank=old.rank,
                local_rank=places[old.rank][1],
                node_id=places[old.rank][0],
                joining=True,
            )
            for i, old in enumerate(dead)
        ]
        self.last_member = newcomers[-1].member_id
        self.record(
            "members_replaced",
            generation=str(self.generation),
            ranks=[m.rank for m in newcomers],
            members=[int(m.member_id) for m in newcomers],
            nodes=[str(m.node_id) for m in newcomers],
            local_ranks=[m.local_rank for m in newcomers],
        )
        for member in newcomers:
            self.roster.reseat(member)
        self.start_again(newcomers)

    def start_again(self, members: Sequence[Member]) -> None:
        """Order the agents to start these members. An agent ignores the order for a process that exists."""
        joining = [m for m in members if m.joining]
        self._start(joining, self.generation, "", join=True)
        seated = [m for m in members if not m.joining]
        self._start(seated, self.roster.generation, self._resume, join=False)

    def _start(self, members: Sequence[Member], generation: Generation, resume: str, *, join: bool) -> None:
        host, port = self.hosts.get(self.roster.members[0].node_id, ("", 0))
        places = self._places
        seats: dict[NodeId, list[Assignment]] = {}
        for member in members:
            seat = Assignment(member.member_id, member.rank, member.local_rank)
            seats.setdefault(member.node_id, []).append(seat)
        for node in sorted(seats, key=node_order):
            order = StartMembers(
                node_id=node,
                generation=generation,
                world_size=self.world_size,
                attempt=self.attempts - 1,
                members=tuple(seats[node]),
                resume=resume,
                root=self.root or self.config.root_before,
                restart_count=self.attempts - 1,
                kv_node=self.kv_node,
                master_host=host,
                master_port=port,
                join=join,
                places=places,
            )
            self.send_node(node, order)

    @property
    def _places(self) -> tuple[tuple[NodeId, str], ...]:
        # Computed once per roster from all members, because the order to each node holds the same places.
        key = (self.generation, self.last_member, tuple(self.hosts.values()))
        if self._placed is None or self._placed[0] != key:
            nodes = dict.fromkeys(member.node_id for member in self.roster.members)  # in rank order
            found = tuple((node_id, self.hosts[node_id][0]) for node_id in nodes if node_id in self.hosts)
            self._placed = (key, found)
        return self._placed[1]

    def stand_down(self, reason: str) -> None:
        """Stop deciding, so that the agents can elect another controller. No command is issued after this."""
        if self.ended:
            return
        self.record("stood_down", reason=reason, term=self.config.term)
        self._out.append(StepDown(reason=reason))
        self.ended = True

    @property
    def kv_node(self) -> str:
        """The node of rank 0, whose agent holds the key-value store of the generation; empty in a job of one node."""
        first = self.roster.members[0].node_id
        return first if first in self.hosts else ""

    def finish(self, code: Exit, reason: str) -> None:
        """End the run with exit code ``code``. No command is issued after this."""
        if self.ended:
            return
        if self.config.alone and code is not Exit.OK:
            code = Exit.REQUEUE if 0 <= self.step <= self.sealed_step else Exit.UNSAVED
            reason = f"no majority of the agents can be reached: {reason}"
        self.record("run_ended", code=int(code), cause=code.name, reason=reason, step=self.step)
        for node_id in sorted(self.slots):
            self.send_node(node_id, EndRun(code=int(code), reason=reason))
        self._out.append(Finish(code=int(code), reason=reason))
        self.ended = True
