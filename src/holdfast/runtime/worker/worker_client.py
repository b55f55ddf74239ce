"""The connection of a worker to the agent of its node: one daemon thread with sockets of the standard library.

Every collective releases the GIL. So the thread works while the main thread is in C++, and a fence always arrives. When
the agent dies, the thread reads the endpoint file until a successor answers. It then sends the queued messages. It also
sends the last message of each type in ``REPEATED`` again, because the dead agent may not have passed that message on.
The successor may lack some messages that this process has received. They are sent to the successor as well
(:meth:`WorkerClient.repeat`).
"""

from __future__ import annotations

import itertools
import os
import queue
import select
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar, cast

from holdfast.core.agent import REPEATED
from holdfast.core.ids import Generation, MemberId
from holdfast.core.job.spares import Called, SpareWaits
from holdfast.core.protocol.messages import (
    Fence,
    KvReply,
    KvRequest,
    Leave,
    Message,
    RankState,
    ResumeInPlace,
    Settled,
    WorkerFailed,
    WorkerHello,
)
from holdfast.core.protocol.status_page import Phase, Word
from holdfast.errors import InternalError, ProtocolError, UnsupportedError
from holdfast.exit_codes import Exit
from holdfast.runtime.net.blocking_channel import BlockingChannel
from holdfast.runtime.net.service_names import agent_of
from holdfast.runtime.node.deferred_rank import DeferredRank
from holdfast.runtime.node.flight_recorder import Flight
from holdfast.runtime.node.run_settings import RunSettings
from holdfast.runtime.node.rundir import RunDir
from holdfast.runtime.node.status_page import Page
from holdfast.wire import MESSAGES, WireMessage

QUEUE_LENGTH_MAX = 10_000
# Seconds without an agent after which the client checks whether the launcher, which would start another one, lives.
ORPHAN_LOOK_S = 1.0
RETRY_S = 0.05
CLOSE_TIMEOUT_S = 2.0
KV_SLACK_S = 5.0

KvOp = Literal["set", "get", "add", "wait", "check", "compare_set", "delete", "count", "append"]
M = TypeVar("M", bound=Message)


class _KvRequest:
    """A key-value request that has no answer yet."""

    def __init__(self, message: KvRequest) -> None:
        self.message = message
        self.sent = False
        self.done = threading.Event()
        self.reply = KvReply(request_id=message.request_id, ok=False, error="timeout")


def _starting() -> tuple[RankState, int]:
    return "starting", 0


class JobSaves(NamedTuple):
    """What a job has saved before a process started.

    Attributes:
        root: where the job has saved; empty if it has not.
        resume: directory name of the save to load; empty for the newest one.
    """

    root: str
    resume: str


NO_SAVES = JobSaves("", "")


