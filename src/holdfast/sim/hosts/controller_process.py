"""A controller process on one host: its real state machine, and a model of ``runtime/controller/controllerd.py``."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import msgspec

from holdfast.core.config import Config
from holdfast.core.controller import Controller
from holdfast.core.ids import MemberId, NodeId
from holdfast.core.job.agent_lines import AgentLines
from holdfast.core.job.log_replay import AFTER, NO_PLACE, ReplayedState, text_of_place
from holdfast.core.protocol.messages import (
    AgentBeat,
    AgentGone,
    AgentHello,
    Command,
    ControllerBeat,
    Finish,
    LogRecord,
    MemberExited,
    Message,
    Mirror,
    MirrorFrom,
    Send,
    Settled,
    StartMembers,
)
from holdfast.core.protocol.peer_messages import StepDown
from holdfast.errors import InternalError
from holdfast.sim.hosts.network import End
from holdfast.sim.hosts.sim_disk import LogLine, SimDisk
from holdfast.sim.hosts.sim_driver import DriverScene, SimDriver

BEAT_S = 0.5
LINGER_S = 0.05
LONELY_S = 60.0


class ControllerScene(DriverScene, Protocol):
    """The interface of the simulated world that a controller process uses."""

    def jitter(self, low_s: float, high_s: float) -> float: ...
    def make_controller(self, config: Config, past: ReplayedState) -> Controller: ...
    def controller_config(self, disk: SimDisk, node_id: NodeId, term: int, alone: bool) -> Config: ...
    def decided(self, process: ControllerProcess, record: LogRecord) -> None: ...
    def hears(self, message: Message) -> None: ...
    def sends(self, process: ControllerProcess, message: Message) -> None: ...
    def finished(self, process: ControllerProcess, finish: Finish) -> None: ...


class ControllerProcess:
    """The simulated process of one controller.

    Attributes:
        host: the host of the process.
        term: the term of the controller.
        alone: True if the controller decides only for its own host, because that host has lost all other hosts.
        lives: False after the end of the process.
        lost: members that were given up before their status pages were read (record ``member_lost``). This controller
            gave them up, or an earlier controller whose record is in the event log.
        past: the state of the job after all lines of the event log so far.
        machine: the state machine of the controller.
    """

    def __init__(self, scene: ControllerScene, host: NodeId, disk: SimDisk, term: int, alone: bool) -> None:
        self.host = host
        self.term = term
        self.alone = alone
        self.lives = True
        self._scene = scene
        self._disk = disk
        self._ends: dict[End, bool] = {}  # every connection; True: its agent mirrors the log
        self._agents: AgentLines[End] = AgentLines()
        self._homes: dict[MemberId, NodeId] = {}
        self._offsets_s: dict[NodeId, float] = {}
        self._heard_s = 0.0
        self.past = disk.read(scene.clock(host), alone=alone)
        # A member that still has its seat may return, and then belongs to the job again.
        seated = set(self.past.seated_members.values())
        self.lost = {_given_up(line.record) for line in disk.in_force(alone=alone) if _gives_up(line.record)}
        self.lost -= seated
        self.machine = scene.make_controller(scene.controller_config(disk, host, term, alone), self.past)
        driver = SimDriver(scene, host, f"c{term}", self.machine, self._carry_out, self.die)
        driver.journal = self._record
        driver.sync_s = lambda: disk.sync_s(scene.jitter)
        driver.synced = disk.sync
        self._driver = driver

    def begin(self) -> None:
        """Start the state machine and the heartbeats."""
        self._heard_s = self._scene.clock(self.host)
        self._driver.start()
        self._beat()

    def accept(self, end: End) -> None:
        """Accept a connection of an agent. ``end`` is the controller's end of that connection."""
        self._ends[end] = False
        self._agents.opened(end)
        end.on_message = partial(self._heard, end)
        end.on_closed = partial(self._closed, end)

    def die(self) -> None:
        """End the controller process and close its connections."""
        if self.lives:
            self.lives = False
            self._driver.close()
            for end in self._ends:
                end.close()

    def post(self, event: Message) -> None:
        """Pass an event to the controller's state machine."""
        self._driver.post(event)

    # ---------------------------------------------------------------- in

    def _heard(self, end: End, message: Message) -> None:
        if not self.lives:
            return
        if isinstance(message, MirrorFrom):
            self._catch_up(end, message)
            return
        if isinstance(message, AgentHello):
            if not self._agents.hello(end, message.node_id):
                return
            self._homes.update((seen.member_id, message.node_id) for seen in message.members)
        node_id = self._agents.node_of(end)
        if node_id is None:
            return
        if isinstance(message, AgentHello | AgentBeat):
            self._heard_s = self._scene.clock(self.host)
            self._set_clock(message)
        elif (member_id := getattr(message, "member_id", None)) is not None:
            self._homes[member_id] = node_id
        self._scene.hears(message)
        self._driver.post(self._in_own_time(message, node_id))

    def _catch_up(self, end: End, wanted: MirrorFrom) -> None:
        if wanted.node_id == self.host:
            return
        for line in self._disk.in_force():
            if line.place > (wanted.term, wanted.number):
                end.send(_mirror(line))
        self._ends[end] = True

    def _set_clock(self, message: AgentHello | AgentBeat) -> None:
        offset_s = self._scene.clock(self.host) - message.clock_ns / 1e9
        known_s = self._offsets_s.get(message.node_id, offset_s)
        self._offsets_s[message.node_id] = min(known_s, offset_s)

    def _in_own_time(self, message: Message, node_id: NodeId) -> Message:
        offset_ns = int(self._offsets_s.get(node_id, 0.0) * 1e9)
        if isinstance(message, MemberExited) and message.died_ns:
            return msgspec.structs.replace(message, died_ns=message.died_ns + offset_ns)
        if isinstance(message, Settled) and message.freed_ns:
            return msgspec.structs.replace(message, freed_ns=message.freed_ns + offset_ns)
        return message

    def _closed(self, end: End) -> None:
        self._ends.pop(end, None)
        node_id = self._agents.closed(end)
        if node_id is not None and self.lives:
            self._driver.post(AgentGone(node_id=node_id))

    def _beat(self) -> None:
        if not self.lives:
            return
        for end in list(self._ends):
            end.send(ControllerBeat(term=self.term))
        if self._agents.nodes:
            self._heard_s = self._scene.clock(self.host)
        elif self._scene.clock(self.host) - self._heard_s > LONELY_S:
            self.die()
        self._scene.later_on(self.host, BEAT_S, f"c{self.term} beats", self._beat)

    # ---------------------------------------------------------------- out

    def _record(self, record: LogRecord) -> None:
        term, number = NO_PLACE if self.alone else (self.term, self._disk.next_number(self.term))
        if number == 1:
            last = max((line.place for line in self._disk.in_force()), default=NO_PLACE)
            record = LogRecord(kind=record.kind, data={**record.data, AFTER: text_of_place(last)})
        line = LogLine(term, number, record, self._scene.clock(self.host))
        self._disk.append(line)
        for end in [end for end, mirrors in self._ends.items() if mirrors and term]:
            end.send(_mirror(line))
        if _gives_up(record):
            self.lost.add(_given_up(record))
        self._scene.decided(self, record)
        self.past = self.past.after(record)

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, Finish | StepDown):
            if isinstance(command, Finish):
                self._scene.finished(self, command)
            self._driver.close()
            self._scene.later_on(self.host, LINGER_S, f"c{self.term} ends", self.die)
        elif isinstance(command, Send):
            self._send(command)
        else:
            raise InternalError(f"the controller cannot carry out {type(command).__name__}")

    def _send(self, command: Send) -> None:
        message = command.message
        kind, _, name = command.to.partition(":")
        node_id = NodeId(name) if kind == "agent" else self._homes.get(MemberId(int(name)), NodeId(""))
        if isinstance(message, StartMembers):
            self._homes.update((seat.member_id, message.node_id) for seat in message.members)
        self._scene.sends(self, message)
        end = self._agents.line_of(node_id)
        if end is not None:
            end.send(message)


def _gives_up(record: LogRecord) -> bool:
    return record.kind == "member_lost"


def _given_up(record: LogRecord) -> MemberId:
    return MemberId(int(str(record.data["member_id"])))


def _mirror(line: LogLine) -> Mirror:
    body = msgspec.json.encode(line.record.data)
    return Mirror(term=line.term, number=line.number, kind=line.record.kind, data=body)
