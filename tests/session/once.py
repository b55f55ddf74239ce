"""Actions that a job does once per run, and places of its script to which its ranks come."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.runtime.runs import until


def first(marker: Path) -> bool:
    """Return True once per run."""
    if marker.exists():
        return False
    marker.write_text("")
    return True


def come_to(place: str, rank: int) -> None:
    """Record that this rank has come to a place of the script."""
    Path(f"{place}-{rank}").touch()


def await_ranks(place: str, ranks: Iterable[int]) -> None:
    """Wait until ranks have come to a place of the script: the answer to a fault may depend on their places."""
    until(f"ranks come to {place}", lambda: all(Path(f"{place}-{rank}").exists() for rank in ranks))
