"""A few trials of the soak (``make soak-store`` runs a thousand)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.store.soak import TARGETS


@pytest.mark.more
@pytest.mark.processes
def test_kills_at_random_moments_leave_an_exact_state() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.store.soak", "--kills", "10"],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert all(f"| {target} | 2 |" in done.stdout for target in TARGETS), done.stdout
    assert "10 trials, none failed" in done.stdout
