"""What members that are gone leave in shared memory: their pages, and the files of their stacks.

They are read after a death, by this agent and by a successor that has to report the death again, until the recovery
that replaced the member is over. Left for longer they fill a small ``/dev/shm`` with a job that is restarted often. So
they stay for one more recovery, and are removed when the next one has ended.

Where launcher and agent are killed together nobody is left to remove the directory of the run: the next run on this
machine does.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from holdfast.core.ids import NO_GENERATION, Generation, MemberId
from holdfast.runtime.agent.worker_processes import processes
from holdfast.runtime.net.multiprocessing_sockets import remove_sockets_of
from holdfast.runtime.node.hang_evidence import stacks_path
from holdfast.runtime.node.rundir import OWNER, PAGES_PREFIX, SHARED_MEMORY, RunDir, empty_out, is_free

YOUNG_S = 60.0  # a directory that was just made may not be held yet


class ShmCleanup:
    """Those of one node."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._generation = NO_GENERATION
        self._newer: set[MemberId] = set()
        self._older: set[MemberId] = set()

    def add(self, member_id: MemberId) -> None:
        """This member has exited."""
        self._newer.add(member_id)

    def clear(self, generation: Generation) -> None:
        """The job goes on in ``generation``: remove what the recovery before this one has left. It may be repeated."""
        if generation <= self._generation:
            return
        self._generation = generation
        for member_id in self._older:
            self._run.page_path(member_id).unlink(missing_ok=True)
            stacks_path(self._run, member_id).unlink(missing_ok=True)
        self._older, self._newer = self._newer, set()


def remove_forgotten() -> list[Path]:
    """Remove what runs of this user whose processes were all killed have left in shared memory; returns the places."""
    removed = []
    for directory in SHARED_MEMORY.glob(f"{PAGES_PREFIX}*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or of another kind
            if _is_forgotten(directory):
                remove_sockets_of(directory)
                empty_out(directory)
                removed.append(directory)
    return removed


def _is_forgotten(directory: Path) -> bool:
    """Nobody holds it, and no worker that is still saving belongs to its run."""
    about = directory.lstat()
    if (
        about.st_uid != os.getuid()
        or time.time() - about.st_mtime < YOUNG_S
        or not (directory / OWNER).is_file()
    ):
        return False
    return is_free(directory / OWNER) and not any(processes(RunDir((directory / OWNER).read_text())))
