"""Real text that every machine has: the Python sources of the running interpreter's standard library.

The files are read in the order of their relative paths, so two processes of one interpreter read the same bytes. The
text needs neither files of Holdfast nor the network.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import numpy as np
import numpy.typing as npt

from holdfast.errors import UserError

EXCLUDED = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__", "lib2to3"})


def sources(root: Path) -> list[Path]:
    """Return all ``.py`` files below ``root``, sorted by relative path, without tests and installed packages."""
    found: list[tuple[str, ...]] = []
    for place, directories, files in os.walk(root):
        directories[:] = set(directories) - EXCLUDED  # walk() does not enter the removed directories
        parts = Path(place).relative_to(root).parts
        found += [(*parts, name) for name in files if name.endswith(".py")]
    return [root.joinpath(*parts) for parts in sorted(found)]


def load(size_bytes: int, root: Path | None = None) -> npt.NDArray[np.uint8]:
    """Return the first ``size_bytes`` bytes of the sources as a vector of uint8, shape ``(size_bytes,)``.

    ``root`` is the directory of the sources; None means that of the standard library.

    Raises:
        UserError: the sources have fewer than ``size_bytes`` bytes (a zipped or stripped installation).
    """
    base = root if root is not None else Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sources(base):
        text += path.read_bytes()
        if len(text) >= size_bytes:
            return np.frombuffer(bytes(text[:size_bytes]), dtype=np.uint8)
    raise UserError(
        f"the standard library at {base} has {len(text)} bytes of Python sources, the drill needs {size_bytes}",
        hint="run the drill with an interpreter whose standard library is installed as .py files",
    )
