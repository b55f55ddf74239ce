"""Where the package is installed: frames below this directory are Holdfast's own."""

from __future__ import annotations

from pathlib import Path

DIRECTORY = Path(__file__).resolve().parent