class WorkerClient:
    """The connection of one process to its agent.

    ``start`` opens it; ``close`` sends the queued messages and closes it.

    Attributes:
        saves: what the job has saved before this process started.
        hello: returns the rank's state and step for :class:`WorkerHello`; a session sets it.
        on_fence_default: called at a fence. In a script that has no session it poisons the process groups.
        fenced: True from a fence until the next :class:`ResumeInPlace`, the order to continue in this process.
        orphaned: True from the time when no further agent is expected, until an agent answers nevertheless.
    """

    _current: WorkerClient | None = None

    def __init__(
        self,
        *,
        member_id: MemberId,
        generation: Generation,
        rank: int,
        local_rank: int,
        world_size: int,
        local_world_size: int,
        page: Page,
        run_dir: Path | None,
        saves: JobSaves = NO_SAVES,
        joining: bool = False,
        spare: Literal["", "any", "fixed"] = "",
        orphan_s: float = 30.0,
    ) -> None:
        self.member_id = member_id
        self.generation = generation
        self.rank = rank
        self.local_rank = local_rank
        self.world_size = world_size
        self.page = page
        self.shared = page.path.parent if local_world_size == world_size else None
        self.flight: Flight | None = page.flight
        self.run_dir = run_dir
        self.saves = saves
        self.joining = joining
        self.stand_in = DeferredRank(spare == "fixed", self._waits) if spare else None
        self._on_call: Callable[[str], None] = lambda log: None
        self.orphan_s = orphan_s
        self.hello: Callable[[], tuple[RankState, int]] = _starting
        self.on_fence_default: Callable[[str], None] | None = None
        self.fenced = False
        self.fence_reason = ""
        self.failed: BaseException | None = None  # the exception that was reported to the controller
        self.connected = False
        self.orphaned = False
        self.refused_stale = 0
        self._newest = generation
        self._resumed_in: Generation | None = None
        self._has_session = False
        self._handlers: dict[type[Message], Callable[[Message], None]] = {}
        self._orphan_handlers: list[Callable[[], None]] = []
        self._outbox: deque[Message] = deque()
        self._repeated: dict[type[Message], Message] = {}
        self._requests: dict[int, _KvRequest] = {}
        self._numbers = itertools.count(1)
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._closing = False
        self._channel: BlockingChannel[WireMessage] | None = None
        self._wake_read, self._wake_write = -1, -1
        self._thread = threading.Thread(target=self._guard(self._run), name="holdfast-client", daemon=True)
        self._task_thread = threading.Thread(
            target=self._guard(self._work), name="holdfast-task", daemon=True
        )
        self.on(Fence, self._fence)
        self.on(Leave, self._leave)
        self.on(Called, self._called)

    @staticmethod
    def current() -> WorkerClient | None:
        """Return the started client of this process; None in a process without one."""
        return WorkerClient._current

    def open_session(self) -> None:
        """Record that a session of this process begins.

        Raises:
            UnsupportedError: this is not the first session. A newcomer runs the script from its top, so it would join
                in the first session while the other ranks are in the second.
        """
        if self._has_session:
            raise UnsupportedError(
                "a second session in one process: a job has one",
                hint="train in one session (its loop may change loaders and learning rates), or make it two jobs: the "
                "second script loads the first one's weights with holdfast.load(path, model)",
            )
        self._has_session = True

    @property
    def several_nodes(self) -> bool:
        """True if the job has, or may get, several nodes."""
        return self.run_dir is not None and RunSettings.load(self.run_dir).several

    def start(self) -> None:
        """Start the client thread and the task thread, and make :meth:`current` return this client."""
        if self.run_dir is None:
            raise InternalError("a client without a run directory cannot start")
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        WorkerClient._current = self
        os.register_at_fork(after_in_child=self._forget)
        self._thread.start()
        self._task_thread.start()

    def close(self) -> None:
        """Send the queued messages (for at most ``CLOSE_TIMEOUT_S`` seconds) and end both threads."""
        self._closing = True
        self._tasks.put(None)
        self._wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT_S + 1.0)
        if WorkerClient._current is self:
            WorkerClient._current = None

    def send(self, message: Message) -> None:
        """Queue a message to the agent. Any thread and any signal handler may call this.

        Raises:
            ProtocolError: there was no agent for so long that the queue is full.
        """
        if len(self._outbox) >= QUEUE_LENGTH_MAX:
            raise ProtocolError(f"{QUEUE_LENGTH_MAX} messages wait for an agent that does not come back")
        self._outbox.append(message)
        self._wake()

    def repeat(self, message: Message) -> None:
        """Send ``message``, which this process has received, to each successor of the agent when it connects.

        A later call with a message of the same type replaces ``message``.
        """
        self._repeated[type(message)] = message

    def on(self, kind: type[M], handler: Callable[[M], None]) -> None:
        """Register ``handler`` for messages of type ``kind``, in place of an earlier one.

        The handler runs in the client thread.
        """
        self._handlers[kind] = cast(Callable[[Message], None], handler)

    def run_task(self, task: Callable[[], object]) -> None:
        """Run ``task`` in the task thread, after the earlier tasks."""
        self._tasks.put(task)

    def on_orphaned(self, handler: Callable[[], None]) -> None:
        """Register ``handler``, to be called when no further agent is expected.

        That is the case after ``orphan_s`` seconds without an agent, or earlier if the launcher is gone. Without a
        handler the process exits with ``ORPHANED``.
        """
        self._orphan_handlers.append(handler)

    @property
    def directory(self) -> Path | None:
        """The directory in shared memory of the workers of this run on this node."""
        return self.page.path.parent

    def kv(
        self,
        op: KvOp,
        keys: tuple[str, ...] = (),
        value: bytes = b"",
        expected: bytes = b"",
        amount: int = 0,
        timeout_s: float = 300.0,
    ) -> KvReply:
        """Run one operation on the agent's key-value store (``runtime/agent/kv_server.py``), and wait for the reply.

        Returns:
            The reply. Its ``error`` is ``timeout``, ``missing``, ``full``, ``not a number``, ``fenced`` (a new
            generation began, so the result is no longer needed) or ``orphaned`` (there is no agent to answer).
        """
        if threading.current_thread() is self._thread:
            raise InternalError("kv() would wait for itself in the client thread")
        number = next(self._numbers)
        message = KvRequest(
            request_id=number,
            op=op,
            keys=keys,
            value=value,
            expected=expected,
            amount=amount,
            timeout_s=timeout_s,
        )
        request = self._requests[number] = _KvRequest(message)
        # Checked after the request is registered: a later fence ends all registered requests.
        if self.fenced or self.orphaned:
            self._requests.pop(number, None)
            return KvReply(request_id=number, ok=False, error="fenced" if self.fenced else "orphaned")
        self._wake()
        request.done.wait(timeout_s + KV_SLACK_S)
        self._requests.pop(number, None)
        return request.reply

    def on_called(self, handler: Callable[[str], None]) -> None:
        """Register ``handler(log)``, to be called in the client thread when this spare becomes a member.

        ``log`` is the log file of the member, to which the handler redirects the output.
        """
        self._on_call = handler

    # ------------------------------------------------------------ client thread

    def _waits(self, ready: bool) -> None:
        """Report to the agent that this spare waits to become a member.

        Args:
            ready: True if the spare waits at its first step; False if its script needs the rank or a device earlier.
        """
        self.page.announce("at its first step" if ready else "where its script needs its rank or a device")
        self.page.place(0, Phase.SPARE)
        self.send(SpareWaits(member_id=self.member_id, ready=ready))

    def _called(self, called: Called) -> None:
        """Make this spare the member that the order ``called`` names."""
        if self.stand_in is None:
            return
        self.member_id, self.generation = called.member_id, called.generation
        self.rank, self.local_rank, self.world_size = called.rank, called.local_rank, called.world_size
        os.environ.update(called.env)
        self._on_call(called.log)
        self.send(self._hello(*self.hello()))
        self.stand_in.call(called.rank, called.ending)

    def _wake(self) -> None:
        if self._wake_write < 0:
            return  # not started: the thread begins by reading the queue
        try:
            os.write(self._wake_write, b"x")
        except BlockingIOError:
            return  # the pipe is full of wake-ups already

    def _guard(self, body: Callable[[], None]) -> Callable[[], None]:
        """Return a function for a thread that calls ``body``. An exception in ``body`` ends the whole process.

        Without this thread the worker could hang the job.
        """

        def run() -> None:
            try:
                body()
            except BaseException as error:
                traceback.print_exc()
                self._crash(error)

        return run

    def _crash(self, error: BaseException) -> None:
        text = f"{type(error).__name__}: {error}"
        state, step = self.hello()
        failed = WorkerFailed(
            member_id=self.member_id,
            generation=self.generation,
            step=step,
            kind=type(error).__name__,
            what=f"in a thread of holdfast ({state}): {text}"[:1000],
            traceback=traceback.format_exc()[-8000:],
            digest=text[:200],
        )
        if self._channel is not None:
            try:
                self._channel.send(failed)
            except OSError:
                sys.stderr.write("holdfast: the agent is gone, so this error cannot be reported to it\n")
        leave_process(Exit.INTERNAL)

    def _run(self) -> None:
        away_since = time.monotonic()
        while True:
            channel = self._connect()
            if channel is not None:
                self.orphaned = False
                self._serve(channel)
                if self.stand_in is not None and not self.stand_in.called and not self._closing:
                    leave_process(Exit.RESTART)  # a spare leaves with its agent
                away_since = time.monotonic()
            elif not self.orphaned and self._is_orphan(time.monotonic() - away_since):
                self._be_orphan()
            if self._closing and (not self._outbox or time.monotonic() - away_since > CLOSE_TIMEOUT_S):
                return
            if channel is None:
                time.sleep(RETRY_S)

    def _is_orphan(self, away_s: float) -> bool:
        """Return True if no successor of the agent is expected after ``away_s`` seconds without an agent."""
        if away_s <= min(ORPHAN_LOOK_S, self.orphan_s):
            return False
        assert self.run_dir is not None
        return away_s > self.orphan_s or RunDir(self.run_dir).launcher_is_gone()

    def _connect(self) -> BlockingChannel[WireMessage] | None:
        assert self.run_dir is not None
        run = RunDir(self.run_dir)
        endpoint = run.read_endpoint("agent")
        if endpoint is None:
            return None
        try:
            service = agent_of(endpoint.node)
            return BlockingChannel.connect(MESSAGES, endpoint.at, run.secret(), service, "worker")
        except (OSError, ProtocolError):
            return None  # a successor may be about to publish another endpoint; bounded by orphan_s

    def _serve(self, channel: BlockingChannel[WireMessage]) -> None:
        """Exchange messages until the connection breaks or, after ``close``, until all queued messages are sent."""
        self._channel = channel
        for request in list(self._requests.values()):
            request.sent = False
        hello = self._hello(*self.hello())
        poller = select.poll()
        poller.register(channel, select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        try:
            for message in (hello, *self._repeated.values()):
                channel.send(cast(WireMessage, message))
            self.connected = True
            while True:
                self._flush(channel)
                if self._closing:
                    return
                for fd, _ in poller.poll():
                    if fd == self._wake_read:
                        self._drain_wakes()
                    else:
                        for message in channel.drain():
                            self._dispatch(message)
        except (OSError, ProtocolError):
            return  # the agent is gone or sends invalid data: connect again
        finally:
            self.connected = False
            self._channel = None
            channel.close()

    def _hello(self, state: RankState, step: int) -> WorkerHello:
        return WorkerHello(
            member_id=self.member_id,
            generation=self.generation,
            rank=self.rank,
            pid=os.getpid(),
            state=state,
            step=step,
        )

    def _drain_wakes(self) -> None:
        try:
            while os.read(self._wake_read, 4096):
                pass
        except BlockingIOError:
            return

    def _flush(self, channel: BlockingChannel[WireMessage]) -> None:
        while self._outbox:
            message = self._outbox[0]
            if isinstance(message, REPEATED):
                self._repeated[type(message)] = message
            channel.send(cast(WireMessage, message))
            self._outbox.popleft()
        for request in list(self._requests.values()):
            if not request.sent:
                request.sent = True
                channel.send(request.message)

    def _dispatch(self, message: Message) -> None:
        if isinstance(message, KvReply):
            request = self._requests.pop(message.request_id, None)
            if request is not None:
                request.reply = message
                request.done.set()
            return
        generation = getattr(message, "generation", None)
        if isinstance(generation, Generation):
            if generation < self._newest:
                self.refused_stale += 1
                return
            self._newest = generation
        if isinstance(message, Fence):
            self.fence_reason = message.reason
            self.fenced = True
            self.page[Word.FENCED], self.page[Word.DUE] = message.generation.pack(), 0
            self._fail_requests("fenced")
        elif isinstance(message, ResumeInPlace):
            self.generation = message.generation
            self.page[Word.GENERATION] = message.generation.pack()
            if message.generation != self._resumed_in:  # a new controller repeats the order
                self.page[Word.DUE] = 1
            self.fenced = False  # last: a thread that reads it then also reads the new generation
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(message)

    def moved(self, size_bytes: int) -> None:
        """Count bytes of the state that were sent, received, compared or written.

        The status page carries the count, from which the controller knows that the work continues.
        """
        self.page[Word.WORK] += size_bytes

    def resumed(self, generation: Generation) -> None:
        """Record that the main thread has reached the point at which the job resumes in ``generation``."""
        self._resumed_in = generation
        self.page[Word.FENCED] = self.page[Word.DUE] = 0

    def _fail_requests(self, error: str) -> None:
        for number, request in list(self._requests.items()):
            self._requests.pop(number, None)
            request.reply = KvReply(request_id=number, ok=False, error=error)
            request.done.set()

    def _be_orphan(self) -> None:
        if not self._orphan_handlers:
            sys.stderr.write("holdfast: launcher and agent are lost, this worker leaves\n")
            leave_process(Exit.ORPHANED)
        for handler in self._orphan_handlers:
            handler()
        self.orphaned = True  # last: when a request fails, the session knows the reason
        self._fail_requests("orphaned")

    def _fence(self, fence: Fence) -> None:
        if self.on_fence_default is not None:
            self.on_fence_default(fence.reason)
        state, step = self.hello()
        settled = Settled(member_id=self.member_id, generation=fence.generation, state=state, step=step)
        self.send(settled)

    def _leave(self, leave: Leave) -> None:
        # Under another launcher no command prints the reason.
        if leave.code == Exit.BAD_INPUT and self.local_rank == 0 and self.run_dir is not None:
            if RunSettings.load(self.run_dir).library:
                sys.stderr.write(f"holdfast: error: {leave.reason}\n")
        leave_process(leave.code)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def _forget(self) -> None:
        """Close the connection in a forked child (such as a data loader's worker), because it belongs to the parent."""
        if WorkerClient._current is self:
            WorkerClient._current = None
            if self._channel is not None:
                self._channel.close()


def leave_process(code: int) -> None:
    """Flush stdout and stderr, and exit with ``code``.

    The flush gets at most one second, because the main thread may hold the locks of the streams.
    """
    flusher = threading.Thread(target=_flush_streams, daemon=True)
    flusher.start()
    flusher.join(1.0)
    os._exit(code)


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not getattr(stream, "closed", False):  # the script's own stream
            stream.flush()
