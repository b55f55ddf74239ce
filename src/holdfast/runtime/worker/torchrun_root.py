"""The place where a job has saved, for the next start of its ranks by the same torchrun.

After a fault torchrun starts all ranks again, and they start a new agent. That agent knows nothing of the start before.
If the script names another directory in each start, by a time stamp, the ranks would begin at step 0. So local rank 0
notes its place in a file of the private directory of this user. The file is named after the process of torchrun (pid
and start time), so no other job reads it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from holdfast.runtime.node.process_info import start_ticks
from holdfast.runtime.node.rundir import write_private
from holdfast.runtime.worker.pointer_directory import pointer_directory

_PREFIX = "torchrun-"
_SIZE_BYTES_MAX = 65536


def root_before() -> str:
    """Return where the ranks of the start before have saved; empty if this is the first start, or if it is not known.

    Raises:
        AuthError: other users can write to the directory of the file.
    """
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return ""
    try:
        with _file().open("rb") as file:
            return file.read(_SIZE_BYTES_MAX).decode()
    except (OSError, UnicodeDecodeError):
        return ""


def note_root(root: str) -> None:
    """Note the place where this job saves, if torchrun has started this process. Remove the files of ended processes.

    Raises:
        AuthError: other users can write to the directory of the file.
        OSError: the file cannot be written.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    mine = _file()
    write_private(mine, root.encode())
    for path in mine.parent.glob(f"{_PREFIX}*"):
        pid, _, started = path.name.removeprefix(_PREFIX).partition("-")
        with suppress(OSError, ValueError):
            if start_ticks(int(pid)) != int(started):
                path.unlink()


def _file() -> Path:
    launcher = os.getppid()
    return pointer_directory() / f"{_PREFIX}{launcher}-{start_ticks(launcher)}"
