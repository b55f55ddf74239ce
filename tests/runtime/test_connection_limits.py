"""Foreign connections at every listener: they cost nothing, and members are served beside them."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.protocol.messages import StopRun
from holdfast.core.protocol.peer_messages import Peer
from holdfast.runtime.agent.peers import read_peers
from holdfast.runtime.net.addresses import LOOPBACK, Address
from holdfast.runtime.net.blocking_channel import BlockingChannel
from holdfast.runtime.net.connection_limits import RESERVE, ConnectionLimits, is_accept, raise_limit
from holdfast.runtime.net.service_names import zygote_of
from holdfast.runtime.net.stream_sockets import dial
from holdfast.runtime.node.rundir import Endpoint, RunDir
from holdfast.runtime.node.spawn import ZYGOTE_MESSAGES, Preloaded
from holdfast.runtime.worker.state_transfer import fetch
from holdfast.wire import MESSAGES, frame
from tests.runtime.runs import BOUND_S, SOURCE, Run, until
from tests.runtime.strangers import LIMIT, Crowd, many_files
from tests.runtime.test_meeting import Nodes
from tests.runtime.test_state_transfer import FIRST, SECRET, VALUES


@pytest.fixture
def descriptors(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace the limit on descriptors that a guard reads."""
    limits = [LIMIT, LIMIT]
    monkeypatch.setattr(resource, "getrlimit", lambda which: tuple(limits))
    return limits


def test_the_oldest_of_too_many_is_cut(descriptors: list[int]) -> None:
    strangers: ConnectionLimits[int] = ConnectionLimits(most=3)
    assert [strangers.admit(number, 10) for number in range(5)] == [[], [], [], [0], [1]]
    strangers.release(2)
    assert strangers.admit(5, 10) == [] and strangers.admit(6, 10) == [3]
    few: ConnectionLimits[int] = ConnectionLimits()
    descriptors[0] = 48  # its share is six
    assert [few.admit(number, 10) for number in range(8)] == [[], [], [], [], [], [], [0], [1]]


def test_the_last_descriptors_are_left_to_the_process(descriptors: list[int]) -> None:
    strangers: ConnectionLimits[int] = ConnectionLimits()
    assert not any(strangers.admit(number, LIMIT - RESERVE - 1) for number in range(4))
    assert strangers.admit(4, LIMIT - RESERVE) == [0, 1, 2]
    alone: ConnectionLimits[int] = ConnectionLimits()
    assert alone.admit(0, LIMIT - 1) == [0]


def test_a_connection_that_cannot_be_accepted_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    strangers: ConnectionLimits[int] = ConnectionLimits()
    for number in range(4):
        strangers.admit(number, 10)
    error = OSError(errno.EMFILE, "Too many open files")
    assert strangers.refused(error) == [0, 1] and strangers.refused(error) == [2]
    assert caplog.messages == [f"holdfast: cannot take a connection, trying on: {error}"]
    assert is_accept({"message": "socket.accept() out of system resource", "exception": error})
    assert not is_accept({"message": "Exception in callback run()", "exception": error})


def test_the_limit_is_raised_to_the_hard_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: made.append(limits))
    for limits in ((256, 4096), (256, resource.RLIM_INFINITY), (4096, 4096), (1 << 20, 1 << 30)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, limits=limits: limits)
        raise_limit()
    assert made == [(4096, 4096), (1 << 20, resource.RLIM_INFINITY)]


