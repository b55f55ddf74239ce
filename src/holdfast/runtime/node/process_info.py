"""Processes by their number, which may be somebody else's by now: what ``/proc`` says of one, and how to kill ours."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path

END_STILL_S = 5.0
"""What a process had is waited for while its end makes progress; one that stands still hangs in a device or a disk."""
END_MOST_S = 60.0
_EXITING = 0x4  # PF_EXITING of the kernel
_TRACKER = b"from multiprocessing.resource_tracker import main"
_ROUNDS_MAX = 5  # of looks at a group, whose members may start others meanwhile
_NO_PROCESS = (errno.ESRCH, errno.EINVAL, errno.ENOENT)  # the number is free, or that of a thread


def alive(pid: int) -> bool:
    """A process with this number exists and is no zombie."""
    fields = _stat(pid)
    return bool(fields) and fields[0] not in ("Z", "X")


def stopped(pid: int) -> bool:
    """A signal has stopped this process; not a debugger."""
    fields = _stat(pid)
    return bool(fields) and fields[0] == "T"


def halted(pid: int) -> bool:
    """A signal, or a debugger, has stopped this process."""
    fields = _stat(pid)
    return bool(fields) and fields[0] in ("T", "t")


def start_ticks(pid: int) -> int:
    """When ``pid`` started, in clock ticks since boot; 0 when it does not exist."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def age_s(pid: int) -> float:
    """How long ago ``pid`` started; 0 when it does not exist."""
    ticks = start_ticks(pid)
    since_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    return max(0.0, since_boot_s - ticks / os.sysconf("SC_CLK_TCK")) if ticks else 0.0


def serves(pid: int, module: str, directory: Path) -> bool:
    """``pid`` was started as this module (``python -m``) for this run directory, by whatever path it was named."""
    words = command(pid)
    if module.encode() not in words:
        return False
    place = os.path.realpath(os.fsencode(directory))
    return any(os.path.realpath(word) == place for word in words if word.startswith(b"/"))


def ending(pid: int) -> int | None:
    """The exit code of a process that has begun to end, below 0 for a signal; None: it has not, or nobody may know.

    0 counts as not told: the kernel shows it to those who may not know the code.
    """
    fields = _stat(pid)
    if not fields or not int(fields[6]) & _EXITING:
        return None
    return os.waitstatus_to_exitcode(int(fields[49])) or None


def left_of(pid: int) -> tuple[int, int, int] | None:
    """Of a process that ends: threads, resident pages, and CPU time in clock ticks; None when it is gone.

    Other numbers than before: its end makes progress. Device memory and page-locked memory may take many seconds.
    """
    fields = _stat(pid)
    return (int(fields[17]), int(fields[21]), int(fields[11]) + int(fields[12])) if fields else None


def await_end(pid: int, still_s: float, most_s: float) -> bool:
    """Block until a process that ends is gone; False: it is not, within these bounds.

    Args:
        still_s: an end without progress for so long is not waited for.
        most_s: bound of the whole.
    """
    fd = pidfd(pid)
    if fd < 0:
        return True
    try:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        deadline_s, before = time.monotonic() + most_s, left_of(pid)
        while (rest_s := deadline_s - time.monotonic()) > 0:
            if poller.poll(1000 * min(still_s, rest_s)):
                return True
            now = left_of(pid)
            if now == before:
                return False
            before = now
        return False
    finally:
        os.close(fd)


def command(pid: int) -> list[bytes]:
    """The words of the command line of ``pid``; empty when there is no such process, or nobody may know."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def started_with(pid: int) -> list[bytes]:
    """The environment of ``pid`` at its start, of a fork that of the process it was forked from; empty as for
    :func:`command`."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def words_at(pid: int) -> tuple[int, int]:
    """First address of the command line in the memory of ``pid``, and the one after its last; equal: not known."""
    fields = _stat(pid)
    return (int(fields[45]), int(fields[46])) if fields else (0, 0)


def pidfd(pid: int) -> int:
    """A descriptor of the process ``pid``, for the caller to close; -1 when there is none.

    Raises:
        OSError: this process has no descriptor left.
    """
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno not in _NO_PROCESS:
            raise
        return -1


def kill_if(pid: int, ours: Callable[[int], bool]) -> bool:
    """SIGKILL ``pid`` if ``ours`` says so of it; True when it got the signal.

    The process is held first: should it end and its number be given to another one, the other one gets nothing.
    """
    fd = pidfd(pid)
    if fd < 0:
        return False
    try:
        if not ours(pid):
            return False
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        return True
    except ProcessLookupError:  # it has ended meanwhile
        return False
    finally:
        os.close(fd)


def kill_group(pid: int) -> None:
    """SIGKILL what is left of the process group that ``pid`` leads.

    Python's resource tracker in it ends by itself when the others have, and removes the semaphores and the shared
    memory that they have left in /dev/shm.
    """
    killed: set[int] = set()  # members until the kernel has taken their memory apart, but they start nothing
    with contextlib.suppress(ProcessLookupError):
        for _ in range(_ROUNDS_MAX):
            os.killpg(pid, 0)
            members = {each for each in _group(pid) if alive(each)}
            trackers = {each for each in members if any(_TRACKER in word for word in command(each))}
            if not trackers:
                break
            others = members - trackers - killed
            if not others:
                return
            for member in others:
                kill_if(member, lambda each: _leader(each) == pid)
            killed |= others
        os.killpg(pid, signal.SIGKILL)


def stopped_children(leaders: Collection[int]) -> dict[int, int]:
    """By leader: a stopped process of its group, other than itself, where there is one. One look for all of them."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and (leader := _leader(pid := int(name))) in leaders and pid != leader:
            if stopped(pid):
                found[leader] = pid
    return found


def _group(leader: int) -> list[int]:
    """Processes of this group."""
    return [pid for name in os.listdir("/proc") if name.isdecimal() and _leader(pid := int(name)) == leader]


def _leader(pid: int) -> int:
    """Group of ``pid``; 0 when there is no such process. One system call: all of /proc is asked, for each death."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def reap_others(child: int) -> None:
    """Wait for the dead children of this process but ``child``, which has somebody who does.

    As the first process of a container the launcher gets the orphans of all others; nobody else takes them away.
    """
    with contextlib.suppress(ChildProcessError):  # there is none
        while (dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if dead.si_pid == child:
                return
            os.waitpid(dead.si_pid, 0)


def ignore_warnings() -> None:
    """Let the launcher and the agent answer what a scheduler says to all processes before the time is over.

    A worker is given the default action back, as under torchrun.
    """
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def heed_warnings() -> None:
    """The default action of these signals again: what a worker and the programs that it starts begin with."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)


def _stat(pid: int) -> list[str]:
    """The fields after the name, which may hold blanks and brackets; empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
