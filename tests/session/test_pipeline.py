"""A checkpoint of a pipeline: each rank finds its stage in it, with one copy or two, and one rank finds everything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.drill.model import SIZES, Gpt, Stage
from holdfast.errors import CheckpointMismatch
from holdfast.frameworks.torch.adapter import TorchAdapter
from holdfast.session.checkpoints.resume import load_state
from holdfast.store.manage.checkpoint_root import Root
from tests.session.launch import run_job

pytestmark = [pytest.mark.torch, pytest.mark.processes]

STEPS = 6
SAME = ("parameters", "optimizer", "buffers", "scheduler")


def train(where: Path, nproc: int, root: Path) -> tuple[list[dict[str, Any]], str]:
    """Train. Return what each rank holds after step 6, and the output."""
    where.mkdir()
    script = ["-m", "holdfast.drill.train", "--layout", "pp", "--steps", str(STEPS)]
    done = run_job(where, nproc, *script, "--checkpoint", str(root), "--result", "out")
    assert done.returncode == 0, done.stdout
    return [json.loads(path.read_text()) for path in sorted(where.glob("out/*.json"))], done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Train two stages with two copies. Return the root of their checkpoints, and what each rank held."""
    base = tmp_path_factory.mktemp("pipeline")
    return base / "ckpts", train(base / "first", 4, base / "ckpts")[0]


def adapter_of(model: torch.nn.Module) -> TorchAdapter:
    """Return the adapter of one rank that has built ``model``."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    return TorchAdapter(model, optimizer, scheduler, None, {}, 0)


def test_another_number_of_copies_takes_what_its_stages_were(
    trained: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    root, before = trained
    after, output = train(tmp_path / "second", 2, root)
    assert f"resumed at step {STEPS}" in output
    for rank, then in ((0, 0), (1, 2)):
        assert {k: after[rank][k] for k in SAME} == {k: before[then][k] for k in SAME}


def test_one_rank_loads_all_stages(trained: tuple[Path, list[dict[str, Any]]]) -> None:
    (newest, *_) = Root(trained[0]).list()
    gpt = Gpt(SIZES["tiny"])
    adapter = adapter_of(gpt)
    assert load_state(adapter, Path(newest.path)).step == STEPS
    found = adapter.state.optimizers["default"].optimizer.state
    assert len(found) == len(list(gpt.parameters()))
    assert {int(state["step"]) for state in found.values()} == {STEPS}
    assert all(state["exp_avg"].any() for state in found.values())


def test_a_model_that_nobody_builds_whole_is_refused(trained: tuple[Path, list[dict[str, Any]]]) -> None:
    (newest, *_) = Root(trained[0]).list()
    gpt = Gpt(SIZES["tiny"])
    whole = set(gpt.state_dict())
    first = Stage(gpt, 0, 2)
    assert load_state(adapter_of(first), Path(newest.path), whole).step == STEPS
    with pytest.raises(CheckpointMismatch, match=r"unexpected: blocks\.1"):
        load_state(adapter_of(first), Path(newest.path), set(first.state_dict()))
    first.extra = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointMismatch, match=r"missing: extra\.weight"):
        load_state(adapter_of(first), Path(newest.path), whole)
