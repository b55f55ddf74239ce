"""Foreign connections at the agent's port, and a worker's client with a real agent at the other end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.ids import Generation, MemberId
from holdfast.core.protocol.messages import (
    Ack,
    ExitRun,
    Fence,
    JoinAsked,
    KvReply,
    KvRequest,
    Leave,
    Message,
    ResumeInPlace,
    SessionOpened,
    Settled,
    WorkerFailed,
    WorkerHello,
)
from holdfast.core.protocol.status_page import Word
from holdfast.errors import AuthError, FaultError, InternalError
from holdfast.runtime.net.blocking_channel import BlockingChannel
from holdfast.runtime.net.channel import Channel, Hub
from holdfast.runtime.net.service_names import agent_of
from holdfast.runtime.net.stream_sockets import dial
from holdfast.runtime.node.agent_client import AgentLink
from holdfast.runtime.node.rundir import RunDir, try_lock
from holdfast.runtime.node.status_page import Page
from holdfast.runtime.worker.worker_client import WorkerClient
from holdfast.sealing import Secret
from holdfast.wire import MESSAGES, WireMessage
from tests.runtime.runs import until

ME = MemberId(1)
FIRST, SECOND = Generation(1, 1), Generation(1, 2)


class Desk:
    """An agent's end in a thread of this process, which records messages and answers requests for ``echo`` keys."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.heard: list[Message] = []
        self.channels: list[Channel[WireMessage]] = []
        self.refused: dict[str, int] = {}
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))

    def __enter__(self) -> Desk:
        self._thread.start()
        assert self._up.wait(10)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        hub: Hub[WireMessage] = Hub(
            MESSAGES,
            self.run.secret(),
            on_open=self.channels.append,
            on_message=self._hear,
            on_close=lambda channel: self.channels.remove(channel),
        )
        self.refused = hub.refused
        server, at = await hub.listen(agent_of("node0"), self.run.socket_of("agent"))
        self.run.write_endpoint("agent", at, node="node0")
        self._up.set()
        await self._stop.wait()
        server.close()
        await hub.close(1.0)
        self.run.remove_endpoint("agent")

    def _hear(self, channel: Channel[WireMessage], message: WireMessage) -> None:
        self.heard.append(message)
        if isinstance(message, KvRequest) and message.keys == ("echo",):
            channel.send(KvReply(request_id=message.request_id, value=message.value))
        elif isinstance(message, ExitRun):
            channel.send(Ack(ok=True, detail=message.source))

    def say(self, message: WireMessage) -> None:
        """Send a message to every worker."""
        for channel in list(self.channels):
            self._loop.call_soon_threadsafe(channel.send, message)

    def kinds(self) -> list[str]:
        return [type(message).__name__ for message in self.heard]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    made = RunDir(tmp_path / "run")
    made.create()
    yield made
    made.remove_pages()


@contextlib.contextmanager
def client_of(run: RunDir, **more: Any) -> Iterator[WorkerClient]:
    page = Page.create(run.page_path(ME))
    client = WorkerClient(
        member_id=ME,
        generation=FIRST,
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        page=page,
        run_dir=run.path,
        **more,
    )
    client.start()
    try:
        yield client
    finally:
        client.close()
        page.close()
    assert WorkerClient.current() is None


def test_a_wrong_token_is_refused(run: RunDir) -> None:
    with Desk(run) as desk:
        endpoint = run.read_endpoint("agent")
        assert endpoint is not None
        with pytest.raises(AuthError, match="wrong token"):
            BlockingChannel.connect(MESSAGES, endpoint.at, Secret(b"x" * 64), agent_of("node0"), "worker")
        until("counted", lambda: desk.refused.get("token") == 1)
        assert desk.heard == []
        run.token_file.write_bytes(secrets.token_hex(32).encode())
        with pytest.raises(AuthError):
            AgentLink(run.path).request(ExitRun(grace_s=1.0, source="me"))


def test_a_token_that_others_can_read_is_refused(run: RunDir) -> None:
    run.token_file.chmod(0o644)
    with pytest.raises(AuthError, match="can be read by others"):
        run.secret()


def test_a_file_that_is_no_token_is_not_read_whole(run: RunDir) -> None:
    with run.token_file.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(AuthError, match="more than 4096 bytes") as refused:
        run.secret()
    assert refused.value.hint == "check the path"


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\x02hi"])
def test_strangers_are_cut_off(run: RunDir, data: bytes) -> None:
    with Desk(run) as desk:
        endpoint = run.read_endpoint("agent")
        assert endpoint is not None
        with dial(endpoint.at, 10) as sock:
            sock.sendall(data)
            received = b""
            while chunk := sock.recv(4096):
                received += chunk
        assert len(received) < 200
        until("counted", lambda: desk.refused.get("greeting") == 1)
        assert AgentLink(run.path).request(ExitRun(grace_s=1.0, source="me")) == Ack(ok=True, detail="me")


