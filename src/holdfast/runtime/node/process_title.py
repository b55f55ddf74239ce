"""The name that ``ps``, ``top`` and ``nvidia-smi`` show for a worker: the script and the rank.

Without this name these programs would show a forked worker as the zygote, and any other worker as a module of Holdfast.
The title is written over the words of the command line in memory. ``ROOM``, a last word of the command line that
consists of blanks, reserves memory for the title.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

from holdfast.runtime.node.process_info import words_at

ROOM = " " * 512
"""The last word on the command line of a process that sets its title."""
_NAME_SIZE_MAX = 15


def title(script: str, rank: int | None, arguments: Sequence[str] = ()) -> str:
    """Return a title such as ``train.py [rank 1] --epochs 3``. The rank None means a spare."""
    place = "spare" if rank is None else f"rank {rank}"
    return " ".join([script, f"[{place}]", *arguments])


def set_title(script: str, rank: int | None, arguments: Sequence[str] = ()) -> None:
    """Make the system show this process as ``script`` and ``rank``. The rank None means a spare."""
    words = os.fsencode(title(script, rank, arguments))
    start, end = words_at(os.getpid())
    size_bytes = end - start
    if size_bytes > 2:
        ctypes.memset(start, 0, size_bytes)
        ctypes.memmove(start, words, min(len(words), size_bytes - 2))
        ctypes.memset(end - 1, ord(" "), 1)  # the kernel then shows the text before the first zero byte
    suffix = os.fsencode(":s" if rank is None else f":{rank}")
    name = os.fsencode(Path(script).name)[: _NAME_SIZE_MAX - len(suffix)] + suffix
    with contextlib.suppress(OSError):  # /proc may be read-only: the title above is set
        Path("/proc/self/comm").write_bytes(name)
