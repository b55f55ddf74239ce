"""Order of the whole suite, forked zygotes, a small heap and stack, the same logger for each test, and a tiny disk."""

from __future__ import annotations

import gc
import inspect
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from itertools import takewhile
from pathlib import Path
from types import FrameType, SimpleNamespace

import pytest

from holdfast.runtime.worker import script_frames
from tests.zygotes.server import forked_zygotes

MODULES_FEW = 100
_frozen = SimpleNamespace(file="", modules=-MODULES_FEW)
"""The file of the last test, and the number of modules when the heap was last frozen."""
OTHER_ENVIRONMENTS = frozenset({"frameworks", "gpu"})
"""Directories of tests that start each zygote as users do."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort files with many jobs of processes first, so that one pytest worker does not run them alone at the end."""
    jobs = Counter(item.path for item in items if item.get_closest_marker("processes") is not None)
    items.sort(key=lambda item: (not jobs[item.path], item.path.parent.name != "drill", -jobs[item.path]))


def pytest_runtest_logstart(nodeid: str) -> None:
    """Take the modules out of each later collection of garbage and search of the heap: half a second each.

    This happens between two files, if the tests since then have imported more: their objects stay in the search.
    """
    file = nodeid.partition("::")[0]
    if file != _frozen.file and len(sys.modules) > _frozen.modules + MODULES_FEW:
        gc.collect()
        gc.freeze()
        _frozen.modules = len(sys.modules)
    _frozen.file = file


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Leave pytest out of a script in this process, its frames and fixtures: they hold a million objects."""
    frames, scopes = script_frames.frames_outside, script_frames._scopes
    end = inspect.getfile(pytest.Function)

    def frames_of_test(directories: tuple[str, ...]) -> Iterator[FrameType]:
        return takewhile(lambda frame: frame.f_code.co_filename != end, frames(directories))

    def scopes_of_test() -> Iterator[tuple[str, dict[str, object]]]:
        for file, variables in scopes():
            yield (
                file,
                {k: v for k, v in variables.items() if not type(v).__module__.startswith("_pytest")},
            )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script_frames, "frames_outside", frames_of_test)
        patch.setattr(script_frames, "_scopes", scopes_of_test)
        patch.setattr(script_frames, "_OUTSIDE", {})  # another test has other objects of the same names
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Fork the zygotes of the test's jobs, and of its fixtures', from one process that has imported torch."""
    forks = (
        item.get_closest_marker("processes") is not None
        and item.get_closest_marker("executes_zygotes") is None
        and OTHER_ENVIRONMENTS.isdisjoint(item.path.parts)
    )
    with forked_zygotes() if forks else nullcontext():
        return (yield)


@pytest.fixture(autouse=True)
def logger_of_before() -> Iterator[None]:
    """Restore the logger after each test: a session adds handlers or filters, which the next test must not see."""
    log = logging.getLogger("holdfast")
    filters, handlers, level, propagate = list(log.filters), list(log.handlers), log.level, log.propagate
    yield
    log.filters[:], log.handlers[:], log.propagate = filters, handlers, propagate
    log.setLevel(level)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not allowed here; tests of the file size limit cover the same path")
    yield place
    subprocess.run(["umount", str(place)], check=True)