CHILD = f"""
import os, resource, sys, threading
from holdfast.runtime.net.addresses import Address
from tests.runtime.test_state_transfer import FIRST, SECRET, VALUES, view
resource.setrlimit(resource.RLIMIT_NOFILE, ({LIMIT}, {LIMIT}))

def own_work():
    for line in sys.stdin:
        os.close(os.open("/dev/null", os.O_RDONLY))
        os.close(os.pidfd_open(os.getpid()))
        print(len(os.listdir("/proc/self/fd")), flush=True)
"""
HUB = """
import asyncio
from holdfast.runtime.net.addresses import LOOPBACK, Address
from holdfast.runtime.net.channel import Hub
from holdfast.wire import MESSAGES, frame
async def main():
    hub = Hub(MESSAGES, SECRET, on_open=lambda c: None, on_message=lambda c, m: c.send(m), on_close=lambda c: None)
    server, at = await hub.listen("echo", Address(sys.argv[2]))
    print(*at, flush=True)
    await asyncio.to_thread(own_work)
asyncio.run(main())
"""
ANSWERS = """
from holdfast.runtime.worker.state_transfer import StateServer
from holdfast.runtime.net.service_names import state_of
print(*StateServer(view, VALUES, SECRET, state_of(0, FIRST)).start(Address(sys.argv[2])), flush=True)
own_work()
"""
ZYGOTE = """
from holdfast.runtime.node.rundir import RunDir
from holdfast.runtime.node.spawn import Preloaded
from holdfast.runtime.agent.zygote import Zygote
run = RunDir(sys.argv[1])
zygote = Zygote(run, SECRET, Preloaded({}, {}, 1), "node0")
print(*run.socket_of("zygote"), flush=True)
threading.Thread(target=own_work, daemon=True).start()
zygote.serve()
"""
MESH = """
import numpy as np
from pathlib import Path
from holdfast.frameworks.common.tcp_group import GroupAddress
from tests.adapters.test_tcp_group import FIRST, World
import msgspec
world = World(Path(sys.argv[1]), 2, Address(sys.argv[2]))
first = threading.Thread(target=lambda: world.meshes[0].connect(FIRST))
first.start()
key = (f"mesh/{FIRST}/0",)
assert world.lines[1].kv("wait", key, timeout_s=60).ok
place = msgspec.json.decode(world.lines[1].kv("get", key).value, type=GroupAddress)
print(place.host, place.port, flush=True)
sys.stdin.readline()
world.meshes[1].connect(FIRST)
first.join()
print([each.tolist() for each in world.each(lambda one: one.sum(np.ones(2, np.float32)))], flush=True)
own_work()
"""


@contextmanager
def child(code: str, argument: Path, at: Address) -> Iterator[tuple[Address, subprocess.Popen[str]]]:
    """Yield the address of a listener in a process of few descriptors, as ``at`` asks, and the process."""
    env = {**os.environ, "PYTHONPATH": f"{SOURCE}:{SOURCE.parent}"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", CHILD + code, str(argument), at.host],
        stdin=pipe, stdout=pipe, env=env, cwd=SOURCE.parent, text=True,
    ) as process:  # fmt: skip
        try:
            host, port = answer(process).split()
            yield Address(host, int(port)), process
        finally:
            process.kill()


def answer(process: subprocess.Popen[str]) -> str:
    """Return the next line of the child."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def ask(process: subprocess.Popen[str]) -> str:
    """Let the child do its own work. Return its number of descriptors, as text."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return answer(process)


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["path", "port"])
@pytest.mark.parametrize("code", [HUB, ANSWERS, ZYGOTE], ids=["hub", "answers", "zygote"])
def test_members_are_served_among_strangers(tmp_path: Path, code: str, kind: str) -> None:
    """Regression: 400 connections at 256 descriptors ended the process, or kept it from watching its workers."""
    run = RunDir(tmp_path / "run")
    run.create()
    try:
        wanted = run.socket_of("server") if kind == "path" else LOOPBACK
        with many_files(), child(code, run.path, wanted) as (at, process), Crowd(at) as crowd:
            for _ in range(3):
                crowd.drip()
                assert 0 < int(ask(process)) < LIMIT - RESERVE
                befriend(code, at)
            assert process.poll() is None
    finally:
        run.remove_pages()


def befriend(code: str, at: Address) -> None:
    """Connect as a member, and check that it is answered."""
    if code == HUB:
        with closing(
            BlockingChannel.connect(MESSAGES, at, SECRET, "echo", "worker", timeout_s=BOUND_S)
        ) as hub:
            hub.send(StopRun(reason="echo"))
            assert hub.receive(BOUND_S) == StopRun(reason="echo")
    elif code == ZYGOTE:
        with closing(
            BlockingChannel.connect(
                ZYGOTE_MESSAGES, at, SECRET, zygote_of("node0"), "agent", timeout_s=BOUND_S
            )
        ) as line:
            assert isinstance(line.receive(BOUND_S), Preloaded)
    else:
        assert fetch({0: at}, [], SECRET, FIRST) == VALUES


