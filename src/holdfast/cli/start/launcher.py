"""The launcher, the process of ``holdfast run``. It starts the agent, shows progress and logs, and passes signals on.

The launcher takes no part in the protocol and shows only the content of files. If the launcher dies, the agent asks the
run for a graceful exit. If the agent dies, the launcher starts a new agent, which adopts the workers.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from string import Template
from types import FrameType

import msgspec

from holdfast import event_log
from holdfast.cli.screen.checked_output import outlive_full_disk
from holdfast.cli.screen.console import Screen, dated
from holdfast.cli.screen.error_output import logs_at, outcome, say
from holdfast.cli.screen.fault_announcer import FaultAnnouncer
from holdfast.cli.screen.fault_report import reports_of, write
from holdfast.cli.screen.log_tail import LogTail
from holdfast.cli.screen.run_lookup import name_of
from holdfast.cli.screen.run_summary import again, alike, facts, first_line, named
from holdfast.cli.screen.run_view import RunView, Watch, log_of, repeated
from holdfast.cli.start.preflight import require_start
from holdfast.cli.start.run_config import Request
from holdfast.core.protocol.messages import ExitRun, StopRun
from holdfast.errors import HoldfastError, InternalError, UsageError, UserError
from holdfast.exit_codes import Exit
from holdfast.history.run_history import FaultView, RunHistory
from holdfast.runtime.agent.run_rotation import bring_checkpoints, put_aside
from holdfast.runtime.agent.shm_cleanup import remove_forgotten
from holdfast.runtime.node.agent_client import AgentLink, start_agent
from holdfast.runtime.node.process_info import reap_others, stopped
from holdfast.runtime.node.run_settings import RunSettings
from holdfast.runtime.node.rundir import RunDir
from holdfast.store.backends.location import ROOT_VARIABLE
from holdfast.text import plural

POLL_S = 0.1
LOOK_EVERY = 3  # number of polls between two looks at the event log and the pages
SUCCESSORS_MAX = 16  # new agents in a row of which none lived for LONG_LIFE_S
LONG_LIFE_S = 5.0  # an agent that lived longer than this is no failed start
SUCCESSOR_PAUSE_S = 0.2
AGENT_STOPPED_S = 5.0
ASK_S = 5.0  # time limit for the answer of an agent
ROOM_WAIT_S = 120.0  # time limit for room on the disk, equal to the wait for a node
KEYS = (signal.SIGINT, signal.SIGQUIT)
AFTER_END_S = 10.0  # time limit for the exit of the agent after the end of the run

HINT = "next: "
NOWHERE = "nowhere to run"
NEXT = {
    Exit.FAILED: "read the traceback: holdfast logs {run}",
    Exit.USAGE: "holdfast run --help",
    Exit.UNMET: "start the same command again",
    Exit.BAD_INPUT: "read the error and change what it names: holdfast logs {run}",
    Exit.INTERNAL: "report it with the run's directory; holdfast status {run}",
    Exit.BUDGET: "holdfast status {run}  (the faults), then --max-restarts or --restart-window",
    Exit.ORPHANED: "start the same command again",
    Exit.RESTART: "report it with the run's directory",
}


def launch(request: Request) -> int:
    """Run a job to its end and return its exit code (docs/exit-codes.md).

    Raises:
        UsageError: no worker can be started, the run directory cannot be made, or the run is still active.
        UserError: the run directory was removed or moved, or its disk was full for too long.
        InternalError: too many agents have died soon after their start.
    """
    run_dir = RunDir(request.run_dir)
    remove_forgotten()
    require_start(request.settings)
    earlier = _make_room(run_dir)
    if request.settings.log_dir:
        _make_logs(Path(request.settings.log_dir))
    run_dir.create(request.token)
    run_dir.hold_launch()  # another start of the same run tests this lock, as soon as the settings are saved
    if earlier is not None:
        stay = ", its checkpoints stay" if bring_checkpoints(run_dir, earlier) else ""
        note = f"the earlier start of this run is in {earlier}{stay}"
        settings = msgspec.structs.replace(
            request.settings, root_before=_root_of(RunDir(earlier), request.settings)
        )
        request = replace(request, notes=(*request.notes, note), settings=settings)
    request.settings.save(run_dir.path)
    with logs_at(run_dir.path):
        try:
            return RunLauncher(request, run_dir).run()
        except OSError as error:
            if run_dir.path.exists():
                raise
            raise UserError(
                f"{run_dir.path} was removed, or moved: the run cannot continue without its directory",
                hint="start the same command again, and leave the directories of live runs where they are",
            ) from error


def _make_logs(directory: Path) -> None:
    """Make the directory of the logs, without which no worker can start. Raises: UsageError."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot make the directory of the logs {directory}: {error.strerror}",
            hint="choose a writable place with --log-dir",
        ) from error


