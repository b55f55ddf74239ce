"""Megatron-core's GPT on CPU: the boxes of each rank are declared, and a lost rank's part comes from its replica."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import nn

import holdfast
from holdfast.errors import UnsupportedError
from holdfast.integrations.megatron import declare
from holdfast.store.layouts.layout import Box
from holdfast.store.manage.checkpoint_root import Root
from holdfast.store.read.load import load_catalogue
from tests.frameworks.faces.running import BIN, BOUND_S, EXAMPLES, RANKS, ROOT, drill, run

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


@pytest.mark.timeout(6 * BOUND_S)
def test_a_checkpoint_in_megatron_s_distributed_format_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    job, folder = JOB.with_name("megatron_dist_job.py"), tmp_path / "run"
    code, output = run(tmp_path, ["torchrun"], job, "save", str(folder), ranks=2, bound_s=3 * BOUND_S)
    assert code == 0, output
    command = [str(BIN / "holdfast"), "ckpt", "import", str(folder / "iter_0000007"), str(tmp_path / "ckpts")]
    subprocess.run(command, check=True, timeout=BOUND_S)
    (made,) = (tmp_path / "ckpts").glob("step-00000007*")
    code, output = run(
        tmp_path, ["torchrun"], job, "load", str(folder), str(made), ranks=2, bound_s=3 * BOUND_S
    )
    assert code == 0 and output.count(" equal") == 2, output


def test_megatron_s_distributed_optimizer_is_refused_before_the_first_update() -> None:
    """The constructor of the optimizer needs a GPU, so the test uses its class only."""
    optimizer = DistributedOptimizer.__new__(DistributedOptimizer)
    with pytest.raises(UnsupportedError, match="DistributedOptimizer of Megatron communicates inside step"):
        holdfast.session(model=nn.Linear(2, 2), optimizer=optimizer).__enter__()


def test_strided_partition_is_refused_by_name() -> None:
    model = nn.Linear(4, 4)
    weight = model.weight
    weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, 0, 2  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError, match="weight: a partition of stride 2"):
        declare(model, rank=0, world_size=2)
