"""The worker processes of one node: started by the zygote or directly, watched by pidfd, killed with their groups.

A pidfd reports the end of a process to any process. Only the parent (the zygote or this agent) gets the exit status, so
the agent waits briefly for the zygote's message about it. A worker that was killed or failed is reported earlier, when
its exit has begun (``runtime/node/death_watch.py``). None of its code runs after that, but its memory is not free yet.
A new process is therefore started only after the pidfd has fired, or when the exit makes no progress.

The zygote may be stopped, frozen or stuck. Each request to it therefore has a time limit, and a member is ended without
waiting for the zygote. A member without a known process is reported as exited when its kill is ordered, or when the
zygote is lost. If the zygote has forked the process nevertheless, the agent kills the process as soon as its pid is
known. ``ProcessGone`` is posted for every member. It may be posted twice for one member; only the first post counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from holdfast.core.ids import MemberId, NodeId
from holdfast.core.job.spares import ANY_RANK
from holdfast.core.protocol.messages import MemberStarted
from holdfast.core.protocol.status_page import Phase, Word
from holdfast.errors import ProtocolError
from holdfast.event_log import EventSink
from holdfast.runtime.agent.agent_events import MemoryFreed, ProcessEvent, ProcessGone, start_task
from holdfast.runtime.agent.exiting_processes import ExitingProcesses
from holdfast.runtime.net.channel import Channel, Hub
from holdfast.runtime.net.service_names import zygote_of
from holdfast.runtime.node.death_watch import listen
from holdfast.runtime.node.process_info import ending, kill_group, pidfd
from holdfast.runtime.node.process_title import ROOM
from holdfast.runtime.node.run_processes import kill_ours, writers
from holdfast.runtime.node.run_settings import RunSettings
from holdfast.runtime.node.rundir import SPARE_PAGE, RunDir, open_log
from holdfast.runtime.node.spawn import (
    FORKS,
    QUIET_DEVICES,
    ZYGOTE_MESSAGES,
    Exited,
    Preloaded,
    Quit,
    Spawn,
    Spawned,
    SpawnOrder,
    ZygoteMessage,
    open_worker_log,
    worker_env,
    worker_log,
    zygote_command,
)
from holdfast.runtime.node.status_page import Page, each_page

STATUS_WAIT_S = 0.5
ZYGOTE_START_S = 300.0  # includes the imports of the script
QUIT_WAIT_S = 1.0
# Time limit for the next message of a zygote that owes an answer. A fork takes milliseconds, or a few seconds if
# hundreds of GB are preloaded. Imports need no time here: a zygote that accepts connections has finished them.
ANSWER_S = 10.0
POLL_S = 0.01
NO_ROOM_CODE = os.EX_CANTCREAT  # exit code of a worker for which shared memory has no room


class WorkerProcess:
    """The process of one member."""

    def __init__(
        self, member_id: MemberId, pid: int, pidfd: int, child: subprocess.Popen[bytes] | None
    ) -> None:
        self.member_id = member_id
        self.pid = pid
        self.pidfd = pidfd
        self.child = child
        self.died_ns = 0
        self.status: tuple[int | None, int | None] | None = None  # exit code and signal
        self.listened = False


class Processes:
    """The workers of one node.

    Args:
        post: receives MemberStarted and ProcessGone of every member.
    """

    def __init__(
        self,
        run: RunDir,
        settings: RunSettings,
        journal: EventSink,
        post: Callable[[ProcessEvent], None],
    ) -> None:
        self.living: dict[MemberId, WorkerProcess] = {}
        self.fading = ExitingProcesses(self._memory_freed)
        self._run = run
        self._settings = settings
        self._journal = journal
        self._post = post
        # Members whose Spawn request has no answer yet. None: the member was killed since then, or it has connected.
        self._asked: dict[MemberId, SpawnOrder | None] = {}
        self._waiting: list[SpawnOrder] = []  # for the zygote
        self._zygote: Channel[ZygoteMessage] | None = None
        self._zygote_process: subprocess.Popen[bytes] | None = None
        self._zygote_pid = 0
        self._ready = False
        self._silence: asyncio.TimerHandle | None = None  # runs while the zygote owes an answer
        self._hopeless = not settings.zygote or settings.kind == "executable" or settings.library
        self._ending = False
        self._connecting: asyncio.Task[None] | None = None
        self._hub: Hub[ZygoteMessage] = Hub(
            ZYGOTE_MESSAGES,
            run.secret(),
            on_open=self._zygote_found,
            on_message=self._heard,
            on_close=self._zygote_lost,
        )

    def use(self, settings: RunSettings) -> None:
        """Use ``settings`` for all workers that are started from now on."""
        self._settings = settings

    # ------------------------------------------------------------ zygote

    def want_zygote(self) -> None:
        """Connect to the zygote of this run, or start one.

        Do nothing if a zygote is connected, or if this agent already tries to connect to one or to start one.
        """
        if self._zygote is None and self._connecting is None and not self._hopeless and not self._ending:
            self._connecting = start_task(self._reach_zygote(), self._post)

    async def _reach_zygote(self) -> None:
        try:
            await self._find_zygote()
        finally:
            self._connecting = None
        # The zygote may be lost again by now, and requests for another one in the meantime were ignored.
        self.want_zygote()

    async def _find_zygote(self) -> None:
        if await self._join_zygote():
            return
        await self._reap_zygote()
        try:
            self._start_zygote()
        except OSError as error:
            self._give_up_zygote(f"cannot start {self._python()}: {error.strerror}")
            return
        deadline = time.monotonic() + ZYGOTE_START_S
        while time.monotonic() < deadline and not self._ending:
            if self._zygote_process is not None and self._zygote_process.poll() is not None:
                break
            if await self._join_zygote():
                return
            await asyncio.sleep(POLL_S)
        self._give_up_zygote(f"it did not answer, see {self._run.path / 'zygote.log'}")

    async def _join_zygote(self) -> bool:
        endpoint = self._run.read_endpoint("zygote")
        if endpoint is None:
            return False
        self._zygote_pid = endpoint.pid
        service = zygote_of(self._settings.node)
        try:
            await self._hub.connect(endpoint.at, service, "agent")
        except (OSError, ProtocolError):
            return False
        return True

    def _zygote_found(self, channel: Channel[ZygoteMessage]) -> None:
        self._zygote = channel
        self._await_word()

    def _await_word(self) -> None:
        """Restart the time limit for the next message of the zygote, if the zygote owes an answer."""
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None
        if self._zygote is not None and (self._asked or not self._ready):
            loop = asyncio.get_running_loop()
            self._silence = loop.call_later(ANSWER_S, self._give_up_silent, self._zygote)

    def _give_up_silent(self, zygote: Channel[ZygoteMessage]) -> None:
        """Kill a zygote that is stopped or stuck.

        If it continued later, it would fork members that are already replaced.
        """
        asked = [int(member_id) for member_id in self._asked]
        self._journal.append("zygote_silent", {"asked": asked, "bound_s": ANSWER_S})
        with contextlib.suppress(ProcessLookupError):
            # The connection is up, so the pid is still the zygote's.
            os.kill(self._zygote_pid, signal.SIGKILL)
        self._run.endpoint_path("zygote").unlink(missing_ok=True)
        zygote.abort()  # a frozen process closes no connection when it is killed

    def _start_zygote(self) -> None:
        self._run.endpoint_path("zygote").unlink(missing_ok=True)
        env = {
            **QUIET_DEVICES,
            **os.environ,
            **self._settings.env,
            "OMP_NUM_THREADS": "1",
            "HOLDFAST_RUN_DIR": str(self._run.path),
            FORKS: "1",
        }
        with os.fdopen(open_log(self._run.path / "zygote.log"), "ab") as log:
            self._zygote_process = subprocess.Popen(
                zygote_command(self._run, self._settings),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._settings.cwd or None,
                env=env,
                start_new_session=True,
            )

    def _give_up_zygote(self, why: str) -> None:
        if self._ending:
            return
        self._hopeless = True
        self._journal.append("zygote_unusable", {"reason": why, "then": "every worker starts from scratch"})
        self._start_waiting()

    def _zygote_lost(self, channel: Channel[ZygoteMessage]) -> None:
        if channel is not self._zygote:
            return
        self._zygote = None
        self._ready = False
        self._await_word()
        if self._ending:
            return
        self._journal.append("zygote_lost", {})
        asked, self._asked = self._asked, {}
        for member_id, order in asked.items():
            # The fork may or may not have happened: a second fork could give the member two processes.
            if order is not None:
                self._post(ProcessGone(member_id, 0, None, None, time.monotonic_ns()))
        self.want_zygote()

    def _heard(self, channel: Channel[ZygoteMessage], message: ZygoteMessage) -> None:
        if isinstance(message, Preloaded):
            self._preloaded(channel, message)
        elif isinstance(message, Spawned):
            self._spawned(message)
        elif isinstance(message, Exited):
            life = next((one for one in self.living.values() if one.pid == message.pid), None)
            if life is not None:
                life.status = (message.code, message.signal)
                if life.died_ns:
                    self._gone(life)
        self._await_word()

    def _preloaded(self, channel: Channel[ZygoteMessage], message: Preloaded) -> None:
        imports = [f"{name} {spent_s:.3f} s" for name, spent_s in message.imports_s.items()]
        missing = [f"{name}: {error}" for name, error in message.missing.items()]
        total_s = round(sum(message.imports_s.values()), 3)
        self._journal.append(
            "zygote_ready",
            {
                "imports": imports,
                "missing": missing,
                "threads": message.threads,
                "total_s": total_s,
                "head": message.head,
            },
        )
        if message.unfit:  # its end also frees the device memory that it holds
            channel.send(Quit())
            self._give_up_zygote(message.unfit)
        else:
            self._ready = True
            self._start_waiting()

    def _spawned(self, message: Spawned) -> None:
        order = self._asked.pop(message.member_id, None)
        if not message.error:
            if order is not None:
                self.adopt(message.member_id, message.pid)
            elif all(life.pid != message.pid for life in self.living.values()):
                self.refuse(message.member_id, message.pid)
        elif order is not None:
            self._journal.append("zygote_refused", {"reason": message.error})
            self._exec(order)

    def refuse(self, member_id: MemberId, pid: int) -> None:
        """Kill a process whose member was reported as exited before the pid was known."""
        if kill_ours(pid, self._run):
            self._journal.append("ghost_killed", {"member": member_id, "pid": pid})

    def _memory_freed(self, event: MemoryFreed) -> None:
        self._start_waiting()

    def _start_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for order in waiting:
            self.start(order)

    # ------------------------------------------------------------ members

    def start(self, order: SpawnOrder) -> None:
        """Create the status page of a worker and start the worker. A repeated order does nothing.

        The start waits for the zygote, and for exiting processes to free their memory.

        Raises:
            OSError: this user may not write the log.
        """
        member_id = order.assignment.member_id
        if member_id in self.living or member_id in self._asked or order in self._waiting:
            return
        path = self._run.page_path(member_id)
        if not path.exists():
            rank = ANY_RANK if order.spare else order.assignment.rank
            try:
                Page.create(path, generation=order.generation.pack(), member=member_id, rank=rank).close()
            except OSError as error:
                self._not_started(
                    order, f"no room for the status page {path} (df -h {path.parent})", error, NO_ROOM_CODE
                )
                return
        if self.fading:
            self._waiting.append(order)
        elif self._hopeless:
            self._exec(order)
        elif self._ready and self._zygote is not None:
            self._asked[member_id] = order
            env = worker_env(self._run, self._settings, order)
            self._zygote.send(Spawn(member_id, env, worker_log(self._run, self._settings, order)))
            if self._silence is None:  # otherwise the limit of an earlier request is still running
                self._await_word()
        else:
            self._waiting.append(order)
            self.want_zygote()

    def _exec(self, order: SpawnOrder) -> None:
        """Start one worker without the zygote."""
        settings = self._settings
        argv = [self._python(), "-m", "holdfast.runtime.worker.entry", ROOM]
        if settings.kind == "executable":
            argv = [settings.target, *settings.args]
        fd = open_worker_log(self._run, self._settings, order)
        try:
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=fd,
                stderr=fd,
                cwd=settings.cwd or None,
                env={**os.environ, **worker_env(self._run, settings, order)},
                start_new_session=True,
            )
        except OSError as error:
            code = 126 if isinstance(error, PermissionError) else 127
            self._not_started(order, f"cannot start {argv[0]}", error, code)
            return
        finally:
            os.close(fd)
        self.adopt(order.assignment.member_id, child.pid, child)

    def _not_started(self, order: SpawnOrder, what: str, error: OSError, code: int) -> None:
        """Report a member that could not be started as failed with exit code ``code``. Log the reason.

        The recovery decides about another start.
        """
        with os.fdopen(open_worker_log(self._run, self._settings, order), "a") as log:
            log.write(f"holdfast: {what}: {error.strerror}\n")
        gone = ProcessGone(order.assignment.member_id, 0, code, None, time.monotonic_ns())
        asyncio.get_running_loop().call_soon(self._post, gone)

    def adopt(self, member_id: MemberId, pid: int, child: subprocess.Popen[bytes] | None = None) -> None:
        """Start to watch process ``pid`` as the worker of a member. The process may have ended already.

        Args:
            child: the process object, if this agent has started the process itself.
        """
        if member_id in self.living:
            return
        life = self.living[member_id] = WorkerProcess(member_id, pid, pidfd(pid), child)
        if member_id in self._asked:
            self._asked[member_id] = None
        self._post(MemberStarted(member_id=member_id, node_id=NodeId(self._settings.node), pid=pid))
        loop = asyncio.get_running_loop()
        if life.pidfd >= 0:
            loop.add_reader(life.pidfd, self._died, life)
        else:
            loop.call_soon(self._died, life)

    def listen(self, member_id: MemberId) -> None:
        """Start to watch the lock in a worker's status page. The worker holds this lock until its exit begins."""
        life = self.living.get(member_id)
        if life is None or life.pidfd < 0 or life.listened:
            return
        life.listened = True
        loop = asyncio.get_running_loop()

        def ended() -> None:
            with contextlib.suppress(RuntimeError):  # this agent has ended as well, and its loop is closed
                loop.call_soon_threadsafe(self._ends, life)

        with contextlib.suppress(FileNotFoundError):  # the page is already removed: the run ends
            listen(self._run.page_path(member_id), ended)

    def call(self, spare: MemberId, order: SpawnOrder) -> None:
        """Make a living spare the member that ``order`` names: rename its status page and its entry in ``living``."""
        life = self.living.pop(spare)
        seat = order.assignment
        page = Page.open(self._run.page_path(spare))
        page[Word.GENERATION] = order.generation.pack()
        page[Word.MEMBER], page[Word.RANK] = seat.member_id, seat.rank
        page.place(0, Phase.STARTING)
        page.close()
        self._run.page_path(spare).rename(self._run.page_path(seat.member_id))
        life.member_id = seat.member_id
        self.living[seat.member_id] = life

    def kill(self, member_id: MemberId, grace_s: float = 0.0) -> None:
        """Send SIGKILL to a member's process and its process group.

        With ``grace_s`` > 0, send SIGTERM to the process now, and SIGKILL that many seconds later. A member without a
        process is reported as exited instead.
        """
        life = self.living.get(member_id)
        if life is None:
            self._withdraw(member_id)
        elif life.pidfd < 0:
            return
        elif grace_s <= 0:
            _signal(life, signal.SIGKILL)
            kill_group(life.pid)
        else:
            _signal(life, signal.SIGTERM)
            asyncio.get_running_loop().call_later(grace_s, self.kill, member_id)

    def _withdraw(self, member_id: MemberId) -> None:
        """Cancel the start of a member that has no process yet, and report it as exited."""
        if member_id in self._asked:
            self._asked[member_id] = None
        self._waiting = [order for order in self._waiting if order.assignment.member_id != member_id]
        self._post(ProcessGone(member_id, 0, None, None, time.monotonic_ns()))

    async def end(self, *, kill: bool) -> None:
        """End the zygote.

        With ``kill``, first kill all workers, including those that the zygote forks during the kill.
        """
        self._ending = True
        self._waiting.clear()
        self._asked = dict.fromkeys(self._asked)
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        while kill and (self.living or self.fading):
            for member_id in list(self.living):
                self.kill(member_id)
            await asyncio.sleep(POLL_S)
        await self._end_zygote()

    async def _end_zygote(self) -> None:
        """Order the zygote to quit, and kill it if it does not end in time.

        A zygote that still imports is not connected and cannot receive the order. It is killed at once.
        """
        process = self._zygote_process
        pid = process.pid if process is not None else self._zygote_pid
        if not pid:
            return
        if self._zygote is not None and self._zygote.send(Quit()):
            await wait_gone(pid, QUIT_WAIT_S)
        if process is not None:
            process.kill()
            await self._reap_zygote()
        else:
            kill_ours(pid, self._run)
        self._run.endpoint_path("zygote").unlink(missing_ok=True)

    async def _reap_zygote(self) -> None:
        """Wait briefly for the end of a killed zygote, and reap it. A frozen zygote ends only after it is thawed."""
        process = self._zygote_process
        if process is not None and process.poll() is None:
            await wait_gone(process.pid, QUIT_WAIT_S)
            process.poll()

    def _python(self) -> str:
        return self._settings.python or sys.executable

    def _ends(self, life: WorkerProcess) -> None:
        """Report the end of a worker whose exit has begun, if the worker was killed or failed.

        The release of the lock in its status page has shown the beginning of the exit. Its memory may not be free yet.
        """
        code = ending(life.pid)
        if code is None or life.died_ns or self.living.get(life.member_id) is not life:
            return
        life.died_ns = time.monotonic_ns()
        life.status = _status(code)
        self.fading.add(life.pid)
        self._gone(life)  # reported before the group is killed: the recovery waits for this report
        kill_group(life.pid)

    def _died(self, life: WorkerProcess) -> None:
        loop = asyncio.get_running_loop()
        if life.pidfd >= 0:
            loop.remove_reader(life.pidfd)
            os.close(life.pidfd)
            life.pidfd = -1
        told = life.died_ns != 0
        life.died_ns = life.died_ns or time.monotonic_ns()
        kill_group(life.pid)
        if life.child is not None:
            life.status = _status(life.child.wait())
        if told:
            self.fading.remove(life.pid)
        elif life.status is not None or self._zygote is None:
            self._gone(life)
        else:
            loop.call_later(STATUS_WAIT_S, self._gone, life)

    def _gone(self, life: WorkerProcess) -> None:
        if self.living.get(life.member_id) is not life:
            return
        del self.living[life.member_id]
        code, killed_by = life.status or (None, None)
        self._post(ProcessGone(life.member_id, life.pid, code, killed_by, life.died_ns))


