"""What the tests of real jobs share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks import statuses
from tests.session.test_jobs import JOB, RANKS, STEPS, Result


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Result]:
    """The undisturbed bare run of a layout, started once."""
    known: dict[str, Result] = {}

    def run(layout: str) -> Result:
        if layout not in known:
            result = tmp_path_factory.mktemp("bare")
            what = ("--steps", str(STEPS), "--result", str(result), "--bare", "--layout", layout)
            assert statuses(RANKS, JOB, *what) == [0] * RANKS
            known[layout] = Result(0, "", result)
        return known[layout]

    return run


SLOW_DISK = """
import os, sys, time
if "holdfast.store.writerd" in sys.orig_argv:
    fsync = os.fsync
    def slow(fd):
        time.sleep({delay_s})
        fsync(fd)
    os.fsync = slow
"""


@pytest.fixture
def slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Every fsync of every writer process takes longer from now on."""

    def slow(delay_s: float) -> None:
        place = tmp_path / "site"
        place.mkdir()
        (place / "sitecustomize.py").write_text(SLOW_DISK.format(delay_s=delay_s))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")]))

    return slow
