"""No line changed: a plain torchrun script under ``holdfast run`` is restarted, and its survivors end with an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.processes]

SCRIPT = str(Path(__file__).with_name("tier0.py"))
RANKS = 3


def test_a_plain_script_restarts_and_no_survivor_crashes(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).parent / "holdfast"), "run", "--nproc_per_node", str(RANKS), SCRIPT]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    (run,) = (tmp_path / "runs").iterdir()
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    signals = [e["data"]["signal"] for e in events if e["kind"] == "member_exited"]
    logs = [(run / "attempt-001" / f"rank-{rank:05d}.log").read_text() for rank in range(RANKS)]
    assert done.returncode == 0, done.stdout
    assert signals.count(9) >= 1
    assert 11 not in signals, "a broken bucket crashed DDP's reducer"
    assert all(f"rank {rank} done in life 1 on gloo" in log for rank, log in enumerate(logs)), logs
