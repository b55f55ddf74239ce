"""Requests to leave: signals that work while the main thread waits in C++, and a file that a user can write.

Theory. A Python signal handler runs in the main thread between bytecodes, so it does not run while that thread waits
inside a collective. The interpreter's C handler, however, writes the signal's number into a wake-up descriptor at once,
and a thread reads it there. Handlers and a descriptor that were installed before are called, and restored at the end.
SIGUSR1 is left alone if the script has a handler for it, because scripts use it to print their stacks.

A forked process (of a data loader or a pool) inherits handlers and descriptor. A signal to the forked process alone
(``Process.terminate()``) ends it and is no request. If its parent is asked at the same time (schedulers signal every
process), the forked process stays, because the current step may need it.

The exit file is JSON with ``{"GracefulExit": 1}``. Each version of the file (time, content) counts once. Every
checkpoint holds the version that was answered last. So a file that is left over does not stop the next run, and a file
that exists from the start of a job is answered at its first step. A process that joins a running job ignores the
version that it finds. An ignored request is logged in one line. A file that cannot be read causes one warning.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from holdfast.errors import StoreError
from holdfast.frameworks.common.state_tree import Plain
from holdfast.store.backends.location import Place
from holdfast.store.backends.user_files import read_given
from holdfast.store.manage.checkpoint_root import Root
from holdfast.store.read.load import load_locals

log = logging.getLogger("holdfast")

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
_UNUSED = (signal.SIG_DFL, signal.SIG_IGN)
RECORD = "exit_file"
"""Key of the answered version among the rank-local values of a checkpoint."""
FILE_INTERVAL_S = 0.5
CHILD_WAIT_S = 1.0  # for a signal that reaches the parent a little later
FILE_SIZE_BYTES_MAX = 64 * 1024


class FileVersion(NamedTuple):
    """One version of the exit file."""

    time_ns: int
    content: bytes

    def record(self) -> list[int | str]:
        """Return the form in which a checkpoint holds this version."""
        return [self.time_ns, xxhash.xxh3_128_hexdigest(self.content)]


class ExitWatch:
    """Calls ``ask(source)`` when this process is asked to leave, from :meth:`start` to :meth:`stop`.

    Args:
        ask: called from the watching thread.
        exit_file: the file to watch, or None.
        grace_s: seconds that the process may stay after a request, after which ``give_up`` is called. None: no limit.
        give_up: ends the process.
        signals: the signals that ask it to leave.
    """

    def __init__(
        self,
        ask: Callable[[str], None],
        exit_file: Path | None,
        grace_s: float | None,
        give_up: Callable[[], None],
        signals: tuple[signal.Signals, ...] = SIGNALS,
    ) -> None:
        self._ask = ask
        self._file = exit_file
        self._grace_s = grace_s
        self._give_up = give_up
        self._numbers = signals
        self._leaving = mmap.mmap(-1, 1)  # shared with forked processes; 1: a signal asked the parent
        self._forked = False
        self._deadline_s: float | None = None
        self._seen: FileVersion | None = None
        self._answered: Plain = None  # record of the version that was answered last
        self._unreadable = False
        self._before: dict[signal.Signals, Any] = {}
        self._before_fd = -1
        self._read, self._write = -1, -1
        self._thread = threading.Thread(target=self._watch, name="holdfast-exit", daemon=True)
        self._ending = False
        self._quit_read, self._quit_write = -1, -1

    def start(self, known: Mapping[str, Plain] | None = None, say: Callable[[str], None] = log.info) -> None:
        """Install the signal handlers (in other threads than the main one only watch the file), and start the thread.

        Args:
            known: the :meth:`record` in the state where this process begins; empty: not known; None: nothing was
                answered yet.
            say: prints the line about a request that is ignored.
        """
        self._answered = None if known is None else known.get(RECORD)
        found = self._version()
        ignored = known is not None and (
            RECORD not in known or found is None or found.record() == self._answered
        )
        if ignored and found is not None and self._asks(found):
            self._seen = found
            say(
                f"holdfast: the exit file {self._file} was there before and has been answered: it is ignored; "
                "write it again to leave"
            )
        else:
            self._look()
        self._quit_read, self._quit_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        if threading.current_thread() is threading.main_thread():
            self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            for number in self._numbers:
                if number is not signal.SIGUSR1 or signal.getsignal(number) in _UNUSED:
                    self._before[number] = signal.signal(number, self._handle)
            self._before_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            os.register_at_fork(after_in_child=self._in_child)
        self._thread.start()

    def stop(self) -> None:
        """Restore the handlers and the descriptor that were installed before, and end the thread."""
        if self._quit_write < 0 or self._ending or self._forked:
            return
        self._ending = True
        self._leaving[0] = 0
        os.write(self._quit_write, b"x")
        self._thread.join()
        if self._write >= 0:
            signal.set_wakeup_fd(self._before_fd)
            for number, handler in self._before.items():
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, _afterwards(number, handler))
        for fd in (self._read, self._write, self._quit_read, self._quit_write):
            if fd >= 0:
                os.close(fd)

    def _handle(self, number: int, frame: Any) -> None:
        """Call the handler that was installed before; let the signal end a forked process that it reached alone."""
        before = self._before.get(signal.Signals(number))
        if callable(before):
            before(number, frame)
        elif self._forked and before is signal.SIG_DFL and not self._parent_asked():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _in_child(self) -> None:
        if self._before and not self._ending:
            self._forked = True
            signal.set_wakeup_fd(self._before_fd)

    def _parent_asked(self) -> bool:
        deadline_s = time.monotonic() + CHILD_WAIT_S
        while not self._leaving[0] and time.monotonic() < deadline_s:
            time.sleep(CHILD_WAIT_S / 100)
        return bool(self._leaving[0])

    def _watch(self) -> None:
        poller = select.poll()  # select() fails in a script with more than 1024 open files
        for fd in (self._quit_read, self._read):
            if fd >= 0:
                poller.register(fd, select.POLLIN)
        while True:
            looks = self._file is not None or self._deadline_s is not None
            ready = [fd for fd, _ in poller.poll(1000 * FILE_INTERVAL_S if looks else None)]
            if self._quit_read in ready:
                return
            if self._read in ready:
                self._signals(os.read(self._read, 4096))
            if self._file is not None:
                self._look()
            if self._deadline_s is not None and time.monotonic() > self._deadline_s:
                self._give_up()

    def _signals(self, numbers: bytes) -> None:
        if self._before_fd >= 0:
            with contextlib.suppress(OSError):  # full, or closed by its owner: the request still counts
                os.write(self._before_fd, numbers)
        for number in self._before:
            if int(number) in numbers:
                self._leaving[0] = 1
                self._asked(number.name)

    def _asked(self, source: str) -> None:
        if self._grace_s is not None and self._deadline_s is None:
            self._deadline_s = time.monotonic() + self._grace_s
        self._ask(source)

    def record(self, *, leaves: bool) -> dict[str, Plain]:
        """Return, for a checkpoint, the version of the exit file that was answered last.

        Args:
            leaves: all ranks have agreed to leave, which answers the current file.
        """
        found = self._version() if leaves else None
        if found is not None and self._asks(found):
            self._answered = found.record()
        return {RECORD: self._answered}

    def _look(self) -> None:
        version = self._version()
        if version == self._seen:
            return
        self._seen = version
        if version is not None and self._asks(version):
            self._asked(f"file {self._file}")

    def _asks(self, version: FileVersion) -> bool:
        """Return whether this version asks to leave. Warn if it is not JSON."""
        try:
            asked = json.loads(version.content)
        except (ValueError, RecursionError):
            log.warning('holdfast: the exit file %s is not JSON; expected {"GracefulExit": 1}', self._file)
            return False
        return isinstance(asked, dict) and asked.get("GracefulExit") == 1

    def _version(self) -> FileVersion | None:
        """Return the current version of the exit file; None if no readable file exists."""
        if self._file is None:
            return None
        try:
            return FileVersion(self._file.stat().st_mtime_ns, read_given(self._file, FILE_SIZE_BYTES_MAX))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if not self._unreadable:
                log.warning("holdfast: cannot read the exit file, it asks for nothing: %s", error)
            self._unreadable = True
            return None


def known_of(local: Mapping[str, Any] | None, root: Place | None, rank: int) -> Mapping[str, Plain] | None:
    """Return the argument ``known`` of :meth:`ExitWatch.start`.

    Args:
        local: the loaded values of this rank; None: the job begins.
        root: directory of checkpoints of the session. Its newest checkpoint may belong to an earlier job that has
            answered.
        rank: the rank of this process.
    """
    if local is not None or root is None:
        return local
    try:
        names = Root(root).names()
        found = load_locals(root / names[0], rank) if names else {}
    except StoreError:
        return None  # no readable checkpoint, so no job has answered
    return {RECORD: found[RECORD]} if RECORD in found else None


def _afterwards(number: signal.Signals, before: Any) -> Any:
    """Return the handler to install after the session.

    The launcher answers a scheduler's warning to all processes of a run. The warning must not end a worker that
    evaluates or exports after training, so it is ignored there.
    """
    launched = "HOLDFAST_MEMBER_ID" in os.environ
    return signal.SIG_IGN if launched and before is signal.SIG_DFL and number in WARNINGS else before
