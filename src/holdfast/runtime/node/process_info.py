"""Functions about a process with a given pid: reads of ``/proc``, and kills that are safe if the pid was reused."""

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
"""Seconds without progress after which an exiting process is no longer waited for: it is stuck in a device or disk."""
END_MOST_S = 60.0
_EXITING = 0x4  # PF_EXITING of the kernel
_TRACKER = b"from multiprocessing.resource_tracker import main"
_ROUNDS_MAX = 5  # reads of a process group, whose members may start others in the meantime
_NO_PROCESS = (errno.ESRCH, errno.EINVAL, errno.ENOENT)  # the pid is free, or belongs to a thread


def alive(pid: int) -> bool:
    """Return True if a process with this pid exists and is not a zombie.

    Raises:
        OSError: /proc cannot be read, because no file descriptor is left.
    """
    fields = _stat(pid)
    return bool(fields) and fields[0] not in ("Z", "X")


def stopped(pid: int) -> bool:
    """Return True if a signal has stopped process ``pid``. A stop by a debugger does not count."""
    fields = _known_stat(pid)
    return bool(fields) and fields[0] == "T"


def halted(pid: int) -> bool:
    """Return True if a signal or a debugger has stopped process ``pid``."""
    fields = _known_stat(pid)
    return bool(fields) and fields[0] in ("T", "t")


def start_ticks(pid: int) -> int:
    """Return the start time of process ``pid``, in clock ticks since boot; 0 if there is no such process.

    Raises:
        OSError: /proc cannot be read, because no file descriptor is left.
    """
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def age_s(pid: int) -> float:
    """Return the seconds since the start of process ``pid``; 0 if there is no such process."""
    fields = _known_stat(pid)
    ticks = int(fields[19]) if fields else 0
    since_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    return max(0.0, since_boot_s - ticks / os.sysconf("SC_CLK_TCK")) if ticks else 0.0


def serves(pid: int, module: str, directory: Path) -> bool:
    """Return True if process ``pid`` was started as ``python -m module`` with the run directory ``directory``.

    The command line may have any path of the directory, such as a path with links.
    """
    words = command(pid)
    if module.encode() not in words:
        return False
    place = os.path.realpath(os.fsencode(directory))
    return any(os.path.realpath(word) == place for word in words if word.startswith(b"/"))


def ending(pid: int) -> int | None:
    """Return the exit code of a process that has begun to exit, negative for a signal; None if not known.

    The code 0 also gives None, because the kernel shows 0 to a process without the permission to read the code.
    """
    fields = _known_stat(pid)
    if not fields or not int(fields[6]) & _EXITING:
        return None
    return os.waitstatus_to_exitcode(int(fields[49])) or None


def left_of(pid: int) -> tuple[int, int, int] | None:
    """Return the threads, resident pages and CPU ticks of an exiting process; None if it is gone.

    If the numbers change, the exit makes progress. To free device memory or page-locked memory may take many seconds.
    """
    fields = _known_stat(pid)
    return (int(fields[17]), int(fields[21]), int(fields[11]) + int(fields[12])) if fields else None


def await_end(pid: int, still_s: float, most_s: float) -> bool:
    """Block until an exiting process is gone. Return False if the wait ends before the process is gone.

    Args:
        still_s: the wait ends after this many seconds without progress of the exit.
        most_s: the wait ends after this many seconds in any case.
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
    """Return the words of the command line of process ``pid``; empty if it does not exist or is not readable."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def started_with(pid: int) -> list[bytes]:
    """Return the environment of process ``pid`` at its start, as ``NAME=VALUE`` entries.

    A forked process has the entries of the process from which it was forked. The list is empty if the process does not
    exist or is not readable.
    """
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def words_at(pid: int) -> tuple[int, int]:
    """Return the start and end address of the command line in the memory of process ``pid``; (0, 0) if unknown."""
    fields = _known_stat(pid)
    return (int(fields[45]), int(fields[46])) if fields else (0, 0)


def pidfd(pid: int) -> int:
    """Return a pidfd of the process ``pid``, which the caller closes; -1 if there is no such process.

    Raises:
        OSError: this process has no file descriptor left.
    """
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno not in _NO_PROCESS:
            raise
        return -1


def kill_if(pid: int, ours: Callable[[int], bool]) -> bool:
    """Send SIGKILL to process ``pid`` if ``ours(pid)`` is true. Return True if the signal was sent.

    A pidfd is opened before the test. So if the process ends and its pid is reused, the new process gets no signal.
    """
    fd = pidfd(pid)
    if fd < 0:
        return False
    try:
        if not ours(pid):
            return False
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        return True
    except ProcessLookupError:  # it has ended in the meantime
        return False
    finally:
        os.close(fd)


def kill_group(pid: int) -> None:
    """Send SIGKILL to the remaining processes of the process group that ``pid`` leads.

    Python's resource tracker in the group is spared. It ends on its own after the other processes, and removes the
    semaphores and the shared memory that these processes have left in /dev/shm.
    """
    killed: set[int] = set()  # still members until the kernel has freed their memory, but they start nothing
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
    """Return one stopped process of each process group, except the leader, as a dict from leader to pid.

    A leader whose group has no such process is left out. All of /proc is read once.
    """
    found = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and (leader := _leader(pid := int(name))) in leaders and pid != leader:
            if stopped(pid):
                found[leader] = pid
    return found


def _group(leader: int) -> list[int]:
    """Return the pids of the process group that ``leader`` leads."""
    return [pid for name in os.listdir("/proc") if name.isdecimal() and _leader(pid := int(name)) == leader]


def _leader(pid: int) -> int:
    """Return the process group of ``pid``; 0 if there is no such process.

    The function makes only one system call, because it is called for every process in /proc after each death of a
    worker.
    """
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def reap_others(child: int) -> None:
    """Reap the dead children of this process except ``child``, which other code waits for.

    As the first process of a container the launcher is the parent of all orphans, and no other process can reap them.
    """
    with contextlib.suppress(ChildProcessError):  # no children
        while (dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if dead.si_pid == child:
                return
            os.waitpid(dead.si_pid, 0)


def ignore_warnings() -> None:
    """Ignore SIGUSR1 and SIGUSR2, which a scheduler sends to all processes of a job before its time limit.

    The launcher and the agent handle these signals. A worker gets the default action back, as under torchrun.
    """
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def heed_warnings() -> None:
    """Restore the default action of SIGUSR1 and SIGUSR2, for a worker and its child processes."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)


def _stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` after the process name; empty if there is no such process.

    The name may contain blanks and brackets.

    Raises:
        OSError: the file of a process cannot be read.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError as error:
        if error.errno not in _NO_PROCESS:
            raise
        return []


def _known_stat(pid: int) -> list[str]:
    """Return the result of :func:`_stat`; empty also if the file cannot be read."""
    try:
        return _stat(pid)
    except OSError:
        return []
