"""Health of this node: cheap built-in checks, and a command of the user (``--health``). A sick node is drained.

Theory. A check reports only what it can read. A value that it cannot read counts as healthy. A sick node gives a notice
without a deadline: its ranks move if another node has room, otherwise the node trains on. So a false alarm costs at
most a move, and a check never kills a process.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from holdfast.errors import ProtocolError
from holdfast.runtime.node.notice_forms import Foreseen
from holdfast.runtime.node.notice_sources import output_of
from holdfast.runtime.node.rundir import SHARED_MEMORY

CHECK_S = 30.0
DISK_FREE_BYTES_LEAST = 64 << 20
SHM_FREE_BYTES_LEAST = 4 << 20
KERNEL_LOG = Path("/dev/kmsg")
RECORD_SIZE_BYTES_MAX = 8192
RECORDS_MAX = 10_000  # in one look: endless output of the kernel must not block the agent

_FATAL_XID = frozenset({46, 48, 54, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140})
"""NVIDIA's error codes of the hardware or its firmware. The others are of programs, or repair themselves."""
_XID = re.compile(r"NVRM: Xid \([^)]*\): (\d+)")
_BROKEN = re.compile(
    r"uncorrect(?:ed|able).{0,20}\b(?:ecc|memory|error)|EDAC .*\bUE\b|\bfatal .*machine check"
    r"|critical medium error|\bI/O error, dev (?:nvme|sd|vd)|EXT4-fs error|XFS .*(?:corruption|I/O error)",
    re.IGNORECASE,
)


def broken_by(line: str) -> str:
    """Return the part of a kernel log line that reports broken hardware; empty: none."""
    xid = _XID.search(line)
    if xid is not None:
        return f"Xid {xid[1]}" if int(xid[1]) in _FATAL_XID else ""
    found = _BROKEN.search(line)
    return found[0][:80] if found is not None else ""


class KernelLog:
    """The lines of the kernel log that came since this object was made, if this user may read them."""

    def __init__(self, path: Path = KERNEL_LOG) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError:  # no kernel log, or no permission: no lines
            self._fd = -1

    def lines(self) -> Iterator[str]:
        """Yield the new lines."""
        for _ in range(RECORDS_MAX if self._fd >= 0 else 0):
            try:
                record = os.read(self._fd, RECORD_SIZE_BYTES_MAX)
            except BrokenPipeError:
                continue  # overwritten before it was read: continue with the oldest that is left
            except OSError:
                return
            if not record:
                return
            for line in record.decode("utf-8", "replace").splitlines():
                yield line.partition(";")[2] or line

    def close(self) -> None:
        """Close the log."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class BuiltIn:
    """The checks that every node has.

    Args:
        directories: the directories that need free space.
        log: the kernel log. A report of broken hardware in it counts from then on.
    """

    name, period_s = "health", CHECK_S

    def __init__(self, directories: Iterable[Path], log: KernelLog, shm: Path = SHARED_MEMORY) -> None:
        self._directories = tuple(directories)
        self._log = log
        self._shm = shm
        self._broken: dict[str, None] = {}

    async def look(self) -> list[Foreseen]:
        """Run the checks, and return a notice for each failed one (see ``NoticeSource``)."""
        found = []
        for directory, least_bytes in (
            *((directory, DISK_FREE_BYTES_LEAST) for directory in self._directories),
            (self._shm, SHM_FREE_BYTES_LEAST),
        ):
            if _is_full(directory, least_bytes):
                found.append(Foreseen(f"health: {directory} is full"))
        for line in self._log.lines():
            if what := broken_by(line):
                self._broken.setdefault(what)
        return [*found, *(Foreseen(f"health: kernel log: {what}") for what in self._broken)]


def _is_full(directory: Path, least_bytes: int) -> bool:
    try:
        return shutil.disk_usage(directory).free < least_bytes
    except OSError:
        return False  # missing, or no permission


class HealthCommand:
    """``--health CMD``: any exit code but 0 means that the node is sick.

    Args:
        command: split as a shell does, run without a shell.
        period_s: time between two runs; the first one is at the start.
    """

    name = "health command"

    def __init__(self, command: str, period_s: float) -> None:
        self._words = tuple(shlex.split(command))
        self.period_s = period_s

    async def look(self) -> list[Foreseen]:
        """Run the command, and return a notice if it fails.

        A command that cannot be started, or does not end, raises.
        """
        code, _ = await output_of(self._words)
        if code == 0:
            return []
        if code < 0:
            raise ProtocolError(f"{self._words[0]} was ended by signal {-code}")
        return [Foreseen(f"health: {self._words[0]} ended with {code}")]
