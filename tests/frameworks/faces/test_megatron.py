"""Megatron-core's GPT on CPU: the boxes of each rank are declared, and a lost rank's part comes from its replica."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

from holdfast.errors import UnsupportedError
from holdfast.integrations.megatron import declare
from holdfast.store.layouts.layout import Box
from holdfast.store.manage.checkpoint_root import Root
from holdfast.store.read.load import load_catalogue
from tests.frameworks.faces.running import EXAMPLES, RANKS, drill

JOB = Path(__file__).with_name("megatron_job.py")
EMBEDDING = "embedding.word_embeddings.weight"  # 64 x 32, split along the vocabulary


@pytest.mark.parametrize(
    ("mode", "fault", "name", "boxes"),
    [
        pytest.param(
            "tensor", "kill:rank=0@step=4", EMBEDDING,
            {Box((0, 0), (32, 32)): (0, 2), Box((32, 0), (32, 32)): (1, 3)}, marks=pytest.mark.smoke,
        ),
        (
            "tensor", "kill:rank=3@step=5,phase=update", "optimizer.default.output_layer.weight.exp_avg",
            {Box((0, 0), (32, 32)): (0, 2), Box((32, 0), (32, 32)): (1, 3)},
        ),
        ("zero", "kill:rank=2@step=4", "optimizer.default.weights.exp_avg_sq", None),
    ],
)  # fmt: skip
def test_lost_rank_costs_no_step(
    tmp_path: Path, mode: str, fault: str, name: str, boxes: dict[Box, tuple[int, ...]] | None
) -> None:
    code, output = drill(tmp_path, fault, JOB, "--mode", mode)
    assert code == 0, output
    assert "PASSED: no committed step lost, the same bits at the end" in output
    digests = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    assert digests[0] == digests[2] != digests[1] == digests[3]
    (root,) = tmp_path.glob("runs/*/disturbed/checkpoints")
    catalogue = load_catalogue(Path(Root(root).list()[0].path))
    holders = dict(catalogue.boxes(catalogue.by_fqn[name]))
    assert set(holders.values()) == {(0, 2), (1, 3)}
    assert boxes is None or holders == boxes


@pytest.mark.parametrize("phase", ["backward", "update"])
def test_megatron_s_own_data_parallelism_loses_a_rank_and_no_step(tmp_path: Path, phase: str) -> None:
    code, output = drill(tmp_path, f"kill:rank=1@step=4,phase={phase}", EXAMPLES / "megatron_gpt.py", "8")
    assert code == 0, output
    assert "PASSED: no committed step lost, the same bits at the end" in output


def test_strided_partition_is_refused_by_name() -> None:
    model = nn.Linear(4, 4)
    weight = model.weight
    weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, 0, 2  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError, match="weight: a partition of stride 2"):
        declare(model, rank=0, world_size=2)
