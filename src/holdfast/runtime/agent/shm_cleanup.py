"""The removal of shared-memory files of dead members: their status pages and the files of their stacks.

The agent reads these files after a death. A successor agent may have to report the death again until the recovery from
that death is over. The files are therefore kept until one more recovery has followed. Then they are removed, because
otherwise a job with many restarts would fill a small ``/dev/shm``.

If launcher and agent are killed together, no process is left to remove the shared memory of the run. The next run on
this host removes it.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from holdfast.core.ids import NO_GENERATION, Generation, MemberId
from holdfast.runtime.net.multiprocessing_sockets import remove_sockets_of
from holdfast.runtime.node.run_processes import processes
from holdfast.runtime.node.rundir import OWNER, PAGES_PREFIX, SHARED_MEMORY, RunDir, empty_out, is_free
from holdfast.runtime.node.stack_texts import stacks_path

YOUNG_S = 60.0  # a younger directory may not be locked by its owner yet


class ShmCleanup:
    """The list of dead members of one node whose shared-memory files are still to be removed."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._generation = NO_GENERATION
        self._newer: set[MemberId] = set()
        self._older: set[MemberId] = set()

    def add(self, member_id: MemberId) -> None:
        """Note that a member has exited and that its files have to be removed later."""
        self._newer.add(member_id)

    def clear(self, generation: Generation) -> None:
        """Remove the files of members that had exited before the previous call.

        That call was for an earlier generation. A repeated call for one generation does nothing.
        """
        if generation <= self._generation:
            return
        self._generation = generation
        for member_id in self._older:
            self._run.page_path(member_id).unlink(missing_ok=True)
            stacks_path(self._run, member_id).unlink(missing_ok=True)
        self._older, self._newer = self._newer, set()


def remove_forgotten() -> list[Path]:
    """Remove the shared memory of this user's runs that have no process left. Return the removed directories."""
    removed = []
    for directory in SHARED_MEMORY.glob(f"{PAGES_PREFIX}*"):
        with contextlib.suppress(OSError):  # removed in the meantime, or of another kind
            if _is_forgotten(directory):
                remove_sockets_of(directory)
                empty_out(directory)
                removed.append(directory)
    return removed


def _is_forgotten(directory: Path) -> bool:
    """Return True if a shared-memory directory is this user's and not new, and no process of its run is left."""
    about = directory.lstat()
    if (
        about.st_uid != os.getuid()
        or time.time() - about.st_mtime < YOUNG_S
        or not (directory / OWNER).is_file()
    ):
        return False
    return is_free(directory / OWNER) and not any(processes(RunDir((directory / OWNER).read_text())))
