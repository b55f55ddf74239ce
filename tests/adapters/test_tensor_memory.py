"""The content of small tensors, read without an operation."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

from holdfast.frameworks.torch.adapter import TorchAdapter
from holdfast.frameworks.torch.state.tensor_memory import content_of
from tests.adapters.worlds import Line, Worlds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_content_of_each_dtype(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[1, 0], [2, 3]]).to(dtype)
    content = content_of(tensor, 64)
    assert content is not None and len(content) == tensor.nbytes
    assert torch.equal(torch.frombuffer(bytearray(content), dtype=dtype).view(2, 2), tensor)


def test_what_has_no_content() -> None:
    assert content_of(torch.zeros(0), 64) == b""
    with torch.device("meta"):
        others = [torch.zeros(2), nn.Parameter(torch.zeros(2))]
    others += [nn.Parameter(torch.zeros(2)), torch.zeros(4, 4).t(), torch.zeros(17), torch.eye(2).to_sparse()]
    assert [content_of(each, 64) for each in (*others[:3], *others[4:])] == [None] * 5
    assert content_of(torch.zeros(2, 3).t(), 64) is None and content_of(3.0, 64) is None


def test_a_mode_in_a_block_sees_no_operation() -> None:
    with FlopCounterMode(display=False) as mode:
        content_of(torch.ones(3), 64)
    assert not any(mode.get_flop_counts().get("Global", {}))


def wrapper() -> torch.Tensor:
    """Return a tensor of a class without a storage."""
    made: Any = TwoTensor
    return cast(torch.Tensor, made(torch.ones(2), torch.ones(2)))


def test_tensors_of_the_session_are_declared() -> None:
    net, teacher = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    rows = np.ones(2)
    memory = {"rows": torch.ones(2), "array": torch.from_numpy(rows)}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    adapter = TorchAdapter(net, optimizer, None, None, {"teacher": teacher, "memory": memory}, 0)
    for kept in (
        net.running_mean,
        net.weight,
        teacher.running_mean,
        teacher.weight,
        memory["rows"],
        rows,
        optimizer.state,
    ):
        assert adapter.declares(kept)
    others = (torch.ones(2), np.ones(2), torch.eye(2).to_sparse(), torch.ones(2, device="meta"), wrapper())
    assert not any(map(adapter.declares, (*others, None)))  # the session has no scaler


def declared_by_a_sharded_session(_: Line) -> dict[str, Any]:
    """Return whether a session of a model in shards declares a parameter, its local part, and a foreign tensor."""
    dist.init_process_group("gloo")
    net = nn.Linear(4, 4)
    fully_shard(net)
    adapter = TorchAdapter(net, torch.optim.SGD(net.parameters(), lr=0.1), None, None, {}, 0)
    weight: Any = net.weight
    return {
        "weight": adapter.declares(weight),
        "its part": adapter.declares(weight.to_local()),
        "another part": adapter.declares(weight * 2),
        "another tensor": adapter.declares(torch.ones(2)),
    }


def test_tensors_of_a_sharded_session_are_declared(worlds: Worlds) -> None:
    declared = {"weight": True, "its part": True, "another part": False, "another tensor": False}
    assert worlds.values(declared_by_a_sharded_session, 2) == [declared] * 2
