"""The private directory of this user with the files by which the processes of one job find each other."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from holdfast.errors import AuthError
from holdfast.runtime.node.file_owners import doubt


def pointer_directory() -> Path:
    """Return the directory, and make it if there is none. Raises: AuthError: other users can write to it."""
    directory = Path(tempfile.gettempdir()) / f"holdfast-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    check_owner(directory)
    return directory


def check_owner(path: Path) -> None:
    """Check that no other user may have made ``path``: such a path could lead this process to a foreign agent.

    Raises: AuthError.
    """
    why = doubt(path)
    if why:
        raise AuthError(
            f"{path} {why}: the agent it names is not trusted", hint="start in a directory of your own"
        )
