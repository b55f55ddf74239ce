"""A lock that detects two live runs which save into one checkpoint directory; the second run warns when it begins.

Theory. Each run keeps and prunes only the checkpoints of its lineage, so two runs do not remove each other's
checkpoints. But a start with ``resume="auto"`` continues from the newest checkpoint in the directory, of either run.
Rank 0 of a run holds a lock (``flock``) on the directory itself while its session is open. The lock writes no file, and
ends when the process is killed. Forked processes (workers of a data loader) hold the lock until they end, so a new run
waits for ``WAIT_S`` before it warns. A process has one session at a time, so a new session releases the lock of a
session that could not open. In a bucket, and on a file system without locks, there is no warning.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from pathlib import Path

from holdfast.store.backends.location import Place

log = logging.getLogger("holdfast")

WAIT_S, POLL_S = 2.0, 0.05
_open: list[SoleUse] = []  # the lock of this process: one at most


class SoleUse:
    """The lock of one session on its checkpoint directory, or no lock.

    Args:
        root: directory or URL of the session's checkpoints. None, or a URL: no lock is taken.
        tells: warn if another process holds the lock. False in a restarted process: the lost process of this rank may
            still hold the lock.
    """

    def __init__(self, root: Place | None = None, *, tells: bool = False) -> None:
        self._fd = -1
        while _open and root is not None:
            _open[0].close()
        if isinstance(root, Path):
            with contextlib.suppress(OSError):
                self._fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                _open.append(self)
                self._take(root, tells)

    def close(self) -> None:
        """Release the lock."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            _open.remove(self)
            os.close(fd)

    def _take(self, root: Path, tells: bool) -> None:
        until_s = time.monotonic() + (WAIT_S if tells else 0.0)
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= until_s:
                    break
            time.sleep(POLL_S)
        if tells:
            log.warning(
                'holdfast: another live run saves in %s: a start with resume="auto" continues from the newest '
                "checkpoint there, which may be of the other run; give each run a directory of its own (--root, "
                "session(checkpoint=...))",
                root,
            )