def _make_room(run_dir: RunDir) -> Path | None:
    """Rename the directory of an earlier start of this run. Return its new path; None if there was no earlier start.

    Raises:
        UsageError: the earlier start is still active, or its directory cannot be renamed.
    """

    def waiting() -> None:
        say(dated(f"run {run_dir.path.name} has lost its launcher: waiting until it has saved and left"))

    try:
        return put_aside(run_dir, waiting)
    except OSError as error:
        saved = run_dir.checkpoints.is_dir()
        from_them = f", and --root {shlex.quote(str(run_dir.checkpoints))} to continue from its checkpoints"
        raise UsageError(
            f"cannot put the earlier start of {run_dir.path} aside: {error.strerror}",
            hint=f"choose another --run-id{from_them if saved else ''}",
        ) from error


def _root_of(earlier: RunDir, settings: RunSettings) -> str:
    """Return where an earlier start of the same command has saved; empty if it has not, or ``--root`` names a place.

    Another script, or other arguments, may be another job under the same run id.
    """
    before = RunSettings.load(earlier.path)
    same = (before.kind, before.target, before.args) == (settings.kind, settings.target, settings.args)
    if not same or ROOT_VARIABLE in settings.env or ROOT_VARIABLE in os.environ:
        return ""
    history = RunHistory.read(event_log.read(earlier.journal).events)
    return history.root if history.kept_step >= 0 else ""


def prefixes(template: str, watch: Watch) -> Callable[[int], str]:
    """Return a function from a rank to the text before its console lines.

    ``template`` is in the form of torchrun's ``--log-line-prefix-template``. For a rank that has not run on this node
    the text is ``[rank N]``.
    """
    text, role, hostname = Template(template), watch.settings.role, socket.gethostname()
    known: dict[int, int] = {}
    count = 0

    def prefix(rank: int) -> str:
        nonlocal known, count
        if rank not in known or len(watch.story.places) != count:
            known, count = watch.local_ranks(), len(watch.story.places)
        if rank not in known:
            return f"[rank {rank}] "
        return text.safe_substitute(role_name=role, rank=rank, local_rank=known[rank], hostname=hostname)

    return prefix


