"""Reading of the logs of ranks as they grow: plain files, one per rank and start of all workers (attempt)."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.runtime.node.rundir import log_path

READ_SIZE_BYTES_MAX = 1 << 20
LINE_SIZE_BYTES_MAX = 64 * 1024
UPDATED_PERIOD_S = 30.0
_ATTEMPT = re.compile(r"attempt-(\d{3,})")
_RANK = re.compile(r"rank-(\d{5,})\.log")


def attempts(log_dir: Path) -> list[int]:
    """Return the numbers of the attempts (starts of all workers) that have logs, ascending."""
    found = [_ATTEMPT.fullmatch(p.name) for p in log_dir.iterdir()] if log_dir.is_dir() else []
    return sorted(int(match[1]) for match in found if match)


def ranks_of(log_dir: Path, attempt: int) -> list[int]:
    """Return the ranks that have a log in an attempt, ascending."""
    directory = log_path(log_dir, attempt, 0).parent
    found = [_RANK.fullmatch(p.name) for p in directory.iterdir()] if directory.is_dir() else []
    return sorted(int(match[1]) for match in found if match)


class FileTail:
    """The lines of one growing file.

    As on a terminal, text after ``\\r`` replaces its line: a progress bar is one line.

    A line that is being replaced is returned once per ``UPDATED_PERIOD_S``, and when it is complete.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._clock = clock
        self._offset = 0
        self._rest = b""
        self._replaced = False  # the line without an end has replaced another state of itself
        self._updated_s: float | None = None  # when it was first replaced and not shown

    def poll(self) -> list[str]:
        """Return the lines completed since the last call; at most ``READ_SIZE_BYTES_MAX`` are read at once."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(READ_SIZE_BYTES_MAX)
        except FileNotFoundError:
            return []
        self._offset += len(data)
        return self.feed(data)

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that ``data``, the next piece of the file, completes, and a replaced line that is due."""
        *lines, rest = re.split(rb"\r?\n", self._rest + data)
        if lines:
            self._replaced, self._updated_s = False, None
        if b"\r" in data.rpartition(b"\n")[2]:
            self._replaced = True
            if self._updated_s is None:
                self._updated_s = self._clock()
        self._rest = rest[rest.rstrip(b"\r").rfind(b"\r") + 1 :]  # a \r at the end may be the half of \r\n
        if self._updated_s is not None and self._clock() - self._updated_s >= UPDATED_PERIOD_S:
            self._updated_s = None
            lines.append(self._rest)
        elif len(self._rest) > LINE_SIZE_BYTES_MAX:
            lines.append(self._rest)
            self._rest = b""
        return [_last_state(line) for line in lines]

    @property
    def updated(self) -> str:
        """The newest state of a line that is being replaced, such as a progress bar; empty without one."""
        return _last_state(self._rest) if self._replaced else ""

    def drain(self) -> Iterator[str]:
        """Yield the unread lines of a file that no process writes to, with a last line that has no line end."""
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
    """The lines of some ranks over all attempts, in the order of attempts."""

    def __init__(self, log_dir: Path, shown: Callable[[int, int], bool]) -> None:
        """Start with the first attempt.

        Args:
            log_dir: the directory of the ``attempt-NNN/`` directories.
            shown: whether to read the log of this attempt and rank; asked again until it returns True.
        """
        self._log_dir = log_dir
        self._shown = shown
        self._attempt = -1
        self._tails: dict[int, FileTail] = {}

    def poll(self) -> Iterator[tuple[int, str]]:
        """Yield (rank, line) of everything new. A new attempt ends the files of the attempt before it."""
        for attempt in attempts(self._log_dir):
            if attempt > self._attempt:
                self._open()  # it may have ended before the first look
                yield from self.drain()
                self._attempt, self._tails = attempt, {}
            if attempt == self._attempt:
                self._open()
        for rank, tail in sorted(self._tails.items()):
            for line in tail.poll():
                yield rank, line

    def updated(self) -> list[tuple[int, str]]:
        """Return rank and newest state of each line that is being replaced, such as a progress bar."""
        return [(rank, line) for rank, tail in sorted(self._tails.items()) if (line := tail.updated)]

    def _open(self) -> None:
        for rank in ranks_of(self._log_dir, self._attempt):
            if rank not in self._tails and self._shown(self._attempt, rank):
                self._tails[rank] = FileTail(log_path(self._log_dir, self._attempt, rank))

    def drain(self) -> Iterator[tuple[int, str]]:
        """Yield rank and line for each unread line in the log files of the newest start of the ranks."""
        for rank, tail in sorted(self._tails.items()):
            for line in tail.drain():
                yield rank, line
