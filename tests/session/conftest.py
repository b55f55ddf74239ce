"""What the tests of real jobs share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.session.test_jobs import Result, start


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Result]:
    """The undisturbed bare run of a layout, started once."""
    known: dict[str, Result] = {}

    def run(layout: str) -> Result:
        if layout not in known:
            known[layout] = start("torchrun", tmp_path_factory.mktemp("bare"), "--bare", "--layout", layout)
            assert known[layout].code == 0, known[layout].output
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
