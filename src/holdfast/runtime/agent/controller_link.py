"""The connection of an agent to the controller, which runs on another node or in a process that this agent starts."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine

import msgspec

from holdfast.core.protocol.messages import (
    AgentBeat,
    AgentHello,
    ControllerBeat,
    ControllerGone,
    ControllerHere,
    Field,
    Message,
)
from holdfast.core.protocol.peer_messages import ControllerUp
from holdfast.errors import ProtocolError
from holdfast.event_log import EventSink
from holdfast.runtime.agent.agent_events import LinkEvent, start_task
from holdfast.runtime.agent.worker_processes import wait_gone
from holdfast.runtime.net.addresses import Address
from holdfast.runtime.net.channel import Channel, Hub
from holdfast.runtime.net.service_names import controller_of
from holdfast.runtime.node.process_info import kill_if, serves
from holdfast.runtime.node.run_settings import RunSettings
from holdfast.runtime.node.rundir import MODULES, Endpoint, RunDir, open_log
from holdfast.wire import MESSAGES, WireMessage

MODULE = MODULES["controller"]
START_S = 20.0
FOLLOW_S = 3.0
POLL_S = 0.02
# If a silence is noticed this many seconds after its bound, the agent itself was not running in between.
STOOD_S = 3.0
SPAWN_AGAIN_S = 0.5  # pause before another start: a full disk or process table stays full for a while
END_WAIT_S = 5.0


class ControllerLink:
    """The connection to at most one controller at a time.

    Args:
        post: receives every message of the controller, and three events: ControllerUp (the controller listens on this
            node), ControllerHere (the connection is open), ControllerGone (it failed or closed).
        silent_s: seconds without a message from the controller after which the connection is closed.
    """

    def __init__(
        self,
        run: RunDir,
        settings: RunSettings,
        journal: EventSink,
        post: Callable[[LinkEvent], None],
        *,
        silent_s: float,
    ) -> None:
        self._run = run
        self._journal = journal
        self._post = post
        self._silent_s = silent_s
        self._heard_s = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0  # of a controller on this node
        self._channel: Channel[WireMessage] | None = None
        self._task: asyncio.Task[None] | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._ending = False
        self._hub: Hub[WireMessage] = Hub(
            MESSAGES,
            settings.secret_of(run),
            on_open=self._opened,
            on_message=self._message,
            on_close=self._closed,
        )

    async def join_local(self) -> Endpoint | None:
        """Connect to the controller that an earlier agent started on this node.

        Return the endpoint of the controller; None if no connection is possible.
        """
        endpoint = self._run.read_endpoint("controller")
        if endpoint is None or not serves(endpoint.pid, MODULE, self._run.path):
            return None
        try:
            await self._hub.connect(endpoint.at, controller_of(endpoint.term), "agent")
        except (OSError, ProtocolError):
            return None
        self._pid = endpoint.pid
        return endpoint

    def start(self, term: int, *, alone: bool = False) -> None:
        """Start the controller of ``term`` on this node and connect to it.

        After success, ControllerUp and ControllerHere are posted. After a failure, ControllerGone is posted, and the
        state machine decides about another try. With ``alone`` the controller serves only this node. ControllerUp is
        then not posted, because it would lead to an invitation of the other agents.
        """
        self._replace(self._start(term, alone))

    def follow(self, at: Address, term: int) -> None:
        """Connect to the controller of ``term`` at ``at``, on another node, and kill any controller of this node.

        ControllerHere is posted after success, ControllerGone after a failure.
        """
        self.kill_local()
        self._replace(self._follow(at, controller_of(term)))

    def send(self, message: Message) -> bool:
        """Send a message to the controller.

        Return False if there is no connection. The state machine itself keeps the messages that must not be lost.
        """
        if isinstance(message, AgentHello | AgentBeat):
            message = msgspec.structs.replace(message, clock_ns=time.monotonic_ns())
        channel = self._channel
        return channel is not None and channel.send(message)  # type: ignore[arg-type]  # machines send wire messages

    async def end(self) -> None:
        """Close the connection, and wait for the end of this node's controller.

        Kill a controller that does not end in time.
        """
        self._ending = True
        await self._cancel()
        if self._channel is not None:
            self._channel.close()
        if self._pid:
            await wait_gone(self._pid, END_WAIT_S)
        self.kill_local()
        self._run.endpoint_path("controller").unlink(missing_ok=True)

    def kill_local(self) -> None:
        """Kill every controller that runs on this node."""
        endpoint = self._run.read_endpoint("controller")
        for pid in {self._pid, endpoint.pid if endpoint is not None else 0}:
            kill_if(pid, lambda pid: serves(pid, MODULE, self._run.path))
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    # ---------------------------------------------------------------- inside

    def _replace(self, work: Coroutine[None, None, None]) -> None:
        if self._ending:
            work.close()
            return
        old, self._channel = self._channel, None
        if old is not None:
            old.close()
        if self._task is not None:
            self._task.cancel()
        self._task = start_task(work, self._post)

    async def _cancel(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _start(self, term: int, alone: bool) -> None:
        try:
            self.kill_local()
            process = self._process = self._spawn(term, alone)
        except OSError as error:
            await self._never_came({"error": str(error)[:200]}, SPAWN_AGAIN_S)
            return
        deadline = time.monotonic() + START_S
        while (endpoint := await self.join_local()) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                await self._never_came({"code": process.poll()}, POLL_S)
                return
            await asyncio.sleep(POLL_S)
        if not alone:
            self._post(controller_up(endpoint))
        self._post(ControllerHere())

    async def _never_came(self, why: dict[str, Field], pause_s: float) -> None:
        self._journal.append("controller_unreachable", why)
        await asyncio.sleep(pause_s)
        self._lost()

    async def _follow(self, at: Address, service: str) -> None:
        deadline = time.monotonic() + FOLLOW_S
        while True:
            try:
                async with asyncio.timeout(FOLLOW_S):
                    self._channel = await self._hub.connect_soon(at, service, "agent")
                break
            except (OSError, ProtocolError) as error:
                if time.monotonic() > deadline:
                    self._journal.append(
                        "controller_unreachable", {"host": at.host, "error": str(error)[:200]}
                    )
                    self._lost()
                    return
            await asyncio.sleep(10 * POLL_S)
        self._pid = 0
        self._post(ControllerHere())

    def _spawn(self, term: int, alone: bool) -> subprocess.Popen[bytes]:
        self._run.endpoint_path("controller").unlink(missing_ok=True)
        words = [sys.executable, "-m", MODULE, str(self._run.path), str(term), *(["alone"] if alone else [])]
        with os.fdopen(open_log(self._run.path / "controller.log"), "ab") as log:
            return subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _opened(self, channel: Channel[WireMessage]) -> None:
        self._channel = channel
        self._heard_s = time.monotonic()
        self._listen()

    def _listen(self) -> None:
        """Close the connection if the controller was silent for ``silent_s`` seconds; otherwise check again later."""
        if self._watch is not None:
            self._watch.cancel()
        if self._channel is None or self._ending:
            return
        silence_s = time.monotonic() - self._heard_s
        if silence_s >= self._silent_s:
            self._journal.append("controller_silent", {"silence_s": round(silence_s, 3)})
            if silence_s - self._silent_s > STOOD_S:
                self._journal.append("stood_still", {"stood_s": round(silence_s - self._silent_s, 3)})
            self._channel.abort()
            return
        loop = asyncio.get_running_loop()
        self._watch = loop.call_later(self._silent_s - silence_s + POLL_S, self._listen)

    def _message(self, channel: Channel[WireMessage], message: WireMessage) -> None:
        self._heard_s = time.monotonic()
        if channel is self._channel and not isinstance(message, ControllerBeat):
            self._post(message)

    def _closed(self, channel: Channel[WireMessage]) -> None:
        if channel is self._channel:
            self._channel = None
            self._lost()

    def _lost(self) -> None:
        if not self._ending:
            self._post(ControllerGone())


def controller_up(endpoint: Endpoint) -> ControllerUp:
    """Return the event ``ControllerUp``: this node's controller listens at ``endpoint``."""
    return ControllerUp(term=endpoint.term, host=endpoint.host, port=endpoint.port)
