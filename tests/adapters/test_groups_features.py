"""Every feature that runs on gloo runs on Holdfast's groups, with the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.adapters import features
from tests.adapters.worlds import Worlds

pytestmark = [pytest.mark.torch, pytest.mark.processes]


@pytest.mark.parametrize(("world", "wanted"), [(2, features.TWO_RANKS), (4, features.FOUR_RANKS)])
def test_same_numbers_as_plain_gloo(
    worlds: Worlds,
    plain_worlds: Worlds,
    world: int,
    wanted: tuple[Callable[[int, int], features.Numbers], ...],
) -> None:
    names = [feature.__name__ for feature in wanted]
    ours = worlds.values(features.run_features, world, names=names)
    plain = plain_worlds.values(features.run_features, world, names=names)
    assert len(ours) == world
    for rank in range(world):
        assert set(ours[rank]) == set(names)
        differing = [name for name in names if ours[rank][name] != plain[rank][name]]
        assert not differing, f"rank {rank}"


def test_groups_can_be_destroyed_and_made_again(worlds: Worlds) -> None:
    found = worlds.values(features.run_features, 2, names=["destroy_and_begin_again"])
    assert [f["destroy_and_begin_again"] for f in found] == [[4.0], [4.0]]
