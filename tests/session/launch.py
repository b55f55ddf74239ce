"""``holdfast run``, from its start to its end."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.cli.command import HOLDFAST

BOUND_S = 120.0


def run_job(where: Path, nproc: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A job of ``nproc`` workers in ``where``; ``stdout`` has both streams."""
    return subprocess.run(
        [HOLDFAST, "run", "--nproc-per-node", str(nproc), *arguments],
        cwd=where,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BOUND_S,
    )
