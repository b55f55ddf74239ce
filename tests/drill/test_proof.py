"""Real runs on the tiny model: faults in a pairwise covering, and the plain-torch twin, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import pytest

from holdfast.cli.drill import show
from holdfast.drill.digest import digest_of_checkpoint, digest_of_results
from holdfast.drill.grammar import KINDS, PHASES, Fault
from holdfast.drill.matrix import LAYOUTS, NPROC, SPACING, VICTIMS, drill_for, pairwise, steps_for
from holdfast.drill.proof import Verdict

pytestmark = [pytest.mark.torch, pytest.mark.processes, pytest.mark.timeout(400)]
SEED = 3


def bare_digest(directory: Path, layout: str, steps: int) -> str:
    """What the bare twin ends with under plain torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NPROC)]
    script = ["-m", "holdfast.drill.bare", "--size", "tiny", "--layout", layout, "--steps", str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, *script, "--result", str(directory)],
        env=environment, check=True, timeout=200, capture_output=True,
    )  # fmt: skip
    return digest_of_results(directory, NPROC)


def prove(base: Path, layout: str, faults: list[Fault]) -> Verdict:
    """Inject ``faults`` and check everything that the drill promises."""
    drill = drill_for(base, layout, steps_for(len(faults)), SEED)
    verdict = drill.disturbed("disturbed", faults)
    show(verdict)
    assert verdict.passed, verdict
    assert [(f.kind, f.rank) for f in verdict.faults] == [(f.kind, f.ranks[0]) for f in faults]
    for fault in verdict.faults:
        times = [
            fault.detected_s,
            fault.fenced_s,
            fault.quiesced_s,
            fault.planned_s,
            fault.restored_s,
            fault.resumed_s,
        ]
        assert None not in times and times == sorted(times, key=lambda s: s or 0.0), fault
    assert verdict.digest == bare_digest(base / "bare", layout, verdict.steps)
    return verdict


def test_ddp_loses_nothing(tmp_path: Path) -> None:
    faults = pairwise("ddp")
    verdict = prove(tmp_path, "ddp", faults)
    asked = [fault.phase for fault in faults]
    assert [fault.phase for fault in verdict.faults] == asked
    runs = tmp_path / "ddp"
    digests = {
        digest_of_checkpoint(runs / name / "checkpoints", name, verdict.steps)
        for name in ("undisturbed", "disturbed")
    }
    assert len(digests) == 1


def test_hsdp_loses_nothing(tmp_path: Path) -> None:
    prove(tmp_path, "hsdp", pairwise("hsdp"))


def test_two_ranks_at_once_and_a_random_moment(tmp_path: Path) -> None:
    prove(
        tmp_path,
        "ddp",
        [Fault("kill", (0, 3), SPACING, "backward"), Fault("kill", (1,), 2 * SPACING, "moment")],
    )


def test_every_pair_of_values_is_covered() -> None:
    rows = {(layout, f.kind, f.phase, f.ranks[0]) for layout in LAYOUTS for f in pairwise(layout)}
    dimensions = (LAYOUTS, KINDS, PHASES, VICTIMS)
    for i, j in combinations(range(4), 2):
        assert {(row[i], row[j]) for row in rows} == set(product(dimensions[i], dimensions[j]))
