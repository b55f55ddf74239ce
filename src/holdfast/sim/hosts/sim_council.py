"""The connections of an agent to other agents, with the real state machine of the election.

This module is a model of ``runtime/agent/leader_election.py`` and ``peers.py``. The event log and the file of election
votes stay on the host when its agent dies. The next agent on the host begins with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec

from holdfast.core.election import Election, ElectionConfig, HardState
from holdfast.core.ids import NodeId
from holdfast.core.job.log_replay import NO_PLACE
from holdfast.core.meeting import Meeting
from holdfast.core.protocol.messages import (
    Command,
    ControllerHere,
    LogRecord,
    Message,
    Mirror,
    MirrorFrom,
    Rolled,
    Send,
    VotersAre,
)
from holdfast.core.protocol.peer_messages import (
    Claim,
    ControllerUp,
    Follow,
    Founded,
    GiveUp,
    LeaderLost,
    LogHeld,
    PeerHere,
    PeerList,
    PersistHardState,
    RequestVote,
    StartController,
    StepDown,
    VoterSet,
    WitnessReply,
)
from holdfast.errors import InternalError
from holdfast.sim.hosts.network import End
from holdfast.sim.hosts.sim_disk import LogLine, SimDisk
from holdfast.sim.hosts.sim_driver import SimDriver
from holdfast.sim.hosts.sim_link import LinkScene, SimLink

DIAL_S = 0.3
GATHER_S = 0.05
JOB = "sim"


class CouncilScene(LinkScene, Protocol):
    """The interface of the simulated world that a council uses."""

    now: float

    def make_election(self, config: ElectionConfig, kept: HardState) -> Election: ...
    def council_of(self, node_id: NodeId) -> SimCouncil | None: ...
    def others(self, node_id: NodeId) -> tuple[NodeId, ...]: ...
    def agent_hears(self, node_id: NodeId, message: Message) -> None: ...
    def agent_broke(self, node_id: NodeId) -> None: ...
    def joined(self, node_id: NodeId) -> None: ...
    def elected(self, node_id: NodeId, term: int) -> None: ...
    def election_sends(self, node_id: NodeId, command: Send) -> None: ...
    def claim(self, node_id: NodeId, claim: Claim, answer: Callable[[WitnessReply], None]) -> None: ...


class VotersNotice(NamedTuple):
    """The newest notice to the controller of the host that the electorate has changed.

    Attributes:
        at_s: virtual time of the notice.
        before: the electorate before the change; None if there was none.
    """

    at_s: float
    before: VoterSet | None


class SimCouncil:
    """The council of one agent process: its election and its connections to other agents.

    Args:
        founders: number of connected nodes, this one included, that this agent waits for before it founds the job; 0 if
            this agent does not found the job.
        witness: True if the job has a witness.

    Attributes:
        lines: connections to other agents, by node.
        meeting: the state machine that finds out to which job this agent and the connected agents belong.
        over: True after the end of the agent process.
        apart: True if this agent has given up the election, and has closed its connections to other agents.
        notice: the newest notice of a change of the electorate to the controller.
    """

    def __init__(
        self, scene: CouncilScene, host: NodeId, disk: SimDisk, founders: int, *, witness: bool
    ) -> None:
        self.lines: dict[NodeId, End] = {}
        job = JOB if disk.ballot.electorate is not None else ""
        self.meeting = Meeting(job, founders, founders, GATHER_S)
        self.over = self.apart = False
        self.notice = VotersNotice(-math.inf, None)
        self._scene = scene
        self._host = host
        self._disk = disk
        self._founders = founders
        self._witness = witness
        self._mirrored = NO_PLACE
        self.election = scene.make_election(ElectionConfig(node_id=host), disk.ballot)
        self._driver = SimDriver(
            scene, host, f"{host} election", self.election, self._execute, partial(scene.agent_broke, host)
        )
        self._link = SimLink(scene, host, self._from_link)

    def begin(self) -> None:
        """Connect to the other agents and to a controller that still runs on this host.

        If the disk has an electorate, start the election. Otherwise found the job, unless ``founders`` was 0.
        """
        self._look_at_log()
        self._dial()
        process = self._link.join_local()
        if process is not None:
            self._up(process.term)
            if self.election.role == "leader":
                self._from_link(ControllerHere())
                return
            self._link.kill_local()
        if self._disk.ballot.electorate is not None:
            self._driver.start()
        elif self._founders:
            self._found()

    def restart(self) -> None:
        """Report the loss of the controller to the election, which then starts or finds another controller."""
        self._look_at_log()
        self._driver.post(LeaderLost())

    def _look_at_log(self) -> tuple[int, int]:
        term, number = self._mirrored = max(self._mirrored, self._disk.last_place)
        self._driver.post(LogHeld(term=term, number=number))
        return self._mirrored

    def send(self, message: Message) -> bool:
        """Send a message to the controller. Return False if there is no connection."""
        return self._link.send(message)

    def end(self) -> None:
        """Stop the election and close all connections, because the agent process has ended."""
        self.over = True
        self._driver.close()
        self._link.end()
        for end in self.lines.values():
            end.close()

    # ---------------------------------------------------------------- other agents

    def _found(self) -> None:
        if self.over or self.meeting.job:
            return
        here = tuple(sorted((self._host, *self.lines)))
        if not self.meeting.may_found(self._scene.clock(self._host), len(here)):
            self._scene.later_on(self._host, GATHER_S, f"{self._host} gathers", self._found)
            return
        self._join_job()
        self._driver.post(Founded(voters=here, witness=self._witness))

    def _join_job(self) -> None:
        if not self.meeting.job:
            self.meeting.join(JOB)
            self._scene.joined(self._host)
            self._publish()

    def _publish(self) -> None:
        for end in self.lines.values():
            end.send(PeerList(job=self.meeting.job, known=(), near=self.meeting.near))

    def _dial(self) -> None:
        if self.over or self.apart:
            return
        for other in self._scene.others(self._host):
            council = self._scene.council_of(other)
            if other in self.lines or council is None or council.apart:
                continue
            if not self._scene.network.connects(self._host, other):
                continue
            mine, its = self._scene.network.connect(self._host, other)
            self._meet(other, mine)
            council._meet(self._host, its)
        self._scene.later_on(self._host, DIAL_S, f"{self._host} dials", self._dial)

    def _meet(self, other: NodeId, end: End) -> None:
        old = self.lines.get(other)
        if old is not None:
            old.close()
        self.lines[other] = end
        end.on_message = partial(self._heard, other)
        end.on_closed = partial(self._line_closed, other, end)
        end.send(PeerList(job=self.meeting.job, known=(), near=self.meeting.near))
        self._driver.post(PeerHere(node_id=other))

    def _line_closed(self, other: NodeId, end: End) -> None:
        if self.lines.get(other) is end:
            del self.lines[other]
            if self.meeting.gone(other):
                self._publish()

    def _stand_apart(self) -> None:
        self.apart = True
        for end in self.lines.values():
            end.close()
        self.lines.clear()

    def _heard(self, other: NodeId, message: Message) -> None:
        if self.over:
            return
        if isinstance(message, RequestVote) and self.election.role != "leader":
            self._look_at_log()
        if not isinstance(message, PeerList):
            self._driver.post(message)
        elif self.meeting.told(other, message.job, message.near):
            self._publish()

    # ---------------------------------------------------------------- in

    def _from_link(self, message: Message) -> None:
        if self.over:
            return
        if isinstance(message, Mirror):
            self._mirror(message)
            return
        if isinstance(message, Rolled):
            self._driver.post(message)
            return
        if isinstance(message, ControllerHere):
            term, number = self._look_at_log()
            self._link.send(MirrorFrom(node_id=self._host, term=term, number=number))
        self._scene.agent_hears(self._host, message)

    def _mirror(self, mirror: Mirror) -> None:
        data = msgspec.json.decode(mirror.data, type=dict[str, Any])
        record = LogRecord(kind=mirror.kind, data=data)
        self._disk.append(LogLine(mirror.term, mirror.number, record, self._scene.clock(self._host)))
        self._mirrored = (mirror.term, mirror.number)

    # ---------------------------------------------------------------- out

    def _execute(self, command: Command) -> None:
        match command:
            case PersistHardState():
                self._keep(command)
            case Send():
                self._send(command)
            case StartController():
                self._scene.elected(self._host, command.term)
                self._link.start(command.term, self._up)
            case Follow():
                if not self.meeting.job:
                    self._scene.joined(self._host)  # the leader may start ranks on this host
                self._link.follow(command.lead)
            case StepDown():
                self._link.kill_local()
            case GiveUp():
                self._stand_apart()
                self._link.start(self._disk.ballot.term, lambda term: None, alone=True)
            case Claim():
                self._scene.claim(self._host, command, self._witnessed)
            case _:
                raise InternalError(f"an election cannot order {type(command).__name__}")

    def _witnessed(self, reply: WitnessReply) -> None:
        self._driver.post(reply)

    def _keep(self, keep: PersistHardState) -> None:
        before = self._disk.ballot.electorate
        self._disk.keep(
            HardState(
                term=keep.term, voted_for=keep.voted_for, electorate=keep.electorate, committed=keep.committed
            )
        )
        if keep.electorate is not None:
            self._join_job()
        voters = before.voters if before is not None else ()
        if keep.electorate is not None and keep.electorate.voters != voters:
            if self.election.role == "leader":
                self.notice = VotersNotice(self._scene.now, before)
                self._link.send(VotersAre(voters=keep.electorate.voters))

    def _send(self, command: Send) -> None:
        self._scene.election_sends(self._host, command)
        name = NodeId(command.to.removeprefix("node:"))
        for node_id, end in list(self.lines.items()):
            if name in ("*", node_id):
                end.send(command.message)

    def _up(self, term: int) -> None:
        self._driver.post(ControllerUp(term=term, host=str(self._host), port=1))
