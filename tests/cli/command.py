"""The real command, in a subprocess."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

HOLDFAST = str(Path(sys.executable).parent / "holdfast")
Run = Callable[..., subprocess.CompletedProcess[str]]


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of this process without what another launcher left in it."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "HOLDFAST_", "TORCHELASTIC_"))}
    return {**kept, "OMP_NUM_THREADS": "1", **(extra or {})}
