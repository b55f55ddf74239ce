"""The directory for the sockets of ``multiprocessing`` in the workers of a run. It is removed when the run ends.

Theory. ``multiprocessing`` makes a directory (``pymp-...``) in the first process that needs one. It removes the
directory when that process exits normally. A killed ``DataLoader`` worker leaves its directory, and the ``DataLoader``
workers of a killed rank are also killed. A process in which a directory is already set makes none, and its children
make none. Each rank therefore sets the directory of the run.
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
    """Return the socket directory of the run whose status pages are in the directory ``pages``.

    The name has the same length as a name that ``multiprocessing`` would choose, because the path of a socket has at
    most 107 bytes.
    """
    return Path(tempfile.gettempdir(), f"pymp-{hashlib.sha256(os.fsencode(pages.resolve())).hexdigest()[:8]}")


def use_sockets_of(pages: Path) -> None:
    """Make ``multiprocessing`` put its sockets in the socket directory of the run.

    If that is not possible, ``multiprocessing`` makes its own directory as usual.
    """
    directory = sockets_of(pages)
    settings = getattr(process.current_process(), "_config", None)
    if not isinstance(settings, dict):  # this version of Python names the private attribute differently
        return
    with contextlib.suppress(OSError):
        directory.mkdir(mode=0o700, exist_ok=True)
        if is_private(directory):
            settings["tempdir"] = str(directory)


def remove_sockets_of(pages: Path) -> None:
    """Remove the socket directory of a run whose processes have all ended."""
    with contextlib.suppress(OSError):
        shutil.rmtree(sockets_of(pages))
