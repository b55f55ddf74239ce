"""The directory in which the package is installed: stack frames of files below it are Holdfast's own."""

from __future__ import annotations

from pathlib import Path

# Links are not resolved, because the interpreter does not resolve them in the file names of its frames.
DIRECTORY = Path(__file__).parent
