"""Two live runs that save into one checkpoint directory: told once, when the second one begins.

Theory. Each run keeps and prunes the checkpoints of its lineage alone, so the two do not remove each other's. But a
start with ``resume="auto"`` goes on from the newest checkpoint there, whichever run it is of. The first rank of a run
holds a lock on the directory itself for as long as its session is open: nothing is written, and nothing stays when it
is killed. Processes that it has forked (of a data loader) hold it with it until they have ended, so a run that follows
waits a moment before it tells. A process has one session at a time: what one that could not open has left is given up.
A bucket, and a file system without locks, tell nothing.
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
_open: list[SoleUse] = []  # of this process: one at most


class SoleUse:
    """The lock of one session, or of none.

    Args:
        root: where the session saves.
        tells: a run begins. One that goes on may meet what its own lost rank has left.
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
        """Another run may begin."""
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
                'holdfast: another live run saves in %s: a start with resume="auto" goes on from the newest '
                "checkpoint there, of whichever run it is; give each run a directory of its own (--root, "
                "session(checkpoint=...))",
                root,
            )
