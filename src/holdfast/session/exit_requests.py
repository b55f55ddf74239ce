"""Requests to leave the job: signals, even while the main thread waits in C++, and a file that a user writes.

Theory. A Python signal handler runs in the main thread between bytecodes, so it does not run while that thread waits
inside a collective. The interpreter's C handler, however, writes the signal's number into a wake-up descriptor at once.
A thread of this module reads that descriptor. The handlers and the wake-up descriptor of the script still receive each
signal, and are restored when the session ends. If the script handles SIGUSR1, this module does not use that signal,
because scripts print their stacks on SIGUSR1.

A forked process (a worker of a data loader or pool) inherits the handlers and the descriptor. A signal to the forked
process alone (``Process.terminate()``) ends that process and is not a request to leave. Schedulers signal every
process. If the parent receives the signal as well, the forked process continues, because the current step may need
it.

The exit file is JSON with ``{"GracefulExit": 1}``. Each version of the file (modification time and content) is one
request. Every checkpoint holds the version that was answered last, so a file that is left over does not stop the next
run. If a file exists when a job begins, and was not answered before, it is answered at the first step. A process that
joins a running job ignores the version that it finds. An ignored request is logged in one line. A file that cannot be
read causes one warning.
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
"""Key, in the rank-local values of a checkpoint, of the exit-file version that was answered last."""
FILE_INTERVAL_S = 0.5
CHILD_WAIT_S = 1.0  # for a signal that reaches the parent a little later
FILE_SIZE_BYTES_MAX = 64 * 1024


class FileVersion(NamedTuple):
    """One version of the exit file: its modification time in nanoseconds since the epoch, and its bytes."""

    time_ns: int
    content: bytes

    def record(self) -> list[int | str]:
        """Return the form of this version in a checkpoint: the time, and a digest of the content."""
        return [self.time_ns, xxhash.xxh3_128_hexdigest(self.content)]


class ExitWatch:
    """The watch for requests to leave, active from :meth:`start` to :meth:`stop`.

    Args:
        ask: called for each request, in the watching thread, with the name of the signal or file.
        exit_file: the file to watch; if None, only signals are watched.
        grace_s: seconds after the first request after which ``give_up`` is called; None means no limit.
        give_up: ends the process.
        signals: the signals that are requests to leave.
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
        self._leaving = mmap.mmap(-1, 1)  # shared with forked processes; 1: the parent got a signal
        self._forked = False
        self._deadline_s: float | None = None
        self._seen: FileVersion | None = None
        self._answered: Plain = None  # FileVersion.record() of the version that was answered last
        self._unreadable = False
        self._before: dict[signal.Signals, Any] = {}
        self._before_fd = -1
        self._read, self._write = -1, -1
        self._thread = threading.Thread(target=self._watch, name="holdfast-exit", daemon=True)
        self._ending = False
        self._quit_read, self._quit_write = -1, -1

    def start(self, known: Mapping[str, Plain] | None = None, say: Callable[[str], None] = log.info) -> None:
        """Install the signal handlers (only if this is the main thread), and start the watching thread.

        Args:
            known: rank-local values of the loaded state, with the record of the exit-file version that was answered
                last (:meth:`record`). Without this record the present version of the file is ignored. None if no
                state was loaded, and no version was answered yet.
            say: logs the line about an ignored request.
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
        """End the watching thread, and restore the signal handlers and the wake-up descriptor of the script."""
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
        """Call the script's own handler of a signal.

        Without one, end this process if it is a forked one and the only receiver.
        """
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
        """Return the rank-local entry of a checkpoint with the exit-file version that was answered last.

        Args:
            leaves: all ranks have agreed to leave, so the present version of the file is answered.
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
        """Return whether ``version`` of the exit file is a request to leave.

        Log a warning if the content is not JSON.
        """
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
    """Return the newest version of the exit file to which an earlier process of the job has reacted.

    Args:
        local: the loaded rank-local values of this process; None if a new job begins without a checkpoint.
        root: directory of the session's checkpoints. In a new job, the newest checkpoint there shows which version an
            earlier job has answered.
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
    """Return the handler of signal ``number`` after the session: the earlier handler (``before``), or "ignore".

    A scheduler sends its warning (SIGUSR1 or SIGUSR2) to all processes of a run, and the launcher answers it. The
    warning must not end a worker that evaluates or exports after training. So a launched worker ignores the signal,
    unless ``before`` is a handler of the script.
    """
    launched = "HOLDFAST_MEMBER_ID" in os.environ
    return signal.SIG_IGN if launched and before is signal.SIG_DFL and number in WARNINGS else before
