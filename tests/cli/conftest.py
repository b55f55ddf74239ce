"""A fixture that runs the real command."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.cli.command import HOLDFAST, Run, clean_environment


@pytest.fixture
def holdfast(tmp_path: Path) -> Run:
    """Return a function that runs ``holdfast("status", ..., env={})`` in an empty directory to its end."""

    def run(
        *args: str, env: Mapping[str, str] | None = None, timeout_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [HOLDFAST, *args],
            cwd=tmp_path,
            env=clean_environment(env),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    return run
