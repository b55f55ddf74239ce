"""Import of a plain torch training, which continues exactly: numbered optimizer state, weights in several files."""

from __future__ import annotations

import json
import logging
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.cli.main import answer
from holdfast.errors import CheckpointInvalid, UsageError
from holdfast.frameworks.torch.files.exports import export_checkpoint
from holdfast.frameworks.torch.files.imports import import_checkpoint
from holdfast.store.manage.checkpoint_tools import INDEX_NAME
from tests.store.test_damage import flip

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


class Run:
    """A small typical training: batch norm, weight decay for matrices only, a schedule."""

    def __init__(self, *, by_ndim: bool = True) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        named = dict(self.net.named_parameters())
        decayed = [n for n, p in named.items() if (p.ndim > 1 if by_ndim else n.endswith("weight"))]
        groups = [
            {"params": [named[n] for n in decayed], "weight_decay": 0.1},
            {"params": [p for n, p in named.items() if n not in decayed], "weight_decay": 0.0},
        ]
        self.optimizer: Optimizer = AdamW(groups, 1e-2)
        self.scheduler = CosineAnnealingLR(self.optimizer, 20)
        numbers = torch.Generator().manual_seed(1)
        x, y = torch.randn(40, 6, generator=numbers), torch.randint(0, 3, (40,), generator=numbers)
        self.loader = DataLoader(TensorDataset(x, y), batch_size=4)

    def update(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Run one step."""
        loss: Any = nn.functional.cross_entropy(self.net(x), y)
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def train(self, count: int) -> Run:
        """Train on the first batches of the loader."""
        for x, y in islice(self.loader, count):
            self.update(x, y)
        return self

    def save(self, path: Path, step: int) -> Path:
        """Save in the way of nearly every script."""
        torch.save({"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict(),
                    "scheduler": self.scheduler.state_dict(), "step": step}, path)  # fmt: skip
        return path


def same(mine: Any, theirs: Any) -> bool:
    """Return whether two nested values are equal, bit for bit."""
    if isinstance(mine, torch.Tensor):
        return torch.equal(mine, theirs)
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(same(mine[key], theirs[key]) for key in mine)
    if isinstance(mine, list):
        return len(mine) == len(theirs) and all(map(same, mine, theirs))
    return bool(mine == theirs)


def test_it_goes_on_as_torch_would(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    there, here = Run().train(7), Run()
    import_checkpoint(there.save(tmp_path / "a.pt", 7), tmp_path / "root")
    there.train(5)
    given: dict[str, Any] = {"model": here.net, "optimizer": here.optimizer, "scheduler": here.scheduler}
    with (
        caplog.at_level(logging.INFO, "holdfast"),
        holdfast.session(**given, checkpoint=tmp_path / "root") as s,
    ):
        for step in s.steps(here.loader, until=12):
            with step as (x, y):
                here.update(x, y)
    assert same(dict(here.net.state_dict()), dict(there.net.state_dict()))
    assert same(here.optimizer.state_dict()["state"], there.optimizer.state_dict()["state"])
    (line,) = [line for line in caplog.messages if "resumed at step 7" in line]
    assert "the loader begins at its start" in line


def test_an_optimizer_by_number_gets_the_names_that_torch_gives(tmp_path: Path) -> None:
    run = Run().train(3)
    made = import_checkpoint(run.save(tmp_path / "a.pt", 3), tmp_path / "root")
    export_checkpoint(made, tmp_path / "out.pt", "torch")
    exported = torch.load(tmp_path / "out.pt", weights_only=True)["optimizer"]
    assert same(exported["state"], get_optimizer_state_dict(run.net, run.optimizer)["state"])
    assert [group["params"] for group in exported["param_groups"]] == [
        ["0.weight", "3.weight"], ["0.bias", "1.weight", "1.bias", "3.bias"]
    ]  # fmt: skip


def test_groups_that_leave_doubt_are_refused(tmp_path: Path) -> None:
    """The scale of the norm and the bias before it have one shape. Either may be the next parameter of its group."""
    path = Run(by_ndim=False).train(3).save(tmp_path / "a.pt", 3)
    with pytest.raises(UsageError, match="cannot be matched"):
        import_checkpoint(path, tmp_path / "root")
    assert not (tmp_path / "root").exists()


def test_a_directory_in_hugging_faces_form(tmp_path: Path) -> None:
    run, fresh = Run().train(3), Run()
    path = import_checkpoint(run.save(tmp_path / "a.pt", 3), tmp_path / "root")
    for name, size_bytes in (("one", 10**9), ("parts", 200)):
        made = export_checkpoint(path, tmp_path / name, "hf", file_size_bytes_max=size_bytes)
        assert (len(made) > 2) == (name == "parts")
        holdfast.load(import_checkpoint(tmp_path / name, tmp_path / f"from-{name}"), fresh.net)
        assert same(dict(fresh.net.state_dict()), dict(run.net.state_dict()))


def test_a_directory_that_is_not_whole_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = import_checkpoint(Run().train(3).save(tmp_path / "a.pt", 3), tmp_path / "root")
    files = export_checkpoint(path, tmp_path / "hf", "hf", file_size_bytes_max=200)
    index = tmp_path / "hf" / INDEX_NAME
    listing = json.loads(index.read_text())

    def refused(change: dict[str, str], match: str) -> None:
        index.write_text(json.dumps({"weight_map": {**listing["weight_map"], **change}}))
        with pytest.raises(CheckpointInvalid, match=match):
            import_checkpoint(tmp_path / "hf", tmp_path / "new")

    refused({"gone": Path(files[0]).name}, r"model-00001-of-.* lacks gone")
    refused({"gone": "../a.pt"}, "not a file beside it")
    refused({"gone": "nowhere.safetensors"}, r"nowhere\.safetensors: does not exist")
    index.write_text("[]")
    with pytest.raises(CheckpointInvalid, match="no index of weights"):
        import_checkpoint(tmp_path / "hf", tmp_path / "new")
    shutil.rmtree(tmp_path / "hf")
    (tmp_path / "hf").mkdir()
    assert answer(["ckpt", "import", str(tmp_path / "hf"), str(tmp_path / "new")]) == 2
    assert INDEX_NAME in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_weights_do_not_need_a_sound_optimizer(tmp_path: Path) -> None:
    run, fresh = Run().train(3), Run()
    made = Path(str(import_checkpoint(run.save(tmp_path / "a.pt", 3), tmp_path / "root")))
    shard = made / "shard-r00000-000.safetensors"
    pristine = shard.read_bytes()
    stored = run.optimizer.state_dict()["state"][0]["exp_avg"].numpy().tobytes()
    flip(shard, pristine.index(stored))
    assert answer(["ckpt", "verify", str(made)]) == 3
    holdfast.load(made, fresh.net)
    assert same(dict(fresh.net.state_dict()), dict(run.net.state_dict()))
    flip(shard, pristine.index(run.net.get_parameter("3.weight").detach().numpy().tobytes()))
    other = Run()
    before = {name: value.clone() for name, value in other.net.state_dict().items()}
    with pytest.raises(
        CheckpointInvalid, match=r"copy of 3\.weight.* of 3\.weight\[0:3, 0:8\] do not"
    ) as caught:
        holdfast.load(made, other.net)
    assert same(dict(other.net.state_dict()), before) and "repair --dry-run" in caught.value.hint
