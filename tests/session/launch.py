"""``holdfast run``, from its start to its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.cli.command import HOLDFAST

BOUND_S = 120.0
TORCHRUN_BOUND_S = 100.0
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))


def run_job(where: Path, nproc: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A job of ``nproc`` workers in ``where``; ``stdout`` has both streams."""
    return _run(where, BOUND_S, HOLDFAST, "run", "--nproc-per-node", str(nproc), *arguments)


def run_torchrun(where: Path, nproc: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The same under torchrun."""
    return _run(where, TORCHRUN_BOUND_S, TORCHRUN, "--standalone", "--nproc-per-node", str(nproc), *arguments)


def _run(where: Path, bound_s: float, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=where,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=bound_s,
    )
