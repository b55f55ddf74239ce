"""Reading of the growing logs of ranks: plain files, one per rank and attempt (start of all workers)."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.runtime.node.rundir import ATTEMPT_NAME, log_path

READ_SIZE_BYTES_MAX = 1 << 20
LINE_SIZE_BYTES_MAX = 64 * 1024
UPDATED_PERIOD_S = 30.0
_RANK = re.compile(r"rank-(\d{5,})\.log")


def attempts(log_dir: Path) -> list[int]:
    """Return the numbers of the attempts (starts of all workers) that have logs, ascending."""
    found = [ATTEMPT_NAME.fullmatch(p.name) for p in log_dir.iterdir()] if log_dir.is_dir() else []
    return sorted(int(match[1]) for match in found if match)


def ranks_of(log_dir: Path, attempt: int) -> list[int]:
    """Return the ranks that have a log in an attempt (a start of all workers), ascending."""
    directory = log_path(log_dir, attempt, 0).parent
    found = [_RANK.fullmatch(p.name) for p in directory.iterdir()] if directory.is_dir() else []
    return sorted(int(match[1]) for match in found if match)


class FileTail:
    """A reader of the lines of one growing file.

    As on a terminal, text after ``\\r`` replaces the text of its line, so all states of a progress bar are one line.
    The state of such a line is returned once per ``UPDATED_PERIOD_S``, and when the line is complete.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._clock = clock
        self._offset = 0
        self._rest = b""
        self._replaced = False  # the text of the incomplete line was replaced at least once
        self._updated_s: float | None = None  # time of the first replacement that was not yet returned

    def poll(self) -> list[str]:
        """Return the lines that were completed since the last call.

        One call reads at most ``READ_SIZE_BYTES_MAX`` bytes.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(READ_SIZE_BYTES_MAX)
        except FileNotFoundError:
            return []
        self._offset += len(data)
        return self.feed(data)

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that are completed by ``data``, the next bytes of the file.

        The text of an incomplete line that is being replaced is also returned, once per ``UPDATED_PERIOD_S``.
        """
        *lines, rest = re.split(rb"\r?\n", self._rest + data)
        if lines:
            self._replaced, self._updated_s = False, None
        if b"\r" in data.rpartition(b"\n")[2]:
            self._replaced = True
            if self._updated_s is None:
                self._updated_s = self._clock()
        self._rest = rest[rest.rstrip(b"\r").rfind(b"\r") + 1 :]  # a \r at the end may belong to \r\n
        if self._updated_s is not None and self._clock() - self._updated_s >= UPDATED_PERIOD_S:
            self._updated_s = None
            lines.append(self._rest)
        elif len(self._rest) > LINE_SIZE_BYTES_MAX:
            lines.append(self._rest)
            self._rest = b""
        return [_last_state(line) for line in lines]

    @property
    def updated(self) -> str:
        """The newest text of an incomplete line that is being replaced (a progress bar); empty if there is none."""
        return _last_state(self._rest) if self._replaced else ""

    def drain(self) -> Iterator[str]:
        """Yield all unread lines of a file that no process writes to. The last line need not end with a newline."""
        before = -1
        while self._offset != before:
            before = self._offset
            yield from self.poll()
        if self._rest:
            yield _last_state(self._rest)
            self._rest, self._replaced, self._updated_s = b"", False, None


def _last_state(line: bytes) -> str:
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")


class LogTail:
    """A reader of the log lines of some ranks over all attempts (starts of all workers), in the order of attempts."""

    def __init__(self, log_dir: Path, shown: Callable[[int, int], bool]) -> None:
        """Make a reader that begins with the first attempt.

        Args:
            log_dir: the directory that contains the directories ``attempt-NNN/``.
            shown: called with (attempt of the run, rank). The log is read as soon as it returns True.
        """
        self._log_dir = log_dir
        self._shown = shown
        self._attempt = -1
        self._tails: dict[int, FileTail] = {}

    def poll(self) -> Iterator[tuple[int, str]]:
        """Yield (rank, line) for each new line. A new attempt ends the reading of the previous attempt."""
        for attempt in attempts(self._log_dir):
            if attempt > self._attempt:
                self._open()  # a rank of the previous attempt may have ended before its log was first read
                yield from self.drain()
                self._attempt, self._tails = attempt, {}
            if attempt == self._attempt:
                self._open()
        for rank, tail in sorted(self._tails.items()):
            for line in tail.poll():
                yield rank, line

    def updated(self) -> list[tuple[int, str]]:
        """Return (rank, newest state) of each incomplete line whose text is being replaced, such as a progress bar."""
        return [(rank, line) for rank, tail in sorted(self._tails.items()) if (line := tail.updated)]

    def _open(self) -> None:
        for rank in ranks_of(self._log_dir, self._attempt):
            if rank not in self._tails and self._shown(self._attempt, rank):
                self._tails[rank] = FileTail(log_path(self._log_dir, self._attempt, rank))

    def drain(self) -> Iterator[tuple[int, str]]:
        """Yield (rank, line) for each unread line of the newest attempt.

        No process may write to its logs during or after this call.
        """
        for rank, tail in sorted(self._tails.items()):
            for line in tail.drain():
                yield rank, line
