"""Connections between agents: no error ends the attempts to connect without a report."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from holdfast.core.ids import NodeId
from holdfast.core.protocol.peer_messages import Peer, PeerHello, PeerList, PeerMessage, PeerRefused
from holdfast.errors import UsageError
from holdfast.event_log import EventLog
from holdfast.runtime.agent.agent_events import PartFailed, PeersEvent, TurnedAway
from holdfast.runtime.agent.peers import PEER_MESSAGES, Peers
from holdfast.runtime.net.addresses import Address
from holdfast.runtime.net.blocking_channel import BlockingChannel
from holdfast.runtime.net.service_names import PEERS
from holdfast.runtime.node.run_settings import RunSettings
from holdfast.runtime.node.rundir import RunDir
from holdfast.version import VERSION
from tests.runtime.runs import BOUND_S, until


def test_a_job_whose_name_would_lead_elsewhere_is_refused(tmp_path: Path) -> None:
    """Regression: the name was accepted from any peer, and became a part of paths and of keys of buckets."""
    run = RunDir(tmp_path / "run")
    run.create()
    settings = RunSettings(run_id="t", target="x", nnodes=2, nnodes_max=2, bind="127.0.0.1")

    async def scenario() -> PeerMessage:
        log = EventLog.open(run.journal, "test")
        peers = Peers(run, settings, log, print)
        me = await peers.listen()
        try:
            return await asyncio.to_thread(introduced, me)
        finally:
            await peers.end()
            log.close()

    def introduced(to: Peer) -> PeerMessage:
        line = BlockingChannel.connect(PEER_MESSAGES, Address(to.host, to.port), run.secret(), PEERS, "peer")
        with closing(line):
            line.receive(BOUND_S)
            peer = Peer(NodeId("node1"), "elsewhere", "127.0.0.1", 1, 0)
            hello = PeerHello(
                peer=peer, job="../../home", nodes=2, slots=settings.counts, known=(), holdfast=VERSION
            )
            line.send(hello)
            return line.receive(BOUND_S)

    answer = asyncio.run(scenario())
    run.remove_pages()
    assert isinstance(answer, PeerRefused)
    assert answer.reason == "node1 says that the job is '../../home', which is no name of a run"


def test_a_contact_that_cannot_even_be_looked_up_is_told(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    settings = RunSettings(run_id="t", target="x", nnodes=2, bind="127.0.0.1", contacts=("a..b:0",))

    async def scenario() -> PeersEvent:
        failed: asyncio.Future[PeersEvent] = asyncio.get_running_loop().create_future()
        log = EventLog.open(run.journal, "test")
        peers = Peers(run, settings, log, failed.set_result)
        await peers.listen()
        peers.begin()
        try:
            return await asyncio.wait_for(failed, BOUND_S)
        finally:
            await peers.end()
            log.close()
            run.remove_pages()

    event = asyncio.run(scenario())
    assert isinstance(event, PartFailed) and isinstance(event.error, UnicodeError)


def test_the_port_of_another_run_is_named(tmp_path: Path) -> None:
    """Two jobs of Slurm with one port, on a host that both use, said "another program" and "--token-file"."""
    runs = [RunDir(tmp_path / name) for name in ("run", "other")]
    for run in runs:
        run.create()
    settings = RunSettings(run_id="t", target="x", nnodes=2, bind="127.0.0.1")

    async def scenario() -> list[str]:
        log, said = EventLog.open(runs[0].journal, "test"), []
        turned_away: asyncio.Future[PeersEvent] = asyncio.get_running_loop().create_future()
        other = Peers(runs[1], settings, log, print)
        taken = await other.listen()
        ours = msgspec.structs.replace(settings, contacts=(f"127.0.0.1:{taken.port}",), first_contacts=1)
        first = Peers(runs[0], ours, log, print)
        second = Peers(runs[0], msgspec.structs.replace(ours, node="node1"), log, turned_away.set_result)
        second.known[second.me] = Peer(second.me, "elsewhere", "127.0.0.2", 1, 0)
        try:
            with pytest.raises(UsageError) as raised:
                await first.listen()
            said.append(str(raised.value))
            second.begin()
            event = await asyncio.wait_for(turned_away, BOUND_S)
            assert isinstance(event, TurnedAway)
            said.append(event.reason)
        finally:
            for peers in (first, second, other):
                await peers.end()
            log.close()
        return said

    first, second = asyncio.run(scenario())
    for run in runs:
        run.remove_pages()
    assert "where another run listens" in first and "another --master-port" in first
    assert "wrong token" in second and "another --master-port" in second


def test_an_agent_learns_the_job_though_the_connection_with_its_name_was_lost(tmp_path: Path) -> None:
    """Regression: two agents dialled each other, and the name was sent on the connection that one of them closed."""
    run = RunDir(tmp_path / "run")
    run.create()
    settings = RunSettings(run_id="t", target="x", nnodes=2, nnodes_max=2, bind="127.0.0.1")

    async def scenario() -> PeerMessage:
        log, here = EventLog.open(run.journal, "test"), asyncio.Event()
        peers = Peers(run, settings, log, lambda event: here.set())
        me = await peers.listen()
        named, other = await asyncio.to_thread(dialled, me), await asyncio.to_thread(dialled, me)
        try:
            named.send(hello)
            await asyncio.wait_for(here.wait(), BOUND_S)
            peers.join("job1")
            named.close()
            await asyncio.to_thread(until, "it is closed", lambda: len(peers.here) == 1)
            other.send(hello)
            return await asyncio.to_thread(other.receive, BOUND_S)
        finally:
            other.close()
            await peers.end()
            log.close()
            run.remove_pages()

    def dialled(to: Peer) -> BlockingChannel[PeerMessage]:
        line = BlockingChannel.connect(PEER_MESSAGES, Address(to.host, to.port), run.secret(), PEERS, "peer")
        greeting = line.receive(BOUND_S)
        assert isinstance(greeting, PeerHello) and not greeting.job
        return line

    peer = Peer(NodeId("node1"), "elsewhere", "127.0.0.1", 1, 0)
    hello = PeerHello(peer=peer, job="", nodes=2, slots=settings.counts, known=(), holdfast=VERSION)
    message = asyncio.run(scenario())
    assert isinstance(message, PeerList) and message.job == "job1"
