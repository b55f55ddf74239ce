"""Starts of a job (four ranks by default) with the launchers of this environment and of ``holdfast drill``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"
BIN = Path(sys.executable).parent
RANKS = 4
BOUND_S = 300.0


def run(
    where: Path,
    launcher: list[str],
    script: Path,
    *arguments: str,
    ranks: int = RANKS,
    bound_s: float = BOUND_S,
) -> tuple[int, str]:
    """Run ``script``. Return exit code and output. ``launcher`` is ``["torchrun"]`` or ``["holdfast", "run"]``."""
    where.mkdir(parents=True, exist_ok=True)
    command = [str(BIN / launcher[0]), *launcher[1:], "--nproc-per-node", str(ranks), str(script), *arguments]
    return _start(command, where, bound_s)


def drill(where: Path, fault: str, script: Path, *arguments: str) -> tuple[int, str]:
    """Run ``script`` under ``holdfast drill``, undisturbed and with ``fault``. Return exit code and output."""
    where.mkdir(parents=True, exist_ok=True)
    command = [
        str(BIN / "holdfast"),
        "drill",
        "--nproc",
        str(RANKS),
        "--fault",
        fault,
        str(script),
        *arguments,
    ]
    return _start(command, where)


def _start(command: list[str], where: Path, bound_s: float = BOUND_S) -> tuple[int, str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        command, cwd=where, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=bound_s,
    )  # fmt: skip
    assert "please report" not in done.stdout, done.stdout  # a defect of a search, which no job ends for
    return done.returncode, done.stdout
