"""An agent among the others: the lines of controllers in its log, and a job that has lost its leader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec
import pytest

from holdfast.core.election import HardState
from holdfast.core.ids import NodeId
from holdfast.core.job.log_replay import ReplayedState
from holdfast.core.meeting import Meeting
from holdfast.core.protocol.messages import ControllerHere, Message, Mirror, MirrorFrom
from holdfast.core.protocol.peer_messages import PeerMessage, RequestVote, VoteReply, VoterSet
from holdfast.event_log import EventLog
from holdfast.exit_codes import Exit
from holdfast.runtime.agent import leader_election
from holdfast.runtime.agent.agent_events import ElectionEvent, FromPeer, NotJoined
from holdfast.runtime.agent.leader_election import LeaderElection
from holdfast.runtime.controller.controllerd import ControllerLog
from holdfast.runtime.node.event_log_writer import EventLogWriter
from holdfast.runtime.node.run_settings import RunSettings
from tests.runtime.runs import Run

SETTINGS = RunSettings(
    run_id="t", nnodes=2, nnodes_max=2, node="node1", contacts=("127.0.0.1:1",), join_s=0.2
)


class FakeLink:
    """The line to the controller: tests speak for it, and see what is sent."""

    def __init__(
        self, run: object, settings: object, journal: object, post: Callable[[Message], None], **more: object
    ) -> None:
        self.post = post
        self.sent: list[Message] = []

    async def join_local(self) -> None:
        """No controller runs on this node."""

    def send(self, message: Message) -> bool:
        """To the controller."""
        self.sent.append(message)
        return True

    async def end(self) -> None:
        """Close."""


class MetPeers:
    """The other agents of a job that has a name."""

    def __init__(self, *given: object, **more: object) -> None:
        self.job = ""
        self.sent: list[tuple[NodeId, PeerMessage]] = []
        self.here = [NodeId("node1"), NodeId("node0")]
        self.meeting = Meeting("", 2, 2, 0.0)
        self.meeting.told(NodeId("node0"), "job1", "")

    def founds(self) -> bool:
        """Another agent is at the first contact."""
        return False

    async def listen(self) -> None:
        """As the real one."""

    def begin(self) -> None:
        """As the real one."""

    def join(self, job: str) -> None:
        """Belong to a job."""
        self.job = job

    def send(self, node_id: NodeId, message: PeerMessage) -> None:
        """To another agent."""
        self.sent.append((node_id, message))

    async def end(self) -> None:
        """As the real one."""


def election_of(
    run: Run,
    post: Callable[[ElectionEvent], None],
    monkeypatch: pytest.MonkeyPatch,
    kept: HardState | None = None,
) -> LeaderElection:
    """Of an agent that starts; inside an event loop."""
    monkeypatch.setattr(leader_election, "ControllerLink", FakeLink)
    monkeypatch.setattr(leader_election, "Peers", MetPeers)
    journal = EventLog.open(run.dir.journal, "agent node1")
    mirror = EventLogWriter(EventLog.open(run.dir.journal, "controller"))
    return LeaderElection(run.dir, SETTINGS, kept or HardState(), journal, mirror, post)


def test_lines_that_a_controller_of_this_node_wrote_are_not_mirrored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It led, then another node leads: its own lines came neither from a mirror nor were they there at its start."""
    run = Run(tmp_path)

    async def lead_then_follow() -> list[Message]:
        election = election_of(run, lambda event: None, monkeypatch)
        link = election._link
        assert isinstance(link, FakeLink)
        election.begin()
        log = ControllerLog.open(run.dir.journal, "controller")
        log.begin(ReplayedState(), 0, 1, lambda line: None)
        for step in range(3):
            log.append("planned", {"step": step})
        log.close()
        link.post(ControllerHere())
        link.post(Mirror(term=2, number=1, kind="planned", data=msgspec.json.encode({"line": "2.1"})))
        link.post(ControllerHere())
        await election.end()
        return link.sent

    sent = asyncio.run(lead_then_follow())
    places = [(m.term, m.number) for m in sent if isinstance(m, MirrorFrom)]
    assert places == [(1, 3), (2, 1)]


@pytest.mark.parametrize("ask_log, granted", [((2, 1), False), ((2, 3), True)])
def test_a_vote_is_refused_to_a_log_that_lacks_the_lines_mirrored_since_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask_log: tuple[int, int], granted: bool
) -> None:
    """The connection to the leader came back, and lines were mirrored. The election knew the older place only."""
    voters = VoterSet(1, 1, (NodeId("node0"), NodeId("node1"), NodeId("node2")))
    ask = RequestVote(candidate=NodeId("node2"), term=3, electorate=voters, trial=False, log=ask_log)

    async def vote() -> list[tuple[NodeId, PeerMessage]]:
        kept = HardState(term=2, voted_for="node0", electorate=voters, committed=True)
        election = election_of(Run(tmp_path), lambda event: None, monkeypatch, kept)
        election.begin()
        peers, link = cast("MetPeers", election.peers), election._link
        assert isinstance(link, FakeLink)
        for number in (1, 2, 3):
            line = msgspec.json.encode({"line": f"2.{number}"})
            link.post(Mirror(term=2, number=number, kind="planned", data=line))
        election._take(FromPeer(NodeId("node2"), ask))
        await election.end()
        return peers.sent

    replies = [message for node_id, message in asyncio.run(vote()) if node_id == "node2"]
    assert [reply.granted for reply in replies if isinstance(reply, VoteReply)] == [granted]


def test_an_agent_that_joins_a_job_without_a_leader_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others left before they elected one. An agent with an empty run directory has no vote: it waited for ever."""

    async def join() -> NotJoined:
        events: asyncio.Queue[ElectionEvent] = asyncio.Queue()
        election = election_of(Run(tmp_path), events.put_nowait, monkeypatch)
        election.begin()
        end = await asyncio.wait_for(events.get(), 60.0)
        await election.end()
        assert isinstance(end, NotJoined)
        return end

    end = asyncio.run(join())
    assert end.code == Exit.UNMET
    assert (
        "the job job1 has no leader: node1 met its agents 0.2 s ago" in end.reason and "next: " in end.reason
    )
