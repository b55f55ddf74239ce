"""Sockets of ``multiprocessing`` in the workers of a run: one directory of the run holds them, and ends with it.

Theory. ``multiprocessing`` makes a directory (``pymp-...``) in the first process that needs one, and removes it when
that process ends in order. A worker of a ``DataLoader`` that is killed, as all are whose rank is killed, leaves it. A
process that knows of a directory makes none, and neither do its children; so each rank is told of the run's.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from multiprocessing import process
from pathlib import Path

from holdfast.runtime.net.stream_sockets import is_private


def sockets_of(pages: Path) -> Path:
    """Of the run whose status pages lie in ``pages``. As long as a name of ``multiprocessing``: a path of a socket has
    107 bytes at most."""
    return Path(tempfile.gettempdir(), f"pymp-{hashlib.sha256(os.fsencode(pages.resolve())).hexdigest()[:8]}")


def use_sockets_of(pages: Path) -> None:
    """From now on ``multiprocessing`` puts its sockets there; nothing where that is impossible: it makes its own."""
    directory = sockets_of(pages)
    settings = getattr(process.current_process(), "_config", None)
    if not isinstance(settings, dict):  # it has another name in this Python
        return
    with contextlib.suppress(OSError):
        directory.mkdir(mode=0o700, exist_ok=True)
        if is_private(directory):
            settings["tempdir"] = str(directory)


def remove_sockets_of(pages: Path) -> None:
    """Remove the socket directory of a run whose processes have all ended."""
    with contextlib.suppress(OSError):
        shutil.rmtree(sockets_of(pages))
