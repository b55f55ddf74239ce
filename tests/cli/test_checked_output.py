"""An output that cannot be written: one line, its own exit code, and no report of a defect in Holdfast."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from holdfast.exit_codes import Exit
from tests.cli.command import HOLDFAST, clean_environment
from tests.store.worlds import pipeline, save, save_id

COMMANDS = [["ckpt", "ls", "c"], ["ckpt", "show", "c", "--json"], ["ckpt", "verify", "c"], ["--help"],
            ["ckpt", "prune", "c", "--keep", "1", "--dry-run"]]  # fmt: skip


@pytest.fixture(autouse=True)
def checkpoints(tmp_path: Path) -> None:
    for step in (5, 10):
        save(tmp_path / "c", pipeline(edge=8), save_id(step))


def ended(tmp_path: Path, line: str, unbuffered: str) -> subprocess.CompletedProcess[str]:
    """Run a shell line to its end. ``$H`` is the command."""
    environment = clean_environment({"H": HOLDFAST, "PYTHONUNBUFFERED": unbuffered})
    return subprocess.run(["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True,
                          timeout=60, check=False)  # fmt: skip


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_full_or_closed_output(tmp_path: Path, command: list[str], unbuffered: str) -> None:
    line = "$H " + " ".join(command)
    full = ended(tmp_path, f"{line} > /dev/full", unbuffered)
    assert full.returncode == Exit.BAD_INPUT
    assert full.stderr.splitlines() == [
        "error: cannot write the output: No space left on device",
        "  next: send it elsewhere, or free some space",
    ]
    # The pipe is closed before anything is written to it.
    closed = ended(tmp_path, f"{{ sleep 0.2; {line}; echo $? > code; }} | true", unbuffered)
    assert (tmp_path / "code").read_text() == f"{int(Exit.PIPE)}\n" and not closed.stderr


def test_what_is_read_is_whole_and_an_error_keeps_its_code(tmp_path: Path) -> None:
    assert len(ended(tmp_path, "$H ckpt ls c | cat", "").stdout.splitlines()) == 3
    assert ended(tmp_path, "$H ckpt ls nope 2> /dev/full", "").returncode == Exit.USAGE
    assert ended(tmp_path, "$H ckpt ls c >&- 2>&-", "").returncode == Exit.OK
    assert ended(tmp_path, "$H ckpt ls c > /dev/full 2>&1", "").returncode == Exit.BAD_INPUT
