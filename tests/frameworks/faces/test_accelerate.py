"""An Accelerate loop needs only the plain session."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.frameworks.faces.accelerate_order import SAMPLES
from tests.frameworks.faces.running import EXAMPLES, RANKS, drill, run

ORDER = Path(__file__).with_name("accelerate_order.py")


def test_example_survives_a_kill(tmp_path: Path) -> None:
    code, output = drill(tmp_path, "kill:rank=0@step=31", EXAMPLES / "accelerate_loop.py", "--steps", "40")
    assert code == 0, output
    assert "PASSED: no committed step lost, the same bits at the end" in output


@pytest.mark.parametrize("seedable", [True, False])
def test_batches_of_prepared_loaders(tmp_path: Path, seedable: bool) -> None:
    code, output = run(tmp_path, ["holdfast", "run"], ORDER, *(["--seedable"] if seedable else []))
    assert code == 0, output
    drawn = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    for one in drawn:
        half = len(one["ours"]) // 2
        assert one["again"] == one["ours"][half + 1 :]
        assert one["ours"][:half] != one["ours"][half:]
        if seedable:  # then the order depends on the epoch only, also in accelerate
            assert one["ours"] == one["stock"]
    halves = [index for one in drawn for batch in one["ours"][: len(one["ours"]) // 2] for index in batch]
    assert set(halves) == set(range(SAMPLES))
    assert len(halves) < SAMPLES + 2 * RANKS  # batches are made even: few samples are drawn twice