def test_an_oversized_frame_after_the_handshake_is_cut_off(run: RunDir) -> None:
    with Desk(run) as desk:
        endpoint = run.read_endpoint("agent")
        assert endpoint is not None
        channel = BlockingChannel.connect(MESSAGES, endpoint.at, run.secret(), agent_of("node0"), "worker")
        with socket.socket(fileno=os.dup(channel.fileno())) as sock:
            sock.sendall(b"\x7f\xff\xff\xff")
            with pytest.raises(ConnectionError):
                channel.receive(10.0)
        channel.close()
        until("counted", lambda: desk.refused.get("frame") == 1)


def test_no_agent_is_one_clear_error(run: RunDir) -> None:
    with pytest.raises(FaultError, match="never published"):
        AgentLink(run.path).request(ExitRun(grace_s=1.0, source="me"), timeout_s=0.2)


def test_hello_messages_handlers_and_tasks(run: RunDir) -> None:
    with Desk(run) as desk, client_of(run) as client:
        got: list[Message] = []
        threads: list[str] = []
        client.on(Fence, got.append)
        client.send(SessionOpened(member_id=ME, generation=FIRST, step=3))
        until("both", lambda: desk.kinds() == ["WorkerHello", "SessionOpened"])
        assert WorkerClient.current() is client and client.connected
        assert client.kv("set", ("echo",), value=b"x").value == b"x"
        client.run_task(lambda: threads.append(threading.current_thread().name))
        desk.say(Fence(member_id=ME, generation=SECOND, reason="r"))
        until("fence", lambda: got and threads)
        assert client.fenced and threads == ["holdfast-task"]
        desk.say(ResumeInPlace(member_id=ME, generation=SECOND, step=3))
        until("resume", lambda: not client.fenced)
        assert client.generation == SECOND and client.page[Word.GENERATION] == SECOND.pack()
        desk.say(Fence(member_id=ME, generation=FIRST, reason="late"))
        until("stale", lambda: client.refused_stale == 1)
        assert len(got) == 1


def test_a_rank_that_has_resumed_is_not_due_when_a_new_controller_says_it_again(run: RunDir) -> None:
    """Regression: the rank kept the bound of a recovery until the next fault, so a long evaluation was a hang."""
    with Desk(run) as desk, client_of(run) as client:
        until("hello", lambda: desk.kinds() == ["WorkerHello"])
        desk.say(Fence(member_id=ME, generation=SECOND, reason="r"))
        desk.say(ResumeInPlace(member_id=ME, generation=SECOND, step=3))
        until("due", lambda: client.page[Word.DUE] == 1)
        client.resumed(SECOND)
        desk.say(ResumeInPlace(member_id=ME, generation=SECOND, step=3))
        # the agent answers this after the message before it
        assert client.kv("set", ("echo",), value=b"x").value == b"x"
        assert client.page[Word.DUE] == 0


def test_a_fence_ends_a_wait_and_is_answered_without_a_session(run: RunDir) -> None:
    with Desk(run) as desk, client_of(run) as client:
        poisoned: list[str] = []
        client.on_fence_default = poisoned.append
        until("hello", lambda: desk.kinds() == ["WorkerHello"])
        timer = threading.Timer(0.1, lambda: desk.say(Fence(member_id=ME, generation=SECOND, reason="r")))
        timer.start()
        assert client.kv("wait", ("never",), timeout_s=60.0).error == "fenced"
        until("settled", lambda: "Settled" in desk.kinds())
        assert desk.heard[-1] == Settled(member_id=ME, generation=SECOND, state="starting", step=0)
        assert poisoned == ["r"]


def test_a_reconnected_client_says_again_what_may_have_been_lost(run: RunDir) -> None:
    with client_of(run) as client:
        client.hello = lambda: ("ready", 4)
        with Desk(run) as desk:
            opened = SessionOpened(member_id=ME, generation=FIRST, step=3)
            asked = JoinAsked(member_id=ME, generation=FIRST)
            client.send(opened)
            client.send(asked)
            until("all", lambda: len(desk.heard) == 3)
        until("away", lambda: not client.connected)
        failed = WorkerFailed(
            member_id=ME, generation=FIRST, step=4, kind="k", what="w", traceback="t", digest="d"
        )
        client.send(failed)
        with Desk(run) as successor:
            until("all four", lambda: len(successor.heard) == 4)
            hello, *repeated, queued = successor.heard
        assert isinstance(hello, WorkerHello) and (hello.state, hello.step) == ("ready", 4)
        assert (repeated, queued) == ([opened, asked], failed)


def test_an_orphan_is_told_once(run: RunDir) -> None:
    calls: list[float] = []
    with client_of(run, orphan_s=0.2) as client:
        client.on_orphaned(lambda: calls.append(time.monotonic()))
        until("orphaned", lambda: calls)
        time.sleep(0.4)
        assert len(calls) == 1
        with pytest.raises(InternalError, match="client thread"):
            _ask_from_client_thread(client, run)


