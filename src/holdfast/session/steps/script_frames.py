"""The script's own stack frames, and the variables in them."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from types import FrameType

from holdfast.package import DIRECTORY

_OURS = str(DIRECTORY) + os.sep
_LIBRARIES = tuple(
    {
        path + os.sep
        for name, path in sysconfig.get_paths().items()
        if name in ("stdlib", "purelib", "platlib")
    }
)


def place_in_script() -> str:
    """Return file and line of the script that is executed now: ``train.py:31``."""
    frame = frame_of_script()
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def frame_of_script() -> FrameType:
    """Return the innermost stack frame outside of Holdfast."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame


def variables_of_script() -> dict[str, object]:
    """Return the variables of all stack frames outside of Holdfast, and the global variables of the script's modules.

    Of variables with the same name the innermost is returned under that name. The others have their file before it.
    """
    found: dict[str, object] = {}
    for file, variables in _scopes():
        for name, value in variables.items():
            if not name.startswith("__") and found.setdefault(name, value) is not value:
                found.setdefault(f"{os.path.basename(file)}:{name}", value)
    return found


def _scopes() -> Iterator[tuple[str, dict[str, object]]]:
    frame: FrameType | None = frame_of_script()
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_OURS):
            yield file, dict(frame.f_locals)
            if not file.startswith(_LIBRARIES):
                yield file, dict(frame.f_globals)
        frame = frame.f_back
