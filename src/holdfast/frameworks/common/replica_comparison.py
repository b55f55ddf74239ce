"""A comparison of the ranks' initial states, made once before the first step.

Theory. Ranks that hold the same box of a tensor train copies of it. If each rank draws its own initial weights, the
copies differ, and summed gradients preserve every difference. So before the first step each rank publishes the digest
of each box that it holds. All ranks draw the same conclusion from the same numbers. If copies differ, all ranks raise
an error. If the script asks for a broadcast, copies are instead overwritten from the lowest rank that holds the box.

Invariants:
1. All ranks raise the same error, or none does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from holdfast.errors import StateError
from holdfast.store.layouts.layout import TensorMeta

Sum = Callable[[NDArray[Any]], NDArray[Any]]
"""A function that returns the sum of a vector over all ranks, shape [n] -> [n]."""

NAMED_MAX = 3
_WORD_BYTES = 8


class HeldBox(NamedTuple):
    """A box that this rank holds: its description and its bytes."""

    meta: TensorMeta
    data: memoryview


class ReplicaDifference(NamedTuple):
    """A box that several ranks hold with different bytes: index of its tensor, the ranks, and the box's size."""

    tensor: int
    ranks: tuple[int, ...]
    size_bytes: int


def gathered(total: Sum, rank: int, world_size: int, row: Sequence[int]) -> NDArray[np.int64]:
    """Return the rows of all ranks, shape [world_size, len(row)]; ``row`` is the row of this rank.

    ``total`` sums a vector over all ranks. Its errors are raised here.
    """
    matrix = np.zeros((world_size, len(row)), np.int64)
    matrix[rank] = row
    found: NDArray[np.int64] = total(matrix.reshape(-1)).reshape(matrix.shape)
    return found


def require_same_names(total: Sum, rank: int, world_size: int, names: Sequence[str]) -> None:
    """Check that all ranks have built tensors of the same names, in the same order.

    Raises:
        StateError: names or order differ between ranks.
    """
    said = gathered(total, rank, world_size, (len(names), _digest("\n".join(names).encode())))
    others = [other for other in range(world_size) if tuple(said[other]) != tuple(said[0])]
    if others:
        raise StateError(
            f"rank {others[0]} has built {said[others[0], 0]} parameters, rank 0 {said[0, 0]}, or parameters of other "
            "names: the ranks train different models",
            hint="build the same network and optimizer in every process, whatever its rank",
        )


def differences(total: Sum, rank: int, world_size: int, held: Sequence[HeldBox]) -> list[ReplicaDifference]:
    """Return the boxes whose copies differ between ranks. All ranks get the same list.

    Raises:
        StateError: the ranks have built different models.
    """
    require_same_names(total, rank, world_size, [each.meta.fqn for each in held])
    row = [number for each in held for number in (box_key(each.meta), _digest(each.data), len(each.data))]
    said = gathered(total, rank, world_size, row).reshape(world_size, len(held), 3)
    return [
        ReplicaDifference(index, ranks, int(said[ranks[0], index, 2]))
        for index in range(len(held))
        for ranks in parts(said[:, index, 0])
        if len(set(said[list(ranks), index, 1].tolist())) > 1
    ]


def refuse(held: Sequence[HeldBox], found: Sequence[ReplicaDifference], hint: str) -> None:
    """Raise a StateError that names the tensors whose copies differ at the start."""
    names = [repr(held[each.tensor].meta.fqn) for each in found[:NAMED_MAX]]
    more = f" and {len(found) - NAMED_MAX} more" if len(found) > NAMED_MAX else ""
    ranks = ", ".join(map(str, found[0].ranks))
    raise StateError(
        f"ranks {ranks} begin with different values of {', '.join(names)}{more}: they would train different models",
        hint=hint,
    )


def broadcast(
    total: Sum, rank: int, held: Sequence[HeldBox], found: Sequence[ReplicaDifference]
) -> dict[str, NDArray[np.uint8]]:
    """Send each differing box from the lowest rank that holds it to the other ranks that hold it.

    Returns:
        The bytes with which this rank must overwrite its boxes, by tensor name.
    """
    received = {}
    for each in found:
        words = np.zeros(-(-each.size_bytes // _WORD_BYTES), np.int64)
        if rank == each.ranks[0]:
            words.view(np.uint8)[: each.size_bytes] = np.frombuffer(held[each.tensor].data, np.uint8)
        words = total(words)
        if rank in each.ranks[1:]:
            received[held[each.tensor].meta.fqn] = words.view(np.uint8)[: each.size_bytes]
    return received


def box_key(meta: TensorMeta) -> int:
    """Return a 63-bit key of a box: equal boxes of one tensor have equal keys."""
    return _digest(f"{meta.fqn}{list(meta.shape)}{meta.box}{meta.dtype}".encode())


def parts(keys: Sequence[int] | NDArray[np.int64]) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks with equal keys. Ranks in a group ascend; groups are ordered by their lowest rank.

    ``keys`` has one key per rank.
    """
    found: dict[int, list[int]] = {}
    for rank, key in enumerate(keys):
        found.setdefault(int(key), []).append(rank)
    return tuple(tuple(ranks) for ranks in found.values())


def _digest(data: bytes | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(data) >> 1
