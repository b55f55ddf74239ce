"""The memory tier of one session, alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.adapters.torch.adapter import TorchAdapter
from holdfast.errors import CheckpointInvalid, CheckpointMismatch
from holdfast.session.memory import Tier
from holdfast.session.rank import Rank


def test_a_spare_asks_other_nodes_for_the_states_of_the_rank_that_it_became(tmp_path: Path) -> None:
    adapter: Any = SimpleNamespace(rank=0, world_size=4)
    asked: list[tuple[int, int]] = []

    def pull(rank: int, step: int) -> bool:
        asked.append((rank, step))
        return False

    tier = Tier(Rank(adapter, None), adapter, tmp_path, 1, lambda state, step: {}, dict, pull)
    adapter.rank = 2
    tier.know_rank()
    with pytest.raises(CheckpointInvalid, match="no state of rank 2 at step 7"):
        tier.verify(7)
    assert asked == [(2, 7)]


@pytest.mark.torch
@pytest.mark.parametrize(
    ("kind", "width"), [(torch.float16, 4), (torch.float32, 4), (torch.float32, 2), (torch.bfloat16, 2)]
)
def test_a_state_of_another_model_is_refused_before_anything_changes(
    tmp_path: Path, kind: torch.dtype, width: int
) -> None:
    """Also where it takes as many bytes: they were taken for numbers of the other type."""

    def tier_of(net: nn.Module) -> Tier:
        adapter = TorchAdapter(net, torch.optim.SGD(net.parameters()), None, None, {}, seed=0)
        return Tier(
            Rank(adapter, None), adapter, tmp_path, 1, lambda s, step: {**s.values, "session": {}}, dict
        )

    first = nn.Linear(4, 3, bias=False).to(torch.bfloat16)
    tier_of(first).start(0)
    again = nn.Linear(4, 3, bias=False).to(torch.bfloat16)
    assert tier_of(again).load(0).step == 0
    assert torch.equal(again.weight, first.weight)
    other = nn.Linear(width, 3, bias=False).to(kind)
    before = other.weight.detach().clone()
    with pytest.raises(CheckpointMismatch, match=r"weight is BF16 \[3, 4\] in memory-00000-0, and"):
        tier_of(other).load(0)
    assert torch.equal(other.weight, before)
