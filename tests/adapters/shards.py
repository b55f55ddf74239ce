"""Work of the ranks of ``test_boxes.py``: cut tensors in every way and compare each box with the whole tensor."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from holdfast.errors import StateError
from holdfast.frameworks.torch.state import boxes
from holdfast.frameworks.torch.state.boxes import parts_of
from holdfast.frameworks.torch.state.state import TorchState
from holdfast.store.layouts.layout import Catalogue
from holdfast.store.layouts.layout_completion import catalogue_of
from holdfast.store.layouts.save_plan import plan
from tests.adapters.worlds import Line

PLACEMENTS: dict[str, list[Any]] = {
    "replicated": [Replicate(), Replicate()],
    "sharded": [Replicate(), Shard(0)],
    "nested": [Shard(0), Shard(0)],
    "grid": [Shard(0), Shard(1)],
    "columns": [Shard(1), Replicate()],
}


def boxes_of(tensor: DTensor, whole: Tensor) -> list[str]:
    """Return the boxes of this rank. Each must hold exactly its region of ``whole``."""
    found = []
    for part in parts_of(tensor, "x"):
        region = whole[tuple(slice(o, o + s) for o, s in zip(part.box.offsets, part.box.sizes, strict=True))]
        assert torch.equal(tensor._local_tensor[part.where], region), part
        found.append(str(part.box))
    return found


def cut(line: Line) -> dict[str, list[str]]:
    """Return the boxes of this rank by kind of placement."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    whole = torch.arange(30.0).reshape(10, 3)
    found = {name: boxes_of(distribute_tensor(whole, mesh, p), whole) for name, p in PLACEMENTS.items()}
    for name, style in (("strided rows", ColwiseParallel()), ("strided columns", RowwiseParallel())):
        torch.manual_seed(0)
        layer: nn.Module = nn.Linear(6, 10, bias=False)
        weight = next(layer.parameters()).detach().clone()
        layer = parallelize_module(layer, mesh["tensor"], style)
        fully_shard(layer, mesh=mesh["data"])
        assert isinstance(layer.weight, DTensor)
        found[name] = boxes_of(layer.weight, weight)
    # These rows have the shape and dimension of the strided ones. Some versions of torch call both placements equal.
    rows = torch.arange(60.0).reshape(10, 6)
    found["plain rows"] = boxes_of(distribute_tensor(rows, mesh, [Shard(0), Shard(0)]), rows)
    try:
        parts_of(DTensor.from_local(torch.ones(2), mesh, [Partial(), Replicate()]), "x")
    except StateError:
        found["pending"] = ["refused"]
    return found


def cut_once(line: Line) -> dict[str, Any]:
    """Return how often torch was asked to cut, for the layouts of two collections of one model."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net = nn.Sequential(*(nn.Linear(6, 6) for _ in range(5)))
    fully_shard(net, mesh=mesh)
    state = TorchState(net, {})
    boxes._cut.cache_clear()  # the check of the state has asked torch before
    with patch.object(Shard, "_split_tensor", autospec=True, side_effect=Shard._split_tensor) as asked:
        first = state.collect().layout(dist.get_rank(), 4)
        cuts = asked.call_count
        again = state.collect().layout(dist.get_rank(), 4)
    later = asked.call_count - cuts
    return {"cuts": cuts, "later": later, "tensors": len(first.tensors), "same": first == again}


def late_layouts(line: Line, declared: list[int]) -> str:
    """Return the completed catalogue of HSDP after its first update, published by the ranks in ``declared`` only."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters())
    state = TorchState(net, {"default": optimizer})
    rank = dist.get_rank()
    before = state.collect().layout(rank, 4)
    net(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    after = state.collect().layout(rank, 4)
    told: list[Any] = [None] * 4
    dist.all_gather_object(told, [(after if rank in declared else before).encode(), after.encode()])
    full = Catalogue.from_encoded({r: pair[1] for r, pair in enumerate(told)})
    completed = catalogue_of({r: pair[0] for r, pair in enumerate(told)})
    assert completed.to_json() == full.to_json()
    return plan(completed, frozenset({0, 1})).why_incomplete()
