"""The health of this node: cheap built-in checks, and a command of the user (``--health``). A sick node is drained.

Theory. A check judges only values that it can read. A value that it cannot read counts as healthy. A sick node gets a
notice without a deadline. Its ranks move if another node has room; otherwise they continue on the sick node. So a false
alarm costs at most a move, and a check never kills a process.
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
RECORDS_MAX = 10_000  # per read: endless output of the kernel must not block the agent

_FATAL_XID = frozenset({46, 48, 54, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140})
"""NVIDIA's error codes (Xid) for broken hardware or firmware. Other codes are errors of programs or are repaired."""
_XID = re.compile(r"NVRM: Xid \([^)]*\): (\d+)")
_BROKEN = re.compile(
    r"uncorrect(?:ed|able).{0,20}\b(?:ecc|memory|error)|EDAC .*\bUE\b|\bfatal .*machine check"
    r"|critical medium error|\bI/O error, dev (?:nvme|sd|vd)|EXT4-fs error|XFS .*(?:corruption|I/O error)",
    re.IGNORECASE,
)


def broken_by(line: str) -> str:
    """Return the text in a kernel log line that reports broken hardware; empty if the line reports none."""
    xid = _XID.search(line)
    if xid is not None:
        return f"Xid {xid[1]}" if int(xid[1]) in _FATAL_XID else ""
    found = _BROKEN.search(line)
    return found[0][:80] if found is not None else ""


class KernelLog:
    """The lines that are added to the kernel log after this object is made. Without read permission there are none."""

    def __init__(self, path: Path = KERNEL_LOG) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError:  # no kernel log, or no permission: no lines
            self._fd = -1

    def lines(self) -> Iterator[str]:
        """Yield the lines that were added since the last call."""
        for _ in range(RECORDS_MAX if self._fd >= 0 else 0):
            try:
                record = os.read(self._fd, RECORD_SIZE_BYTES_MAX)
            except BrokenPipeError:
                continue  # overwritten before it was read: continue with the oldest line that is left
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
    """The health checks that every node has: free space, and the kernel log.

    Args:
        directories: the directories that need free space.
        log: the kernel log. Once the log reports broken hardware, the node counts as sick until the agent ends.
        shm: the directory of shared memory, which needs free space.
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
    """The user's health check ``--health CMD``. An exit code other than 0 means that the node is sick.

    Args:
        command: the command line. It is split as a shell does, and is run without a shell.
        period_s: seconds between two runs. The first run is at the start.
    """

    name = "health command"

    def __init__(self, command: str, period_s: float) -> None:
        self._words = tuple(shlex.split(command))
        self.period_s = period_s

    async def look(self) -> list[Foreseen]:
        """Run the command, and return a notice if its exit code is not 0.

        Raises:
            OSError, ProtocolError: the command cannot be started, takes too long, or is ended by a signal.
        """
        code, _ = await output_of(self._words)
        if code == 0:
            return []
        if code < 0:
            raise ProtocolError(f"{self._words[0]} was ended by signal {-code}")
        return [Foreseen(f"health: {self._words[0]} ended with {code}")]
