"""Fixtures of the tests of real jobs."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks import statuses
from tests.session.test_jobs import JOB, RANKS, STEPS, Result


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """Return the undisturbed bare run of a layout, started once by the first pytest-xdist worker that asks."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent

    def run(layout: str, ranks: int = RANKS, *more: str) -> Result:
        name = f"bare-{layout}-{ranks}{''.join(more)}"
        result, done = shared / name, shared / f"{name}.done"
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                what = ("--steps", str(STEPS), "--result", str(result), "--bare", "--layout", layout, *more)
                assert statuses(ranks, JOB, *what) == [0] * ranks
                done.touch()
        return Result(0, "", result)

    return run


SLOW_DISK = """
import os, sys, time
if "holdfast.store.write.writer_process" in sys.orig_argv:
    fsync = os.fsync
    def slow(fd):
        time.sleep({delay_s})
        fsync(fd)
    os.fsync = slow
"""


@pytest.fixture
def slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that makes every later fsync of every writer process slower."""

    def slow(delay_s: float) -> None:
        place = tmp_path / "site"
        place.mkdir()
        (place / "sitecustomize.py").write_text(SLOW_DISK.format(delay_s=delay_s))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")]))

    return slow