def _status(code: int) -> tuple[int | None, int | None]:
    """Return (exit code, signal) from the return code of ``Popen``, which is negative for a signal.

    One of the two is None.
    """
    return (code, None) if code >= 0 else (None, -code)


def dismiss_spares(run: RunDir) -> None:
    """Kill the spares of a dead agent that still run, and remove the status pages of all its spares."""
    for page in each_page(run.pages(), SPARE_PAGE):
        pid = page[Word.PID]
        if kill_ours(pid, run):
            kill_group(pid)
    for path in run.pages().glob(f"{SPARE_PAGE}*"):
        path.unlink(missing_ok=True)


async def wait_gone(pid: int, timeout_s: float) -> None:
    """Wait until process ``pid`` is gone, for at most ``timeout_s`` seconds."""
    fd = pidfd(pid)
    if fd < 0:
        return
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_reader(fd, gone.set)
    try:
        async with asyncio.timeout(timeout_s):
            await gone.wait()
    except TimeoutError:
        return
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def _signal(life: WorkerProcess, number: signal.Signals) -> None:
    try:
        signal.pidfd_send_signal(life.pidfd, number)
    except ProcessLookupError:
        return


async def wait_written(run: RunDir, timeout_s: float) -> list[int]:
    """Wait until the writers of this run have ended, for at most ``timeout_s`` seconds.

    Return the pids of the writers that still run.
    """
    deadline = time.monotonic() + timeout_s
    for pid in writers(run):
        await wait_gone(pid, max(0.0, deadline - time.monotonic()))
    return writers(run)
