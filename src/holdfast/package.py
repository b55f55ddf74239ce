"""The directory in which Holdfast is installed.

Stack frames of files below it belong to Holdfast, not to the script.
"""

from __future__ import annotations

from pathlib import Path

# Links are not resolved, because the interpreter does not resolve them in the file names of its frames.
DIRECTORY = Path(__file__).parent
