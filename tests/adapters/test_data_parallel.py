"""Which ranks train on the same data, and which rank's buffers they follow, in every layout."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from holdfast.frameworks.torch.state.boxes import declare
from holdfast.frameworks.torch.state.buffer_sync import BufferSync
from holdfast.frameworks.torch.state.data_parallel import copy_of, holds_part, sharded_mesh
from holdfast.frameworks.torch.state.equal_start import begin_equal
from holdfast.frameworks.torch.state.parameter_names import data_parallel, names_of
from tests.adapters.worlds import Line, Worlds

pytestmark = [pytest.mark.torch, pytest.mark.processes]


def net() -> nn.Sequential:
    """Return two layers with a buffer."""
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def split(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Cut the first layer in halves."""
    return parallelize_module(model, mesh, {"0": ColwiseParallel()})


class Flagged(nn.Module):
    """A module with tensors of one byte before others, so that their bytes in a row lie at odd places."""

    started: torch.Tensor
    mean: torch.Tensor
    calls: torch.Tensor

    def __init__(self, value: int) -> None:
        super().__init__()
        self.register_buffer("started", torch.tensor(value > 0))
        self.register_buffer("mean", torch.full((3,), float(value)))
        self.register_buffer("calls", torch.tensor(value))

    def found(self) -> list[float]:
        """Return all values."""
        return [float(self.started), *self.mean.tolist(), float(self.calls)]


def every_layout(line: Line) -> dict[str, Any]:
    """Return the number of this rank's copy, and whether the rank computes only a part of it, by layout."""
    dist.init_process_group("gloo")
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    models: dict[str, Any] = {
        "ddp": DistributedDataParallel(net()),
        "fsdp": fully_shard(net(), mesh=init_device_mesh("cpu", (4,))),
        "hsdp": fully_shard(net(), mesh=two),
        "tp": split(net(), two["inner"]),
        "tp, replicate": replicate(split(net(), two["inner"]), mesh=two["outer"]),
        "pp, ddp": DistributedDataParallel(net(), process_group=two.get_group("inner")),
        "by hand": net(),
    }
    found, parts = {}, {}
    for name, model in models.items():
        copy = copy_of(model, line.rank, 4)
        found[name], parts[name] = copy.number, holds_part(model, copy, 4)
    for name in ("pp", "pp, tp"):
        module = net()
        group = two.get_group("outer")
        stage = PipelineStage(module, line.rank // 2, 2, torch.device("cpu"), group=group)
        model = split(module, two["inner"]) if "tp" in name else module
        copy = copy_of(model, line.rank, 4)
        found[name], parts[name] = copy.number, holds_part(model, copy, 4)
        del stage
        gc.collect()
    return {"copies": found, "parts": parts}


def test_copies_of_every_layout(worlds: Worlds) -> None:
    ranks = worlds.values(every_layout, 4)
    found = {name: [rank["copies"][name] for rank in ranks] for name in ranks[0]["copies"]}
    each = [0, 1, 2, 3]
    assert {name: found[name] for name in ("ddp", "fsdp", "hsdp", "by hand")} == {
        "ddp": each, "fsdp": each, "hsdp": each, "by hand": each,
    }  # fmt: skip
    assert found["tp"] == [0, 0, 2, 2] and found["tp, replicate"] == [0, 0, 1, 1]
    assert found["pp, ddp"] == [0, 1, 0, 1] == found["pp"]
    assert found["pp, tp"] == [0, 0, 0, 0]
    for rank in ranks:
        assert {name for name, is_part in rank["parts"].items() if not is_part} == {
            "ddp",
            "fsdp",
            "hsdp",
            "by hand",
        }


def buffers_of_stages(line: Line) -> dict[str, float]:
    """Return a buffer of two stages with two copies each, after its broadcast."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "copies"))
    models: dict[str, Any] = {
        "ddp": DistributedDataParallel(net(), process_group=mesh.get_group("copies")),
        "replicate": replicate(net(), mesh=mesh["copies"]),
        "by hand": net(),
    }
    stage = PipelineStage(net(), line.rank // 2, 2, torch.device("cpu"), group=mesh.get_group("stages"))
    found = {}
    for name, model in models.items():
        names = names_of(model)
        (mean,) = [slot.get() for slot in names.buffers if slot.fqn.endswith("running_mean")]
        assert mean is not None
        mean.fill_(line.rank)
        BufferSync(names, data_parallel(model), sharded_mesh(model), 4).run()
        found[name] = float(mean[0])
    del stage
    return found


def test_buffers_follow_the_first_copy_of_their_stage(worlds: Worlds) -> None:
    ranks = worlds.values(buffers_of_stages, 4)
    found = {name: [rank[name] for rank in ranks] for name in ranks[0]}
    assert found == {"ddp": [0, 0, 2, 2], "replicate": [0, 0, 2, 2], "by hand": [0, 1, 2, 3]}


def buffers_of_one_byte(line: Line) -> list[float]:
    """Return the buffers of a model after their broadcast."""
    dist.init_process_group("gloo")
    model = Flagged(line.rank + 1)
    BufferSync(names_of(model), [], None, 2).run()
    return model.found()


def test_a_buffer_of_one_byte_may_come_before_others(worlds: Worlds) -> None:
    """Regression: the bytes of the next buffer were read where no float may lie, which is a RuntimeError."""
    first, second = worlds.values(buffers_of_one_byte, 2)
    assert first == second == [1.0, 1.0, 1.0, 1.0, 1.0]


def modules_of_the_user(line: Line) -> dict[str, Any]:
    """Return the values with which modules of the user's state begin, and whether the odd ones were left alone."""
    dist.init_process_group("gloo")

    def vote(vector: list[int]) -> list[int]:
        total = torch.tensor(vector)
        dist.all_reduce(total)
        return [int(n) for n in total]

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "copies"))
    stages = [DistributedDataParallel(net(), process_group=mesh.get_group("copies"))]
    found: dict[str, Any] = {}
    for name, wrappers in {"world": [], "stages": stages}.items():
        average = Flagged(line.rank + 1)
        begin_equal({"average": average, "count": line.rank}, wrappers, vote)
        found[name] = average.found()
    odd = Flagged(line.rank + 1)
    begin_equal({"average": odd if line.rank else nn.Linear(2, 2)}, [], vote)
    found["of other shapes"] = odd.found()
    begin_equal({"average": odd} if line.rank else {}, [], vote)
    found["of some ranks"] = odd.found()
    parts = Flagged(line.rank + 1)
    declare(parts.mean, (12,), (3 * line.rank,))
    begin_equal({"average": parts}, [], vote)
    found["in parts"] = [*parts.found()[:1], *parts.found()[4:], *parts.found()[1:4]]
    return found


def test_modules_of_the_user_begin_with_the_values_of_the_first_copy(worlds: Worlds) -> None:
    ranks = worlds.values(modules_of_the_user, 4)
    found = {name: [rank[name][-1] for rank in ranks] for name in ranks[0]}
    assert found == {
        "world": [1, 1, 1, 1],
        "stages": [1, 1, 3, 3],
        "of other shapes": [1, 2, 3, 4],
        "of some ranks": [1, 2, 3, 4],
        "in parts": [1, 2, 3, 4],
    }
    assert all(rank["world"] == [1.0, 1.0, 1.0, 1.0, 1.0] for rank in ranks)
    assert all(rank["in parts"][:2] == [1.0, 1.0] for rank in ranks)
