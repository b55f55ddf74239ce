"""The examples keep their promises: they are short, and differ in a few lines from a script without Holdfast."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from holdfast.store.manage.checkpoint_root import Root

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LINES_MAX = 80
ADDED_MAX = 5
MARK = "# + Holdfast"


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short_and_adds_little(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) < LINES_MAX
    assert "\nHoldfast adds: " in "\n".join(lines[:12])
    added = [line for line in lines if MARK in line]
    assert 1 <= len(added) <= ADDED_MAX, f"{path.name} adds {len(added)} lines"
    unmarked = [line for line in lines[1:] if "holdfast" in line and MARK not in line and not is_prose(line)]
    assert not unmarked, f"{path.name}: lines that Holdfast adds end with {MARK!r}: {unmarked}"


def is_prose(line: str) -> bool:
    """Return whether a line of the docstring is a command or a list of what Holdfast adds."""
    return line.startswith(("    holdfast ", "    pip ", "Holdfast adds: "))


def start(where: Path, *arguments: str) -> str:
    """Run a ``holdfast`` command that succeeds. Return its output."""
    command = [str(Path(sys.executable).parent / "holdfast"), *arguments]
    done = subprocess.run(
        command, cwd=where, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def run(where: Path, name: str, *arguments: str, ranks: int = 4) -> str:
    """Run an example. Return its output."""
    where.mkdir(exist_ok=True)
    return start(where, "run", "--nproc-per-node", str(ranks), str(ROOT / "examples" / name), *arguments)


@pytest.mark.torch
@pytest.mark.processes
def test_gpt_loses_a_worker_and_no_step(tmp_path: Path) -> None:
    output = run(tmp_path, "gpt_last_gasp.py", "--steps", "8", "--lose", "2@5")
    assert "killed by signal 9 (SIGKILL), in backward of step 5" in output
    assert "1 fault, 0 steps lost" in output
    (root,) = tmp_path.glob("runs/*/checkpoints")
    saved = {(v.step, v.save_id.kind) for v in Root(root).list() if v.save_id is not None and v.valid}
    assert saved - {(5, "last-gasp")} == {
        (8, "final")
    }  # survivors that give their state in place save nothing
    seen = [int(number) for number in re.findall(r"^step (\d+) loss", output, re.M)]
    assert seen == list(range(1, 9))  # each step is committed once


@pytest.mark.torch
@pytest.mark.processes
def test_lost_shards_come_from_their_replicas(tmp_path: Path) -> None:
    undisturbed = run(tmp_path / "a", "redundant_shards.py", "--steps", "9", "--lose", "-1")
    disturbed = run(tmp_path / "b", "redundant_shards.py", "--steps", "9", "--lose", "0")
    assert "rank 0: was killed by signal 9" in disturbed
    losses = [re.findall(r"^step 9 loss (\S+)", text, re.M) for text in (undisturbed, disturbed)]
    assert losses[0] == losses[1] and len(losses[0]) == 1
    (saved,) = tmp_path.glob("b/runs/*/checkpoints/step-00000009.*")
    boxes = re.findall(
        r"^encoder.norm.bias .* (\d, \d) *$", start(tmp_path, "ckpt", "holders", str(saved)), re.M
    )
    assert boxes == ["0, 2", "1, 3"]


@pytest.mark.torch
@pytest.mark.processes
def test_resnet_reads_the_binary_files_of_cifar(tmp_path: Path) -> None:
    records = np.random.default_rng(1).integers(0, 255, (64, 3073), np.uint8)
    records[:, 0] %= 10
    for number in (1, 2):
        records[32 * (number - 1) : 32 * number].tofile(tmp_path / f"data_batch_{number}.bin")
    output = run(tmp_path, "resnet_ddp.py", "--data", str(tmp_path), "--steps", "10", ranks=2)
    assert re.search(r"^epoch: 3 step: 10, loss is \d", output, re.M)  # 64 images: 4 steps of 2 x 8 per epoch
