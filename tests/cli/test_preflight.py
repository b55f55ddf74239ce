"""A start that cannot succeed is refused with 2 before the first worker.

Earlier it was tried 17 times and ended with 74.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import msgspec
import pytest

from holdfast.cli.start import preflight
from holdfast.core.protocol.status_page import FILE_SIZE_BYTES
from holdfast.errors import UsageError
from holdfast.exit_codes import Exit
from holdfast.runtime.node.run_settings import RunSettings
from tests.cli.command import Run


@pytest.mark.parametrize("wrong", ["nonexistent", "directory", "no python"])
def test_a_wrong_interpreter(holdfast: Run, tmp_path: Path, wrong: str) -> None:
    python = {"nonexistent": tmp_path / "gone", "directory": tmp_path, "no python": Path("/bin/false")}[wrong]
    (tmp_path / "train.py").write_text("")
    done = holdfast("run", str(tmp_path / "train.py"), env={"PYTHON_EXEC": str(python)})
    assert done.returncode == Exit.USAGE, done.stderr
    assert f"PYTHON_EXEC={python} cannot" in done.stderr and "leave PYTHON_EXEC out" in done.stderr
    assert not list(tmp_path.glob("runs/*")), "nothing was begun"


def test_an_interpreter_that_has_holdfast(tmp_path: Path) -> None:
    settings = RunSettings(run_id="t", nproc=1, target="train.py", python=sys.executable)
    preflight.require_start(settings)


def test_an_interpreter_without_what_encrypts(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'import sys; sys.modules[\"cryptography\"] = None; "
                      "exec(sys.argv[2])' \"$@\"\n")  # fmt: skip
    python.chmod(0o755)
    settings = RunSettings(run_id="t", nproc=1, target="train.py", python=str(python))
    preflight.require_start(settings)
    with pytest.raises(UsageError, match=r"cannot run a worker: .*needs the package cryptography"):
        preflight.require_start(msgspec.structs.replace(settings, encrypts=True))


def test_too_little_shared_memory(tiny_disk: Path) -> None:
    fits = (1 << 20) // FILE_SIZE_BYTES
    assert preflight.no_room_for_pages(fits, tiny_disk) == ""
    assert "1024 KiB free" in preflight.no_room_for_pages(fits + 1, tiny_disk)
    assert preflight.no_room_for_pages(10_000, tiny_disk / "absent") == "", (
        "pages are in the run directory then"
    )


def test_too_few_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(preflight, "threads_of", lambda user: 3)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (12, 12))
    assert (
        "may have 12 processes and threads, has 3, and the run takes 12 more" in preflight.no_processes_for(2)
    )
    with pytest.raises(UsageError, match="12 processes"):
        preflight.require_start(RunSettings(run_id="t", nproc=2, target="train.py"))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (15, 15))
    assert preflight.no_processes_for(2) == ""


def test_the_threads_of_this_user_are_counted() -> None:
    assert preflight.threads_of(os.getuid()) >= 1
