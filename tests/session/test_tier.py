"""The memory tier of one session, alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.errors import CheckpointInvalid
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
