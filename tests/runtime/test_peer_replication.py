"""States that travel between agents: given, verified, returned; torn, changed and refused ones."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.core.ids import MemberId, NodeId
from holdfast.core.protocol.messages import HeldStates
from holdfast.core.protocol.peer_messages import Peer
from holdfast.core.protocol.status_page import Word
from holdfast.runtime.agent.peer_replication import PeerReplication, ReplicaServer, pull, push
from holdfast.runtime.net.addresses import LOOPBACK, Address
from holdfast.runtime.node.run_settings import RunSettings
from holdfast.runtime.node.rundir import RunDir
from holdfast.runtime.node.status_page import Page
from holdfast.sealing import Secret
from holdfast.store.shared_memory.memory_slots import Slots, kept_steps, marked_step
from tests.store.test_memory_slots import LAYOUT, State, keep, proves

TOKEN = b"0123456789abcdefghijklmnopqrstuv"
SECRET = Secret(TOKEN)


class Agent:
    """Another node, with its directory and its server."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        self.events: list[HeldStates] = []
        self.server = ReplicaServer(directory, SECRET, NodeId("n1"), self.events.append)
        self.at = self.server.start(LOOPBACK)

    @property
    def held(self) -> list[int]:
        """The rank of each state that was accepted, if all are of one rank."""
        return [int(rank) for event in self.events for rank in event.ranks]


@pytest.fixture
def buddy(tmp_path: Path) -> Iterator[Agent]:
    """Yield an agent that accepts states."""
    agent = Agent(tmp_path / "buddy")
    yield agent
    agent.server.close()


def test_states_go_to_the_buddy_and_come_back_on_a_third_node(tmp_path: Path, buddy: Agent) -> None:
    home, third = tmp_path / "home", tmp_path / "third"
    home.mkdir()
    third.mkdir()
    slots = Slots(home, 2)
    for step in (4, 8, 12):
        keep(slots, step)
        assert push(home, 2, step, "n1", buddy.at, SECRET)
    assert kept_steps(buddy.directory, 2) == (8, 12) and buddy.held == [2, 2, 2]
    proves(buddy.directory, 12)
    assert pull(third, 2, 8, {"n0": Address("127.0.0.1", 1), "n1": buddy.at}, SECRET)
    proves(third, 8)
    assert not pull(third, 2, 4, {"n1": buddy.at}, SECRET), "no node has it any more"
    assert not push(home, 2, 4, "n1", buddy.at, SECRET), "nor has this node"
    keep(slots, 10)  # the job went back to an earlier step
    assert push(home, 2, 10, "n1", buddy.at, SECRET)
    assert kept_steps(buddy.directory, 2) == (8, 10), "12 did not happen"


def test_a_node_that_was_lost_and_is_back_replaces_no_newer_state(tmp_path: Path, buddy: Agent) -> None:
    """Regression: its process sent an old state and removed the one that the process in its seat had given."""
    lost, home = tmp_path / "lost", tmp_path / "home"
    for directory, step in ((lost, 4), (home, 8)):
        directory.mkdir()
        keep(Slots(directory, 2), step)
    assert push(lost, 2, 4, "n1", buddy.at, SECRET, 5)
    assert push(home, 2, 8, "n1", buddy.at, SECRET, 6)
    assert not push(lost, 2, 4, "n1", buddy.at, SECRET, 5)
    assert kept_steps(buddy.directory, 2) == (4, 8) and buddy.held == [2, 2]


def test_a_state_that_was_changed_on_the_way_is_not_kept(tmp_path: Path, buddy: Agent) -> None:
    home = tmp_path / "home"
    home.mkdir()
    keep(Slots(home, 2), 4)
    (path,) = [path for path in home.iterdir() if marked_step(path) == 4]
    data = bytearray(path.read_bytes())
    data[9000] ^= 1
    path.write_bytes(data)
    assert not push(home, 2, 4, "n1", buddy.at, SECRET)
    assert kept_steps(buddy.directory, 2) == () and buddy.held == []


def test_an_agent_gives_a_state_when_it_is_whole_and_another_one_of_that_step(
    tmp_path: Path, buddy: Agent
) -> None:
    run = RunDir(tmp_path / "run")
    run.create(TOKEN)
    settings = RunSettings(run_id="t", node="n0", nnodes=2)
    home, path = run.pages(), run.page_path(MemberId(1))
    slots = Slots(home, 2)
    page = Page.create(path, member=MemberId(1), rank=2)
    at = Peer(node_id=NodeId("n1"), home="n1", host=buddy.at[0], port=1, memory_port=buddy.at[1])

    async def give() -> None:
        giving = PeerReplication(run, settings, [MemberId(1)], {at.node_id: at}, lambda event: None)
        await giving._give(path)
        giving.close()

    keep(slots, 4)
    asyncio.run(give())
    assert buddy.held == [] and page[Word.ARRIVED] == 0, "the script may still change it"
    slots.finish()
    asyncio.run(give())
    newest = slots.newest()
    assert newest is not None and kept_steps(buddy.directory, 2, whole=True) == (4,)
    assert buddy.held == [2] and page[Word.ARRIVED] == newest.digest
    asyncio.run(give())
    assert buddy.held == [2], "once"
    slots.keep(4, State(5), LAYOUT, b'{"step": 4}', b"{}")  # the job went back, and passed this step again
    slots.finish()
    asyncio.run(give())
    assert buddy.held == [2, 2] and page[Word.ARRIVED] != newest.digest
    page.close()
    run.remove_pages()


def test_strangers_are_refused(tmp_path: Path, buddy: Agent) -> None:
    home = tmp_path / "home"
    home.mkdir()
    keep(Slots(home, 2), 4)
    assert not push(home, 2, 4, "n1", buddy.at, Secret(b"x" * 32))
    assert push(home, 2, 4, "n1", buddy.at, SECRET)
    assert not pull(tmp_path, 2, 4, {"n1": buddy.at}, Secret(b"x" * 32))
    assert list(tmp_path.glob("memory-*")) == []