class RunLauncher:
    """The launcher of one run. It shows output, handles signals, and starts a new agent when the agent has died."""

    def __init__(self, request: Request, run_dir: RunDir) -> None:
        self.request = request
        self.run_dir = run_dir
        self.watch = Watch(run_dir, request.settings)
        self.tail = LogTail(self.watch.log_dir, self._shown)
        self.successors = 0
        self._agent_since_s = self._agent_ran_s = self._agent_seen_s = time.monotonic()
        self._asked: list[signal.Signals] = []
        self._answered = 0
        self._telling = FaultAnnouncer(self.watch, self._shown)
        self._warnings_shown = 0
        self._saves_shown = 0
        self._had_room = True

    def run(self) -> int:
        """Start the agent, and show the run until it is over. Return the exit code."""
        outlive_full_disk()
        marked, prefix = len(self.request.shown_local_ranks) > 1, self.request.line_prefix
        with (
            Screen(marked=marked, prefix=prefixes(prefix, self.watch) if prefix else None) as screen,
            self._signals(),
        ):
            self._open(screen)
            self.run_dir.hold_pages()
            agent = start_agent(self.run_dir.path)
            view = self.watch.poll()
            turn = 0
            while view.state != "ended":
                if agent.poll() is None:  # otherwise the signals are passed on to the next agent
                    self._pass_on_signals(screen)
                self._show_output(screen)
                if turn % LOOK_EVERY == 0 or agent.poll() is not None:
                    view = self.watch.poll()
                    self._show_faults(screen)
                    self._show_room(screen)
                    screen.status("  ".join([view.state, *facts(view)]), self.tail.updated())
                if view.state != "ended" and agent.poll() is not None:
                    agent = self._succeed(screen, agent)
                elif self._stands_still(agent.pid):
                    screen.say(f"the agent is stopped (state T for {AGENT_STOPPED_S:g} s): it is killed")
                    agent.kill()
                reap_others(agent.pid)
                turn += 1
                time.sleep(POLL_S)
            self._wait(agent)
            self._show_output(screen)
            for rank, line in self.tail.drain():
                screen.rank(rank, line)
            self._show_faults(screen)
        return self.close()

    def _open(self, screen: Screen) -> None:
        for note in self.request.notes:
            screen.say(f"note: {note}")
        screen.say(f"{plural(self.request.settings.nproc, 'worker')}; see: holdfast status {self._name()}")

    def _name(self) -> str:
        """Return the RUN argument by which other commands find this run."""
        return name_of(self.run_dir.path)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def note(number: int, _frame: FrameType | None) -> None:
            self._asked.append(signal.Signals(number))

        numbers = set(self.request.signals)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup: the run shall outlive its terminal
            numbers.discard(signal.SIGHUP)
        before = {number: signal.signal(number, note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _pass_on_signals(self, screen: Screen) -> None:
        while self._answered < len(self._asked):
            first, number = self._answered == 0, self._asked[self._answered]
            self._answered += 1
            grace_s = self.request.settings.grace_s
            source = "Ctrl-C" if number is signal.SIGINT else number.name
            # A signal from the keyboard ends the whole job. A signal from a scheduler may concern only this node.
            node = "" if number in KEYS else self.request.settings.node_of_several
            order = (
                ExitRun(grace_s=grace_s, source=source, node_id=node)
                if first
                else StopRun(reason=f"second signal: {source}")
            )
            began_s = time.monotonic()
            try:
                answer = AgentLink(self.run_dir.path).request(order, timeout_s=ASK_S)
            except (HoldfastError, OSError) as error:
                why = error.message if isinstance(error, HoldfastError) else str(error)
                screen.say(f"{source}: the agent does not answer ({why}); it, or a successor, is asked again")
                self._answered -= 1
                # Count this wait as time in which the agent was watched: `_stands_still` then kills a stopped agent.
                self._agent_seen_s += min(time.monotonic() - began_s, ASK_S)
                return
            screen.say(f"{source}: {answer.detail}" + (" (again to end at once)" if first else ""))

    def _shown(self, attempt: int, rank: int) -> bool:
        return self.watch.local_rank(attempt, rank) in self.request.shown_local_ranks

    def _show_output(self, screen: Screen) -> None:
        self.watch.read()  # the history names the node of each log
        for rank, line in self.tail.poll():
            screen.rank(rank, line)

    def _show_faults(self, screen: Screen) -> None:
        for warning in self.watch.story.warnings[self._warnings_shown :]:
            screen.say(f"warning: {warning}")
        self._warnings_shown = len(self.watch.story.warnings)
        for save in self.watch.story.saves[self._saves_shown :]:
            screen.say(save)
        self._saves_shown = len(self.watch.story.saves)
        self._telling.faults(screen)
        self._telling.recoveries(screen, self._write_reports)

    def _show_room(self, screen: Screen) -> None:
        """Warn once when the disk of the run directory becomes full.

        Training continues. The event log still grows into room that was reserved for it.
        """
        left = os.statvfs(self.run_dir.path).f_bavail
        if not left and self._had_room:
            screen.say(
                "warning: the disk is full: logs lose lines, and few faults can still be answered "
                f"(df -h {self._place()})"
            )
        self._had_room = left > 0

    def _place(self) -> str:
        return shlex.quote(str(self.run_dir.path))

    def _stands_still(self, agent_pid: int) -> bool:
        """Return True if the agent has been stopped by a signal (SIGSTOP) for ``AGENT_STOPPED_S``.

        The controller would soon give up the node of a stopped agent.
        """
        now_s = time.monotonic()
        # A long time since the last call means that this process was itself stopped, perhaps with the whole host. The
        # time of the agent then begins again.
        if not stopped(agent_pid) or now_s - self._agent_seen_s > AGENT_STOPPED_S / 2:
            self._agent_ran_s = now_s
        self._agent_seen_s = now_s
        return now_s - self._agent_ran_s >= AGENT_STOPPED_S

    def _succeed(self, screen: Screen, agent: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        self._await_room(screen)
        long = time.monotonic() - self._agent_since_s > LONG_LIFE_S
        self.successors = 1 if long else self.successors + 1
        self._agent_since_s = self._agent_ran_s = time.monotonic()
        if self.successors > SUCCESSORS_MAX:
            raise InternalError(
                f"{self.successors} agents died one after the other, the last with {agent.returncode}",
                hint=f"report it with {self.run_dir.path}",
            )
        screen.say(f"the agent died ({agent.returncode}), a successor adopts the workers")
        time.sleep(SUCCESSOR_PAUSE_S)
        return start_agent(self.run_dir.path)

    def _await_room(self, screen: Screen) -> None:
        """Wait for room on the disk, because an agent that cannot write its event log ends at once.

        Workers without an agent save and exit on their own.

        Raises:
            UserError: there was no room for ``ROOM_WAIT_S``, or a signal has asked the run to exit.
        """
        until_s = time.monotonic() + ROOM_WAIT_S
        said = False
        place = self._place()
        while why := self.run_dir.no_room():
            if time.monotonic() > until_s or self._answered < len(self._asked):
                raise UserError(
                    f"no agent can run: nothing can be written to {place}: {why}",
                    hint=f"make room (df -h {place}); then {again(self.watch.poll())}",
                )
            if not said:
                said = True
                screen.say(
                    f"the agent died: nothing can be written to {place}: {why}; waiting {ROOM_WAIT_S:g} s for room"
                )
            time.sleep(SUCCESSOR_PAUSE_S)

    def _wait(self, agent: subprocess.Popen[bytes]) -> None:
        try:
            agent.wait(AFTER_END_S)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()

    def close(self) -> int:
        """Print the outcome and the cost of the run, and return its exit code.

        For a failure the path of a log and a suggestion for the user are also printed.
        """
        view = self.watch.poll()
        code = Exit(view.code if view.code is not None else Exit.INTERNAL)
        written = self._write_reports()
        cost = ", ".join(fact for fact in facts(view) if "worker" not in fact)
        if code is Exit.OK or code is Exit.REQUEUE:
            say(dated(f"run {view.run_id}: {view.meaning} ({cost}); logs in {view.logs}"))
            if written:
                say(f"  {plural(len(view.faults), 'fault')}: holdfast report {self._name()}")
            if code is Exit.REQUEUE and (NOWHERE in view.reason or view.left):
                say(f"  why: {first_line(view.reason)}")
            if code is Exit.REQUEUE:
                say(f"  next: {again(view)}")
            return code
        fault = culprit(view)
        log = log_of(fault, self.run_dir, self.request.settings) if fault else None
        outcome(
            f"run {view.run_id}: {view.meaning}{_why(view, fault)}",
            # The log of the rank that failed last, or the directory of all logs of this node.
            str(log) if log else view.logs,
            self._next(view, code, fault),
            str(written[fault.number - 1]) if fault and written else "",
            cost,
        )
        return code

    def _next(self, view: RunView, code: Exit, fault: FaultView | None) -> str:
        """Return a suggestion for the user: the hint of the error that ended the run, or a text for the exit code."""
        said = [line.strip() for line in view.reason.splitlines()[1:]]
        hints = [line.removeprefix(HINT) for line in said if line.startswith(HINT)]
        if hints:
            return hints[-1]
        if code is Exit.UNSAVED and view.session and not view.cut_off:
            return f"{again(view)}; --grace-s gives the save more time"
        if code in (Exit.UNSAVED, Exit.INTERRUPTED):
            return again(view)
        if code is Exit.FAILED and fault is not None and fault.kind != "exception":
            return f"holdfast report {self._name()}"  # there is no traceback
        if code is Exit.FAILED and fault is not None and fault.what.startswith(SystemExit.__name__):
            if not view.session:
                return f"read why the script ended itself before it trained: holdfast logs {self._name()}"
            if " exit code 0 " not in fault.what:
                return f"read why the script ended itself: holdfast logs {self._name()}"
            return (
                f"find its sys.exit(): all ranks have to leave at the same step; holdfast logs {self._name()}"
            )
        if code is Exit.BUDGET and alike(view.faults):
            return f"holdfast report {self._name()}  (their cause: more restarts would end in the same way)"
        return NEXT[code].format(run=self._name())

    def _write_reports(self) -> list[Path]:
        """Write one report per fault into the run directory, and return the paths; empty if that fails."""
        settings, run = self.request.settings, self.run_dir
        if not self.watch.story.faults:
            return []
        events = event_log.read(run.journal).events
        try:
            return [write(run, each) for each in reports_of(run, settings, events)]
        except OSError as error:
            say(
                dated(
                    f"the fault reports cannot be written: {error}; holdfast report {self._name()} shows them"
                )
            )
            return []


def culprit(view: RunView) -> FaultView | None:
    """Return the fault whose text is in the reason for the end of the run.

    If no such fault exists, return the newest fault; None if the run had no fault.
    """
    about = (f for f in reversed(view.faults) if f.what and f.what in view.reason)
    return next(about, view.faults[-1] if view.faults else None)


def _why(view: RunView, fault: FaultView | None) -> str:
    """Return the first line of the reason for the end of a run, with the rank of ``fault`` if the line is about it."""
    why = first_line(view.reason).rstrip(":")  # the text after the colon is in the log
    if not why:
        return ""
    rank = (
        f"rank {fault.rank}"
        if fault and fault.kind in ("exception", "device") and fault.what in view.reason
        else ""
    )
    last = ""
    if fault and view.code == Exit.BUDGET and (told := repeated(view.faults, fault)):
        last = f"; rank {fault.rank}: {first_line(fault.what)}: {told}"
    elif view.code == Exit.BUDGET and (told := alike(view.faults)):
        last = f"; {told}"
    return f": {named(why)}" + (f" ({rank})" if rank and not why.startswith(rank) else "") + last
