"""The controller process, which runs the state machine ``core.controller.Controller`` and serves the agents.

Command: ``python -m holdfast.runtime.controller.controllerd RUNDIR TERM [alone]``. The controller outlives an agent,
and the agent's successor connects again. When the controller dies, the agents elect the host of the next controller,
which reads the past from the event log of its node. Each line of the log is sent to the other nodes before the messages
that follow from this line are sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from holdfast import event_log as event_log
from holdfast.core.config import Config
from holdfast.core.controller import Controller
from holdfast.core.ids import MemberId, NodeId
from holdfast.core.job.agent_lines import AgentLines
from holdfast.core.job.log_replay import (
    AFTER,
    NO_PLACE,
    SNAPSHOT,
    LinePlace,
    ReplayedState,
    in_force,
    text_of_place,
)
from holdfast.core.job.membership import place_alone
from holdfast.core.protocol.layout_messages import Layouts
from holdfast.core.protocol.messages import (
    AgentBeat,
    AgentGone,
    AgentHello,
    Command,
    ControllerBeat,
    Field,
    Finish,
    LogRecord,
    MemberExited,
    Mirror,
    MirrorFrom,
    Send,
    Settled,
    StartMembers,
)
from holdfast.core.protocol.peer_messages import StepDown
from holdfast.errors import InternalError, StateError
from holdfast.event_log import Event, EventLog, Said
from holdfast.exit_codes import Exit
from holdfast.runtime.agent.leader_election import line_of, load_kept
from holdfast.runtime.agent.shared_root import is_there
from holdfast.runtime.net.channel import Channel, Hub
from holdfast.runtime.net.connection_limits import raise_limit
from holdfast.runtime.net.driver import Driver, watched
from holdfast.runtime.net.service_names import controller_of
from holdfast.runtime.node.process_info import ignore_warnings
from holdfast.runtime.node.run_settings import RunSettings
from holdfast.runtime.node.rundir import RunDir, probe_path
from holdfast.store.backends.location import place_of
from holdfast.store.layouts.layout_completion import catalogue_of
from holdfast.store.layouts.save_plan import plan
from holdfast.wire import MESSAGES, WireMessage

# Seconds without any agent after which the run has lost all nodes, so that no process would read a decision.
LONELY_S = 60.0
BEAT_S = 0.5
NODE_LOST_S = 1.5
UNSEEN_QUIESCE_S = 60.0
NODE_ADOPTION_S = 3.0
SAME_CLOCK_NS = 50_000_000
# Seconds within which a file that one node made is visible on the other nodes, if they share the directory.
PROBE_S = 10.0
SNAPSHOT_LINES = 10_000
SNAPSHOT_LENGTH_MAX = event_log.LINE_SIZE_BYTES_MAX // 2  # half, because escaped quotes make it longer
LINGER_S = 2.0  # time for the agents to read the last messages at the end


def uncovered(layouts: Layouts, sources: tuple[int, ...]) -> str:
    """Return why the ranks ``sources`` cannot write a complete checkpoint of ``layouts``; empty if they can."""
    try:
        catalogue = catalogue_of(layouts.by_rank())
        return plan(catalogue, frozenset(sources)).why_incomplete()
    except StateError as error:
        return error.message


def config_of(settings: RunSettings, term: int, voters: tuple[NodeId, ...], alone: int) -> Config:
    """Return the controller's configuration for this run. A job of several nodes has shorter time limits.

    Args:
        voters: the nodes that vote in elections.
        alone: 0 if the controller serves the whole job. Otherwise it serves only this node, which cannot reach a
            majority of the voters, and ``alone`` is the number of this node.
    """
    config = Config(
        run_id=settings.saves_as,
        root_before=settings.root_before,
        world_size=settings.workers,
        nnodes=settings.nnodes,
        nodes_min=settings.nnodes_min,
        voters=voters if len(voters) > 1 else (),
        several=settings.several,
        alone=alone,
        term=term,
        library=settings.library,
        max_restarts=settings.max_restarts,
        restart_window_s=settings.restart_window_s,
        node_faults_max=settings.node_faults_max,
        node_window_s=settings.node_window_s,
        verify=settings.verify_every > 0,
        on_fault=settings.on_fault,
        # Without hang detection the duration of a step is not known either.
        quiesce_s=settings.quiesce_s if settings.hang_factor else max(settings.quiesce_s, UNSEEN_QUIESCE_S),
        grace_s=settings.grace_s,
        patience_s=settings.hang_start_s,
        replace_slower_than=settings.replace_slower_than,
    )
    if not settings.several:
        return config
    return msgspec.structs.replace(config, beat_s=BEAT_S, lost_s=NODE_LOST_S, adoption_s=NODE_ADOPTION_S)


class ControllerLog(EventLog):
    """The event log of the controller.

    At intervals one line, the snapshot, sums up all earlier lines. A later controller reads from the newest snapshot
    on. In a job of several nodes each line has a number, and :meth:`append` passes the line to ``on_line``.
    """

    def begin(
        self,
        past: ReplayedState,
        lines: int,
        term: int,
        on_line: Callable[[Mirror], None] | None,
        after: LinePlace = NO_PLACE,
    ) -> None:
        """Continue the log of earlier controllers.

        Args:
            past: the state that the earlier lines describe.
            lines: the number of these lines since the last snapshot.
            term: the term of this controller.
            on_line: receives each line, in a job of several nodes, whose lines have numbers. None in a job of one node.
            after: (term, number) of the last earlier line.
        """
        self._past, self._since = past, lines
        self._term, self._count, self._on_line = term, 0, on_line
        self._after = after

    def append(
        self, kind: str, data: Mapping[str, Field], *, durable: bool = False, said: Said | None = None
    ) -> Event:
        """Write one line, pass it to ``on_line``, and return it as an event.

        After ``SNAPSHOT_LINES`` lines, also write a snapshot.
        """
        event = self._show(kind, data, durable, said)
        self._past = self._past.after(LogRecord(kind=kind, data=dict(data)))
        self._since += 1
        if self._since >= SNAPSHOT_LINES:
            self._since = 0
            snapshot = self._past.snapshot(time.monotonic())
            if len(str(snapshot.data["past"])) <= SNAPSHOT_LENGTH_MAX:
                self.append("snapshot", snapshot.data)
        return event

    def _show(self, kind: str, data: Mapping[str, Field], durable: bool, said: Said | None) -> Event:
        if self._on_line is None:
            return super().append(kind, data, durable=durable, said=said)
        self._count += 1
        numbered = {**data, "line": text_of_place((self._term, self._count))}
        if self._count == 1:
            numbered[AFTER] = text_of_place(self._after)
        event = super().append(kind, numbered, durable=durable, said=said)
        body = msgspec.json.encode(numbered)
        self._on_line(Mirror(term=self._term, number=self._count, kind=kind, data=body))
        return event


def in_time_of(event: Event, wall_s: float, mono_s: float) -> float:
    """Return the time of an event in this node's log, in seconds on the monotonic clock, which shows ``mono_s`` now.

    Jumps of the wall clock have no effect. The wall clock is used only if the machine was rebooted after the event.
    """
    age_s = mono_s - event.t_mono
    return mono_s - (age_s if age_s >= 0 else max(0.0, wall_s - event.t_wall))


class ControllerDaemon:
    """One controller, and the connections of the agents to it."""

    def __init__(self, run: RunDir, settings: RunSettings, term: int, alone: bool) -> None:
        self._run = run
        self._term = term
        self._alone = alone
        self._settings = settings
        self._lines: list[Mirror] = []  # all lines of earlier controllers and this one
        self._mirrors: set[Channel[WireMessage]] = set()
        self._offsets_ns: dict[NodeId, int] = {}  # by node: this monotonic clock minus that of the node
        self._log: EventLog | None = None
        self._probing: asyncio.Task[None] | None = None
        self._agents: AgentLines[Channel[WireMessage]] = AgentLines()
        self._homes: dict[MemberId, NodeId] = {}
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._driver: Driver | None = None

    async def serve(self) -> None:
        """Serve until the state machine ends the run.

        Raises:
            HoldfastError: the state machine, the journal or the store failed; the agent starts another term.
        """
        log, past = self._open_log()
        self._log = log
        log.append("controller_started", {"term": self._term, "pid": os.getpid()}, durable=True)
        kept = load_kept(self._run)
        voters = kept.electorate.voters if kept.electorate is not None else ()
        place = place_alone(NodeId(self._settings.node)) if self._alone else 0
        config = config_of(self._settings, self._term, voters, place)
        self._driver = Driver(Controller(config, past, uncovered), log, self._execute, log.sync)
        hub: Hub[WireMessage] = Hub(
            MESSAGES,
            self._settings.secret_of(self._run),
            on_open=self._agents.opened,
            on_message=self._heard,
            on_close=self._closed,
        )
        self._driver.guard_loop()
        self._driver.start()
        own = self._settings.address_of(self._run, "controller")
        server, at = await hub.listen(controller_of(self._term), own)
        self._run.write_endpoint("controller", at, self._term)
        beats = watched(self._beat(hub), self._driver.fail)
        alone = watched(self._left_alone(), self._driver.fail)
        await asyncio.wait({self._ended, self._driver.failure, alone}, return_when=asyncio.FIRST_COMPLETED)
        if alone.done() and not self._driver.failure.done():
            log.append("controller_left", {"reason": f"no agent for {LONELY_S:g} s"}, durable=True)
        alone.cancel()
        beats.cancel()
        if self._probing is not None:
            self._probing.cancel()
        if self._driver.failure.done():
            error = self._driver.failure.exception()
            log.append(
                "controller_broken", {"error": f"{type(error).__name__}: {error}"[:2000]}, durable=True
            )
            self._driver.failure.result()
        self._driver.close()
        server.close()
        await hub.close(LINGER_S)
        self._run.remove_endpoint("controller")
        log.close()

    def _open_log(self) -> tuple[ControllerLog, ReplayedState]:
        """Open the event log, and return it with the state that the lines of earlier controllers describe.

        The times of these lines are converted to this machine's monotonic clock.
        """
        wall_s, mono_s = time.time(), time.monotonic()
        past, events = ReplayedState(), self._read_log()
        for event in events:
            record = LogRecord(kind=event.kind, data=event.data)
            past = past.after(record, in_time_of(event, wall_s, mono_s))
            term, number = line_of(event)
            if term:
                data = msgspec.json.encode(event.data)
                self._lines.append(Mirror(term=term, number=number, kind=event.kind, data=data))
        log = ControllerLog.open(self._run.journal, "controller", room_wait_s=event_log.ROOM_WAIT_S)
        # Lines of a controller that serves this node alone have no numbers: the leader of its term uses them.
        mirrored = self._settings.several and not self._alone
        after = max(map(line_of, events), default=NO_PLACE)
        log.begin(past, len(events), self._term, self._show if mirrored else None, after)
        return log, past

    def _read_log(self) -> list[Event]:
        """Return the lines of controllers from the newest snapshot on, without void lines.

        A line is void if a later controller of another node has decided without it.
        """
        without_place = self._alone or not self._settings.several
        found = [e for e in event_log.read_since(self._run.journal, SNAPSHOT) if e.who == "controller"]
        kept = in_force(((line_of(e), e.data, e) for e in found), without_place=without_place)
        if found and found[0].kind == SNAPSHOT and found[0] not in kept:  # void: its earlier lines count
            found = [e for e in event_log.read(self._run.journal).events if e.who == "controller"]
            kept = in_force(((line_of(e), e.data, e) for e in found), without_place=without_place)
        return kept

    def _show(self, line: Mirror) -> None:
        self._lines.append(line)
        if line.kind == "session_opened" and self._probing is None and self._driver is not None:
            root = msgspec.json.decode(line.data)["root"]
            self._probing = watched(self._check_shared(root), self._driver.fail)
        for channel in self._mirrors:
            channel.send(line)

    async def _check_shared(self, root: str) -> None:
        """Log the nodes that do not save to the same place as this node.

        Each node has left a probe file in its place of checkpoints. This node looks for all of these files.
        """
        if not root or not isinstance(place_of(root), Path):  # a bucket is the same on all nodes
            return
        settings, names = self._settings, {str(node) for node in self._homes.values()}
        probes = {node: probe_path(root, settings.job_id, node) for node in names}
        deadline = time.monotonic() + PROBE_S
        while missing := [node for node, probe in sorted(probes.items()) if not is_there(probe)]:
            if time.monotonic() > deadline:
                assert self._log is not None
                self._log.append("root_not_shared", {"root": root, "nodes": missing})
                return
            await asyncio.sleep(BEAT_S)
        for probe in probes.values():
            with contextlib.suppress(OSError):  # a probe that is left does no harm: its name has the run id
                probe.unlink()

    async def _beat(self, hub: Hub[WireMessage]) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            for channel in hub.channels:
                channel.send(ControllerBeat(term=self._term))

    async def _left_alone(self) -> None:
        """Wait until no agent has been connected for ``LONELY_S`` seconds."""
        since_s = time.monotonic()
        while time.monotonic() - since_s < LONELY_S:
            await asyncio.sleep(1.0)
            if self._agents.nodes:
                since_s = time.monotonic()

    def _heard(self, channel: Channel[WireMessage], message: WireMessage) -> None:
        if channel.peer_role != "agent" or self._driver is None:
            return
        if isinstance(message, MirrorFrom):
            self._catch_up(channel, message)
            return
        if isinstance(message, AgentHello):
            if not self._agents.hello(channel, message.node_id):
                return
            for seen in message.members:
                self._homes[seen.member_id] = message.node_id
        node_id = self._agents.node_of(channel)
        if node_id is None:  # an old connection: important messages were repeated on the newer one
            return
        if isinstance(message, AgentHello | AgentBeat):
            self._set_clock(message)
        elif (member_id := getattr(message, "member_id", None)) is not None:
            self._homes[member_id] = node_id
        self._driver.post(self._in_our_time(message, node_id))

    def _catch_up(self, channel: Channel[WireMessage], wanted: MirrorFrom) -> None:
        """Send to an agent the lines that the event log of its node lacks, and from now on each new line.

        The agent on this controller's own node gets no lines, because both use the same event log.
        """
        if wanted.node_id == self._settings.node:
            return
        for line in self._lines:
            if (line.term, line.number) > (wanted.term, wanted.number):
                channel.send(line)
        self._mirrors.add(channel)

    def _set_clock(self, message: AgentHello | AgentBeat) -> None:
        """Update the offset between the clocks of this node and an agent's node.

        The smallest measured offset is kept, because its message had the least delay.
        """
        if message.clock_ns:
            offset_ns = time.monotonic_ns() - message.clock_ns
            known_ns = self._offsets_ns.get(message.node_id, offset_ns)
            self._offsets_ns[message.node_id] = min(known_ns, offset_ns)

    def _in_our_time(self, message: WireMessage, node_id: NodeId) -> WireMessage:
        if not isinstance(message, MemberExited | Settled):
            return message
        offset_ns = self._offsets_ns.get(node_id, 0)
        if abs(offset_ns) < SAME_CLOCK_NS:
            return message
        if isinstance(message, MemberExited):
            died_ns = message.died_ns + offset_ns if message.died_ns else 0
            return msgspec.structs.replace(message, died_ns=died_ns)
        freed_ns = message.freed_ns + offset_ns if message.freed_ns else 0
        return msgspec.structs.replace(message, freed_ns=freed_ns)

    def _closed(self, channel: Channel[WireMessage]) -> None:
        self._mirrors.discard(channel)
        node_id = self._agents.closed(channel)
        if node_id is not None and self._driver is not None:
            self._driver.post(AgentGone(node_id=node_id))

    def _execute(self, command: Command) -> None:
        if isinstance(command, Finish | StepDown):
            self._ended.set_result(None)
        elif isinstance(command, Send):
            self._send(command)
        else:
            raise InternalError(f"the controller cannot carry out {type(command).__name__}")

    def _send(self, command: Send) -> None:
        message = command.message
        kind, _, name = command.to.partition(":")
        if kind == "agent":
            node_id: NodeId | None = NodeId(name)
            if isinstance(message, StartMembers):
                for assignment in message.members:
                    self._homes[assignment.member_id] = message.node_id
        elif kind == "member":
            node_id = self._homes.get(MemberId(int(name)))
        else:
            raise InternalError(f"the controller cannot send to {command.to}")
        channel = self._agents.line_of(node_id) if node_id is not None else None
        if channel is not None:  # a lost message is sent again after the next hello of the node
            channel.send(message)  # type: ignore[arg-type]  # the state machine sends wire messages only


def main(run_dir: str, term: str, alone: bool) -> int:
    """Run the controller of ``term`` in run directory ``run_dir``, and return its exit code.

    With ``alone``, the controller serves only the agent of this node.
    """
    ignore_warnings()
    raise_limit()

    async def serve() -> None:
        run = RunDir(Path(run_dir))
        await ControllerDaemon(run, RunSettings.load(run.path), int(term), alone).serve()

    asyncio.run(serve())
    return int(Exit.OK)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:] == ["alone"]))