@pytest.mark.processes
def test_one_frame_of_a_stranger_does_not_end_the_zygote(tmp_path: Path) -> None:
    """Regression: deeply nested lists in a handshake, one kilobyte of them, raised an exception that no code caught."""
    run = RunDir(tmp_path / "run")
    run.create()
    deep = frame(b"\x81\xa2zz" + b"\x91" * 1_010 + b"\xc0")
    try:
        with child(ZYGOTE, run.path, LOOPBACK) as (at, process):
            with dial(at, BOUND_S) as stranger:
                stranger.sendall(deep)
                with suppress(ConnectionResetError):
                    while stranger.recv(4096):
                        pass
            befriend(ZYGOTE, at)
            assert process.poll() is None
    finally:
        run.remove_pages()


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["path", "port"])
def test_ranks_of_a_mesh_meet_among_strangers(tmp_path: Path, kind: str) -> None:
    """Regression: one silent connection kept the ranks apart, as callers were served one after the other, 10 s each."""
    tmp_path.chmod(0o700)
    wanted = Address(str(tmp_path / "group")) if kind == "path" else LOOPBACK
    with many_files(), child(MESH, tmp_path, wanted) as (at, process), Crowd(at):
        assert ask(process) == "[[2.0, 2.0], [2.0, 2.0]]"
        assert 0 < int(ask(process)) < LIMIT - RESERVE


@pytest.mark.processes
def test_a_run_among_strangers_loses_nothing(tmp_path: Path) -> None:
    """The connections are at agent, controller and zygote, in training and in a recovery.

    Regression: the agent ended.
    """
    names = ("agent", "controller", "zygote")
    with many_files(), Run(tmp_path, nproc=2, args=("100000",)) as run:
        run.start()
        run.wait_log("rank")
        ends = [until(name, partial(run.dir.read_endpoint, name)) for name in names]
        for end in ends:
            resource.prlimit(end.pid, resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
        with Crowd(*(end.at for end in ends)) as crowd:
            os.kill(run.pids()[0], 9)
            run.wait_event("recovered")
            crowd.drip()
            run.let_end()
            assert run.wait() == 0
        counts = Counter(event.kind for event in run.events())
        assert counts["agent_started"] == counts["controller_started"] == counts["zygote_ready"] == 1
        assert counts["zygote_lost"] == 0
        assert counts["recovered"] == 1


@pytest.mark.processes
@pytest.mark.parametrize(
    "encrypts", [pytest.param(False, marks=pytest.mark.more), True], ids=["plain", "encrypted"]
)
def test_a_run_of_two_nodes_among_strangers_loses_nothing(tmp_path: Path, encrypts: bool) -> None:
    """At all that listens on TCP: controller, agents for each other, states in memory."""
    nodes = Nodes(tmp_path, 2)
    settings: dict[str, Any] = {"args": ("100000",), "encrypts": encrypts}
    with many_files(), nodes.node(0, **settings) as first, nodes.node(1, **settings) as second:
        runs = (first, second)
        for run in runs:
            run.start()
        until("a rank trains", lambda: "rank" in second.logs())
        leader = until("controller", lambda: next(filter(None, map(controller_of_run, runs)), None))
        known = until("both", lambda: peers if len(peers := peers_of(first)) == 2 else None)
        agents = [until("agent", partial(run.dir.read_endpoint, "agent")) for run in runs]
        for end in (*agents, leader):
            resource.prlimit(end.pid, resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
        doors = [Address(p.host, port) for p in known for port in (p.port, p.memory_port)]
        assert len(doors) == 4 and not any(door.is_path for door in (*doors, leader.at))
        with Crowd(*doors, leader.at) as crowd:
            (worker,) = second.pids().values()
            os.kill(worker, 9)
            first.wait_event("recovered")
            crowd.drip()
            for run in runs:
                run.let_end()
            assert [run.wait() for run in runs] == [0, 0]
        for run in runs:
            counts = Counter(event.kind for event in run.events())
            assert counts["agent_started"] == counts["zygote_ready"] == counts["recovered"] == 1
            assert counts["controller_started"] == 1


def controller_of_run(run: Run) -> Endpoint | None:
    """Return the endpoint of the controller, if this node runs it."""
    return run.dir.read_endpoint("controller")


def peers_of(run: Run) -> list[Peer]:
    """Return the agents that a node knows."""
    try:
        return read_peers(run.dir)
    except FileNotFoundError:
        return []
