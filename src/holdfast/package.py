"""Where the package is installed: frames below this directory are Holdfast's own."""

from __future__ import annotations

from pathlib import Path

# As the interpreter names the files of its frames: a link on the way here is not followed.
DIRECTORY = Path(__file__).parent
