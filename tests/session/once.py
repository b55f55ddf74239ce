"""Actions that a job does once per run, in the first of its processes that reaches them."""

from __future__ import annotations

from pathlib import Path


def first(marker: Path) -> bool:
    """Return True once per run."""
    if marker.exists():
        return False
    marker.write_text("")
    return True
