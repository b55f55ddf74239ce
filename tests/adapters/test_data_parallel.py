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

from holdfast.frameworks.torch.state.buffer_sync import BufferSync
from holdfast.frameworks.torch.state.data_parallel import copy_of, sharded_mesh
from holdfast.frameworks.torch.state.parameter_names import data_parallel, names_of
from tests.adapters.worlds import Line, Worlds

pytestmark = [pytest.mark.torch, pytest.mark.processes]


def net() -> nn.Sequential:
    """Return two layers with a buffer."""
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def split(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Cut the first layer in halves."""
    return parallelize_module(model, mesh, {"0": ColwiseParallel()})


def every_layout(line: Line) -> dict[str, int]:
    """Return the number of this rank's copy, by layout."""
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
    found = {name: copy_of(model, line.rank, 4).number for name, model in models.items()}
    for name in ("pp", "pp, tp"):
        module = net()
        group = two.get_group("outer")
        stage = PipelineStage(module, line.rank // 2, 2, torch.device("cpu"), group=group)
        found[name] = copy_of(split(module, two["inner"]) if "tp" in name else module, line.rank, 4).number
        del stage
        gc.collect()
    return found


def test_copies_of_every_layout(worlds: Worlds) -> None:
    ranks = worlds.values(every_layout, 4)
    found = {name: [rank[name] for rank in ranks] for name in ranks[0]}
    each = [0, 1, 2, 3]
    assert {name: found[name] for name in ("ddp", "fsdp", "hsdp", "by hand")} == {
        "ddp": each, "fsdp": each, "hsdp": each, "by hand": each,
    }  # fmt: skip
    assert found["tp"] == [0, 0, 2, 2] and found["tp, replicate"] == [0, 0, 1, 1]
    assert found["pp, ddp"] == [0, 1, 0, 1] == found["pp"]
    assert found["pp, tp"] == [0, 0, 0, 0]


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
