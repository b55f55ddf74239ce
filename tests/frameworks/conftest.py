"""Each folder here is a framework with its own environment: ``scripts/frameworks`` builds it and runs the tests.

``make test`` skips the folders whose packages are not installed.
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
