"""Local results of collectives that have no peers: every output is filled from local data, none stays uninitialised.

They are used in loopback, and for collectives of an aborted step, whose results are thrown away. Shapes, sizes and
memory must be valid, so that the step ends without an error. In-place collectives leave their tensor unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensors = Sequence[torch.Tensor]


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` into ``target`` if both have the same number of elements; otherwise set ``target`` to zero."""
    target = target.detach()
    if target.numel() == source.numel():
        target.copy_(source.detach().reshape(target.shape))
    else:
        target.zero_()


def fill_lists(outputs: Sequence[Tensors], inputs: Tensors) -> None:
    """Set ``outputs[i][rank] = inputs[i]`` for every rank (all-gather, gather)."""
    for row, source in zip(outputs, inputs, strict=False):
        for target in row:
            copy(target, source)


def fill_by_rank(outputs: Sequence[Tensors], inputs: Tensors) -> None:
    """Set ``outputs[rank][i] = inputs[i]`` for every rank (coalesced all-gather)."""
    for row in outputs:
        for target, source in zip(row, inputs, strict=False):
            copy(target, source)


def pick(outputs: Tensors, inputs: Sequence[Tensors], rank: int) -> None:
    """Set ``outputs[i] = inputs[i][rank]`` (scatter, reduce-scatter), or zeros if this rank gave no ``inputs[i]``."""
    for i, target in enumerate(outputs):
        if i < len(inputs) and inputs[i]:
            copy(target, inputs[i][rank])
        else:
            target.detach().zero_()


def repeat(output: torch.Tensor, source: torch.Tensor, world_size: int) -> None:
    """Fill ``output`` with ``world_size`` copies of ``source`` (all-gather into one tensor)."""
    rows = output.detach().reshape(world_size, -1)
    rows.copy_(source.detach().reshape(1, -1).expand_as(rows))
    if rows.data_ptr() != output.data_ptr():  # not contiguous: the reshape was a copy
        output.detach().copy_(rows.reshape(output.shape))


def chunk(output: torch.Tensor, source: torch.Tensor, rank: int, world_size: int) -> None:
    """Set ``output`` to the ``rank``-th of ``world_size`` equal parts of ``source`` (reduce-scatter of one tensor)."""
    copy(output, source.detach().reshape(world_size, -1)[rank])


def zip_copy(outputs: Tensors, inputs: Tensors) -> None:
    """Set ``outputs[i] = inputs[i]`` (all-to-all)."""
    for target, source in zip(outputs, inputs, strict=True):
        copy(target, source)


def one(outputs: Tensors) -> None:
    """Fill the output tensors of a receive with the number 1.

    A pipeline stage asks its neighbours in this way if they know the shapes of their tensors; 1 means yes.
    """
    for target in outputs:
        target.detach().fill_(1)
