"""Whose plain values a rank needs: values come from ranks that hold the same tensors.

Theory. Most plain values are the same on all ranks, but optimizer state is named by the parameters that a rank holds,
and with pipeline stages these differ. A rank listens first to the one that holds most of its tensors (its copy, where
there is one; itself, where that is one of them), then to those that hold what is left: with as many stages as before
that is one rank, with fewer several.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from holdfast.store.layouts.layout import Catalogue


def speakers(
    catalogue: Catalogue, names: Collection[str], among: Iterable[int], rank: int = -1
) -> tuple[int, ...]:
    """The fewest ranks that a greedy choice finds, the first one the most important; empty without candidates.

    Args:
        names: of the tensors of the rank that asks.
        among: ranks that can be asked.
        rank: of two that hold as much, this one is asked first: itself.
    """
    asked = sorted(among)
    left = Counter(catalogue.by_fqn[name].grid for name in names if name in catalogue.by_fqn)
    chosen: list[int] = []
    while left:
        held = {
            one: sum(n for grid, n in left.items() if one in catalogue.grids[grid].ranks) for one in asked
        }
        best = min(asked, key=lambda one: (-held[one], one != rank, one), default=-1)
        if not held.get(best):
            break
        chosen.append(best)
        left = Counter({g: n for g, n in left.items() if best not in catalogue.grids[g].ranks})
    return tuple(chosen or asked[:1])
