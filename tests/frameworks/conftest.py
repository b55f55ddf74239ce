"""Each folder here is a framework with an environment of its own: ``scripts/frameworks`` builds it and runs the tests.

Elsewhere (``make test``) the folders are left out, because what they need is not installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
HOME = Path(sys.prefix).name

# `.venv-NAME` is the environment of NAME.
collect_ignore = [
    folder.name for folder in HERE.iterdir() if folder.is_dir() and HOME != f".venv-{folder.name}"
]
