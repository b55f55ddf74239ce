"""A short run of the fuzzer in ``fuzz.py``, in a child process of bounded memory; ``make fuzz-store`` runs longer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = int(os.environ.get("HOLDFAST_FUZZ_EXAMPLES", "80"))


def test_any_change_of_a_file_is_refused_or_without_effect() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.fuzz", "--examples", str(EXAMPLES)],
        cwd=Path(__file__).parents[2],
        # Threads reserve address space for their arenas, which says nothing about the memory in use.
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
        capture_output=True, text=True, timeout=60 + EXAMPLES, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-8000:]
    outcomes = json.loads(done.stdout)
    assert len(outcomes) == 4
    for kind, counts in outcomes.items():
        assert counts.get("load: original", 0) > 0, kind
        assert kind == "header_changed" or counts["load: CheckpointInvalid"] > EXAMPLES // 10, kind
