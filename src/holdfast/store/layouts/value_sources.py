"""The choice of the ranks whose plain values (values that are not tensors) a rank loads from a checkpoint.

Theory. Most plain values are the same on all ranks. But optimizer state is named by the parameters that a rank holds,
which differ between pipeline stages. So a loading rank takes the values of the saved rank that held most tensors of the
loading rank. If several saved ranks held equally many, the rank with the same number is preferred. Further ranks follow
for the remaining tensors. If the job has as many stages as the saved job, one rank is enough. With fewer stages several
ranks are needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from holdfast.store.layouts.layout import Catalogue


def speakers(
    catalogue: Catalogue, names: Collection[str], among: Iterable[int], rank: int = -1
) -> tuple[int, ...]:
    """Return the ranks whose plain values a rank loads, the most important first; empty if there are no candidates.

    The ranks are chosen one after the other: each time the candidate that holds most of the remaining tensors, which no
    rank chosen so far holds.

    Args:
        catalogue: all tensors and their holders.
        names: names of the tensors of the rank that loads.
        among: the candidates.
        rank: the rank that loads. Among candidates with equally many tensors this rank is preferred. -1: no rank is.
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
