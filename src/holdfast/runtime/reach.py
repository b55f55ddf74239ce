"""An agent's link to the controller: finds the living one, or starts that of the next term."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from holdfast import journal as event_log
from holdfast.core.messages import ControllerGone, ControllerHere, Message, WireMessage
from holdfast.errors import ProtocolError
from holdfast.journal import Journal
from holdfast.runtime.channel import Channel, Hub
from holdfast.runtime.procs import wait_gone
from holdfast.runtime.rundir import RunDir, open_log
from holdfast.wire import MESSAGES

MODULE = "holdfast.runtime.controllerd"
START_S = 20.0
POLL_S = 0.02
END_WAIT_S = 5.0


class ControllerLink:
    """One connection at a time. ``post`` gets ControllerHere, ControllerGone and all that the controller says."""

    def __init__(self, run: RunDir, journal: Journal, post: Callable[[Message], None]) -> None:
        self._run = run
        self._journal = journal
        self._post = post
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self._channel: Channel[WireMessage] | None = None
        self._task: asyncio.Task[None] | None = None
        self._ending = False
        self._hub: Hub[WireMessage] = Hub(
            MESSAGES,
            run.token(),
            on_open=self._opened,
            on_message=lambda channel, message: self._post(message),
            on_close=self._closed,
        )

    def reach(self) -> None:
        """Join the controller that lives, or start one."""
        self._launch(join=True)

    def restart(self) -> None:
        """Start the controller of the next term; whatever is left of the one before is killed."""
        self._launch(join=False)

    def send(self, message: WireMessage) -> bool:
        """To the controller; False when it is away (the machine keeps what matters)."""
        return self._channel is not None and self._channel.send(message)

    async def end(self) -> None:
        """Let the controller end by itself; kill it when it does not."""
        self._ending = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._channel is not None:
            self._channel.close()
        if self._pid:
            await wait_gone(self._pid, END_WAIT_S)
        self._kill_old()
        self._run.endpoint_path("controller").unlink(missing_ok=True)

    def _launch(self, *, join: bool) -> None:
        if not self._ending and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._establish(join))

    async def _establish(self, join: bool) -> None:
        """Ends with ControllerHere, or with ControllerGone (then the machine decides about another try)."""
        if not (join and await self._join()):
            self._kill_old()
            self._start()
            deadline = time.monotonic() + START_S
            while not await self._join():
                assert self._process is not None
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self._journal.append("controller_unreachable", {"code": self._process.poll()})
                    await asyncio.sleep(POLL_S)
                    self._task = None
                    self._post(ControllerGone())
                    return
                await asyncio.sleep(POLL_S)
        self._post(ControllerHere())

    async def _join(self) -> bool:
        endpoint = self._run.read_endpoint("controller")
        if endpoint is None or not is_controller(endpoint.pid, self._run):
            return False
        try:
            await self._hub.connect(endpoint.host, endpoint.port, "agent")
        except (OSError, ProtocolError):
            return False
        self._pid = endpoint.pid
        return True

    def _start(self) -> None:
        term = 1 + last_term(self._run)
        self._run.endpoint_path("controller").unlink(missing_ok=True)
        with os.fdopen(open_log(self._run.path / "controller.log"), "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(self._run.path), str(term)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _kill_old(self) -> None:
        endpoint = self._run.read_endpoint("controller")
        for pid in {self._pid, endpoint.pid if endpoint is not None else 0}:
            if pid and is_controller(pid, self._run):
                os.kill(pid, signal.SIGKILL)
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _opened(self, channel: Channel[WireMessage]) -> None:
        self._channel = channel

    def _closed(self, channel: Channel[WireMessage]) -> None:
        if channel is not self._channel:
            return
        self._channel = None
        if not self._ending:
            self._post(ControllerGone())


def last_term(run: RunDir) -> int:
    """Newest term of which a controller was started, 0 for none."""
    events = event_log.read(run.journal).events
    return max((int(event.data["term"]) for event in events if event.kind == "controller_started"), default=0)


def is_controller(pid: int, run: RunDir) -> bool:
    """True when ``pid`` is a controller of this run (and not a zombie)."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return MODULE.encode() in words and str(run.path).encode() in words
