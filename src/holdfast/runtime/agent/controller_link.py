"""An agent's link to the controller: joins the one that leads, or runs one itself."""

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
from holdfast.errors import ProtocolError
from holdfast.event_log import EventSink
from holdfast.runtime.agent.worker_processes import wait_gone
from holdfast.runtime.net.addresses import Address
from holdfast.runtime.net.channel import Channel, Hub
from holdfast.runtime.net.driver import watched
from holdfast.runtime.net.service_names import controller_of
from holdfast.runtime.node.process_info import kill_if, serves
from holdfast.runtime.node.run_settings import RunSettings
from holdfast.runtime.node.rundir import MODULES, Endpoint, RunDir, open_log
from holdfast.wire import MESSAGES, WireMessage

MODULE = MODULES["controller"]
START_S = 20.0
FOLLOW_S = 3.0
POLL_S = 0.02
STOOD_S = 3.0  # an agent that looks so much too late has not run in between
SPAWN_AGAIN_S = 0.5  # a full disk or a full table of processes is not over at once
END_WAIT_S = 5.0


class ControllerLink:
    """One connection at a time. ``post`` gets ControllerHere, ControllerGone and all that the controller says.

    Args:
        silent_s: a controller that says nothing for so long is gone.
        fail: gets an exception that nothing else hears of.
    """

    def __init__(
        self,
        run: RunDir,
        settings: RunSettings,
        journal: EventSink,
        post: Callable[[Message], None],
        *,
        silent_s: float,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._run = run
        self._journal = journal
        self._post = post
        self._silent_s = silent_s
        self._fail = fail
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
        """Join the controller that an agent before this one left on this node, if it lives."""
        endpoint = self._run.read_endpoint("controller")
        if endpoint is None or not serves(endpoint.pid, MODULE, self._run.path):
            return None
        try:
            await self._hub.connect(endpoint.at, controller_of(endpoint.term), "agent")
        except (OSError, ProtocolError):
            return None
        self._pid = endpoint.pid
        return endpoint

    def start(self, term: int, up: Callable[[Endpoint], None], *, alone: bool = False) -> None:
        """Run the controller of ``term`` on this node and join it; ``up`` gets its endpoint.

        Ends with ControllerHere, or with ControllerGone (then the machine decides about another try).
        """
        self._replace(self._start(term, up, alone))

    def follow(self, at: Address, term: int) -> None:
        """Join the controller of ``term`` on another node. Ends with ControllerHere or ControllerGone."""
        self.kill_local()
        self._replace(self._follow(at, controller_of(term)))

    def send(self, message: Message) -> bool:
        """To the controller; False when it is away (the machine keeps what matters)."""
        if isinstance(message, AgentHello | AgentBeat):
            message = msgspec.structs.replace(message, clock_ns=time.monotonic_ns())
        channel = self._channel
        return channel is not None and channel.send(message)  # type: ignore[arg-type]  # machines send wire messages

    async def end(self) -> None:
        """Let the controller end by itself; kill it when it does not."""
        self._ending = True
        await self._cancel()
        if self._channel is not None:
            self._channel.close()
        if self._pid:
            await wait_gone(self._pid, END_WAIT_S)
        self.kill_local()
        self._run.endpoint_path("controller").unlink(missing_ok=True)

    def kill_local(self) -> None:
        """Whatever controller this node runs: its time is over."""
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
        self._task = watched(work, self._fail)

    async def _cancel(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _start(self, term: int, up: Callable[[Endpoint], None], alone: bool) -> None:
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
        up(endpoint)
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
        """Cut the line when nothing has come for too long."""
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
