"""What a job does once in its run, whichever of its processes comes first."""

from __future__ import annotations

from pathlib import Path


def first(marker: Path) -> bool:
    """True once per run."""
    if marker.exists():
        return False
    marker.write_text("")
    return True
