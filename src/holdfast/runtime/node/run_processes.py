"""The processes of a run on this host, found by the run directory that their environment names."""

from __future__ import annotations

import os
from collections.abc import Iterator

from holdfast.core.ids import MemberId
from holdfast.core.protocol.status_page import Word
from holdfast.runtime.node.process_info import command, kill_if, started_with
from holdfast.runtime.node.rundir import PAGE, RunDir
from holdfast.runtime.node.status_page import each_page

WRITER_MODULE = b"holdfast.store.write.writer_process"


def recorded_members(run: RunDir) -> list[tuple[MemberId, int]]:
    """Return (member, pid) of every status page, dead members included. A pid of 0 means that the member never ran."""
    return [(MemberId(page[Word.MEMBER]), page[Word.PID]) for page in each_page(run.pages(), PAGE)]


def belongs(pid: int, run: RunDir) -> bool:
    """Return True if ``pid`` is a process of this run (a pid may have been reused since it was recorded)."""
    wanted = f"HOLDFAST_RUN_DIR={run.path}".encode()
    return wanted in started_with(pid)


def kill_ours(pid: int, run: RunDir) -> bool:
    """Send SIGKILL to process ``pid`` if it belongs to this run. Return True if the signal was sent."""
    return kill_if(pid, lambda pid: belongs(pid, run))


def processes(run: RunDir) -> Iterator[int]:
    """Return an iterator over the pids of all processes whose environment names this run's directory."""
    return (int(entry) for entry in os.listdir("/proc") if entry.isdigit() and belongs(int(entry), run))


def writers(run: RunDir) -> list[int]:
    """Return the pids of this run's writers (processes that write saves), including those of dead workers."""
    return [pid for pid in processes(run) if WRITER_MODULE in command(pid)]


def sweep(run: RunDir) -> list[int]:
    """Send SIGKILL to all processes of this run except this one, and return their pids."""
    others = (pid for pid in processes(run) if pid != os.getpid())
    return [pid for pid in others if kill_ours(pid, run)]