def test_with_its_launcher_gone_too_an_orphan_does_not_wait(run: RunDir) -> None:
    launcher = try_lock(run.launcher_lock)
    assert launcher is not None and not run.launcher_is_gone()
    calls: list[float] = []
    with client_of(run, orphan_s=600.0) as client:
        client.on_orphaned(lambda: calls.append(time.monotonic()))
        time.sleep(1.5)
        assert calls == []
        os.close(launcher)
        until("orphaned", lambda: calls)


def test_an_orphan_asks_nobody_until_an_agent_comes_all_the_same(run: RunDir) -> None:
    with client_of(run, orphan_s=0.2) as client:
        client.on_orphaned(lambda: None)
        assert client.kv("wait", ("never",), timeout_s=600.0).error == "orphaned"
        assert client.orphaned
        assert client.kv("check", ("never",), timeout_s=600.0).error == "orphaned"
        with Desk(run):
            until("found", lambda: not client.orphaned)
            assert client.kv("set", ("echo",), value=b"x", timeout_s=600.0).value == b"x"


def _ask_from_client_thread(client: WorkerClient, run: RunDir) -> None:
    caught: list[Exception] = []

    def handler(fence: Fence) -> None:
        try:
            client.kv("check", ("x",))
        except InternalError as error:
            caught.append(error)

    client.on(Fence, handler)
    with Desk(run) as desk:
        # Do not use `client.connected`: the client's side of the handshake is done before this side.
        until("hello", lambda: "WorkerHello" in desk.kinds())
        desk.say(Fence(member_id=ME, generation=SECOND, reason="r"))
        until("caught", lambda: caught)
    raise caught[0]


CHILD = """
import sys, time
from pathlib import Path
from holdfast.core.ids import Generation, MemberId
from holdfast.runtime.worker.worker_client import WorkerClient
from holdfast.runtime.node.status_page import Page
page = Page.open(sys.argv[2])
client = WorkerClient(member_id=MemberId(1), generation=Generation(1, 1), rank=0, local_rank=0, world_size=1,
                local_world_size=1, page=page,
                run_dir=Path(sys.argv[1]), orphan_s=0.3)
if sys.argv[3] == "task":
    client.run_task(lambda: 1 / 0)
print("buffered", end="")
client.start()
while sys.argv[3] == "busy":
    pass
time.sleep(60)
"""


@pytest.mark.processes
@pytest.mark.parametrize(("mode", "code"), [("leave", 78), ("orphan", 77), ("task", 70), ("busy", 78)])
def test_how_a_process_leaves_without_its_main_thread(run: RunDir, mode: str, code: int) -> None:
    page = run.page_path(ME)
    Page.create(page).close()
    command = [sys.executable, "-c", CHILD, str(run.path), str(page), mode]
    pipe = subprocess.PIPE
    with contextlib.ExitStack() as stack:
        desk = stack.enter_context(Desk(run)) if mode != "orphan" else None
        child = stack.enter_context(subprocess.Popen(command, stdout=pipe, stderr=pipe))
        stack.callback(child.kill)
        if desk is not None and mode in ("leave", "busy"):
            until("hello", lambda: desk.kinds() == ["WorkerHello"])
            desk.say(Leave(member_id=ME, generation=FIRST, code=78, reason="restart"))
        out, err = child.communicate(timeout=30)
        assert child.returncode == code
        if mode != "task":
            assert out == b"buffered"
        else:
            assert b"ZeroDivisionError" in err


def test_a_message_sent_before_the_end_is_read_although_a_write_fails_first(run: RunDir) -> None:
    """Regression: a fence to a rank that had just ended lost the rank's report, and the run was started again."""
    heard: list[str] = []

    async def serve() -> None:
        over = asyncio.Event()
        hub: Hub[WireMessage] = Hub(
            MESSAGES,
            run.secret(),
            on_open=lambda channel: None,
            on_message=lambda channel, message: heard.append(type(message).__name__),
            on_close=lambda channel: over.set(),
        )
        server, at = await hub.listen(agent_of("node0"), run.socket_of("agent"))
        loop = asyncio.get_running_loop()
        worker = await loop.run_in_executor(
            None,
            lambda: BlockingChannel.connect(MESSAGES, at, run.secret(), agent_of("node0"), "worker"),
        )
        (channel,) = hub.channels
        # The loop does not run between the end of the worker and the fence.
        worker.send(JoinAsked(member_id=ME, generation=FIRST))
        worker.close()
        unread = [channel.unread]
        channel.send(Fence(member_id=ME, generation=SECOND, reason="another rank failed"))
        unread.append(channel.unread)
        await asyncio.wait_for(over.wait(), 10.0)
        unread.append(channel.unread)
        assert unread == [True, True, False], "a member is reported as dead after its last message is read"
        server.close()
        await hub.close(1.0)

    asyncio.run(serve())
    assert heard == ["JoinAsked"]
