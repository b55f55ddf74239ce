"""The reduction of one rank's gradients to the gradients of the job, over Holdfast's own connections.

Theory. The gradient of a parameter is summed over the ranks that hold the same box of it. These are all ranks for a
whole parameter, fewer for a slice, and one for a slice that no other rank holds. Parameters whose boxes divide the
ranks in the same way travel in one vector. Each rank sums this vector with the ranks that hold the same boxes. The
ranks publish their boxes once in each generation, before the first sum, so a newcomer learns them from the survivors.

Invariants:
1. The gradient of a slice is never added to the gradient of another slice.
2. All ranks make the same number of sums, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import StepError
from holdfast.frameworks.common.replica_comparison import box_key, gathered, parts, require_same_names
from holdfast.store.layouts.layout import TensorMeta

Vector = NDArray[Any]
Sum = Callable[[Vector, Sequence[int] | None], Vector]
"""A function that returns the sum of a vector, shape [n], over the given ranks (None: all)."""


class SummedShare(NamedTuple):
    """The elements of the gradient vector that are summed over ``ranks``. ``where`` is True at these elements."""

    ranks: tuple[int, ...]
    where: NDArray[np.bool_]  # shape [gradients]


class Reduction:
    """One rank's side of the gradient sums.

    Args:
        rank, world_size: rank of this process and the number of ranks.
        trained: the trained parameters in the order of their gradients, as this rank holds them.
        mean: divide each sum by the number of its ranks.
        native: the framework has already reduced the gradients of whole parameters.
    """

    def __init__(
        self, rank: int, world_size: int, trained: Sequence[TensorMeta], *, mean: bool, native: bool
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._trained = tuple(trained)
        self._mean = mean
        self._native = native
        self._shares: tuple[SummedShare, ...] | None = None  # None until the ranks have published their boxes

    def forget(self) -> None:
        """Forget the boxes of all ranks, because the ranks have changed. The next sum publishes the boxes again."""
        self._shares = None

    def reduced(self, vector: Vector, total: Sum) -> Vector:
        """Return the gradients for the update, followed by rank 0's buffers.

        Args:
            vector: float32 [gradients, then buffers] of this rank.
            total: the function that sums over ranks.

        Raises:
            PeerLost: a rank is lost.
            StateError: the ranks have built different models.
            StepError: the vector has fewer gradients than the trained parameters have elements.
        """
        if self._shares is None:
            self._shares = self._told(total)
        gradients = sum(meta.box.numel for meta in self._trained)
        if len(vector) < gradients:
            raise StepError(
                f"{len(vector)} elements came to the gate, the parameters of the optimizer have {gradients}",
                hint="compute the gradients of optimizer.parameters, in this order",
            )
        buffers = vector[gradients:] if self._rank == 0 else np.zeros_like(vector[gradients:])
        out = vector.copy()
        mine: Any = slice(0, gradients)  # selects the elements of whole parameters
        if self._shares:
            mine = ~np.logical_or.reduce([share.where for share in self._shares])
        for share in self._shares:
            part = total(vector[:gradients][share.where], share.ranks)
            out[:gradients][share.where] = self._averaged(part, len(share.ranks))
        if self._native:
            out[gradients:] = total(buffers, None) if len(buffers) else buffers
            return out
        whole = total(np.concatenate([vector[:gradients][mine], buffers]), None)
        summed = len(whole) - len(buffers)
        out[:gradients][mine] = self._averaged(whole[:summed], self._world_size)
        out[gradients:] = whole[summed:]
        return out

    def _averaged(self, total: Vector, ranks: int) -> Vector:
        return total / np.float32(ranks) if self._mean else total

    def _told(self, total: Sum) -> tuple[SummedShare, ...]:
        """Exchange the boxes of all ranks. Return the elements that this rank sums over only some of the ranks."""

        def everywhere(vector: Vector) -> Vector:
            return total(vector, None)

        require_same_names(everywhere, self._rank, self._world_size, [meta.fqn for meta in self._trained])
        keys = gathered(everywhere, self._rank, self._world_size, [box_key(meta) for meta in self._trained])
        sizes = [meta.box.numel for meta in self._trained]
        edges = np.cumsum([0, *sizes])
        divided: dict[tuple[tuple[int, ...], ...], NDArray[np.bool_]] = {}
        for index in range(len(self._trained)):
            ranks = parts(keys[:, index])
            if len(ranks) > 1:
                where = divided.setdefault(ranks, np.zeros(int(edges[-1]), np.bool_))
                where[edges[index] : edges[index + 1]] = True
        return tuple(
            SummedShare(next(part for part in ranks if self._rank in part), where)
            for ranks, where in divided.items()
        )
