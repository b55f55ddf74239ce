"""Copies of weights that no optimizer trains and that a block may change before its vote.

Examples are target networks and momentum encoders.

Theory. An optimizer changes weights after the vote, or tentatively with a copy. An average of weights is changed by the
script itself, at any place: in forward, or after a tentative update. A block that runs again would update the average
once too often, and so would a rehearsal. So the average is copied at the start of a block, like a buffer. To copy
frozen weights too would cost too much. A tensor is copied if it has the shape and dtype of a trained weight, as an
average has, or is small. A tensor that did not change before the votes of several blocks is no longer copied. A later
change is noticed by torch's count of writes, or by a change of its address, and the tensor is copied from the next
block on.

Invariants:
1. Copies take at most twice the memory of the trained weights, and the memory of tensors known to change.
2. A tensor that changed before a vote and was not copied is reported when a block is put back.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from holdfast.frameworks.torch.state.boxes import local_of, writes_of
from holdfast.frameworks.torch.state.optimizer_state import Undo, parameters_of
from holdfast.frameworks.torch.state.state import TorchState

log = logging.getLogger("holdfast")

STILL_BLOCKS = 8
ALLOWED = 2  # copies for each trained weight
SMALL_NUMEL = 4096  # of any shape: an average's counter


class UntrainedWeights:
    """Copies (in a snapshot's ``undo``) of untrained tensors that may change, and marks of the others."""

    def __init__(self, state: TorchState, undo: Undo) -> None:
        self._state = state
        self._undo = undo
        self._moves: set[int] = set()  # by id: changed before a vote at least once
        self._stood: Counter[int] = Counter()  # by id: number of votes without a change
        self._kept: list[torch.Tensor] = []  # tensors copied for this block
        # Address and write count of the other tensors at the start of the block.
        self._marks: list[tuple[str, torch.Tensor, tuple[int, int]]] = []
        self._told = False

    def take(self) -> None:
        """Copy or mark each untrained tensor at the start of a block."""
        self._kept, self._marks = [], []
        trained = {id(p) for o in self._state.optimizers.values() for p in parameters_of(o.optimizer)}
        others = list(self._untrained(trained))
        if not others:
            return
        allowed = Counter(
            {form: ALLOWED * n for form, n in Counter(_form(p) for p in self._trained(trained)).items()}
        )
        for name, tensor in others:
            key, form = id(tensor), _form(tensor)
            fits = allowed[form] > 0 or tensor.numel() <= SMALL_NUMEL
            if key in self._moves or (fits and self._stood[key] < STILL_BLOCKS):
                allowed[form] -= 1
                self._undo.keep(tensor)
                self._kept.append(tensor)
            else:
                self._marks.append((name, tensor, _mark(tensor)))

    def _trained(self, trained: set[int]) -> Iterator[torch.Tensor]:
        for parameter in self._state.names.parameters.values():
            if parameter.requires_grad and id(parameter) in trained:
                yield parameter

    def _untrained(self, trained: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._state.names.parameters.items():
            if not (parameter.requires_grad and id(parameter) in trained):
                yield name, parameter
        for name, item in self._state.objects().items():
            if isinstance(item, nn.Module):
                for key, tensor in chain(item.named_parameters(), item.named_buffers()):
                    if id(tensor) not in trained:
                        yield f"{name}.{key}", tensor

    def settle(self) -> None:
        """Find, at the vote, the tensors that changed in the block; they are copied in every later block."""
        weights = self._undo.weights()
        for tensor in self._kept:
            key = id(tensor)
            if key in self._moves:
                continue
            if torch.equal(local_of(tensor), local_of(weights[key])):
                self._stood[key] += 1
            else:
                self._moves.add(key)
        self._moves |= {id(tensor) for _, tensor, mark in self._marks if _mark(tensor) != mark}

    def tell(self) -> None:
        """Warn about tensors that an aborted block has changed and that were not copied, so cannot be restored."""
        changed = [name for name, tensor, mark in self._marks if _mark(tensor) != mark]
        self._moves |= {id(tensor) for name, tensor, _ in self._marks if name in changed}
        if changed and not self._told:
            self._told = True
            log.warning(
                "holdfast: %s was changed before the vote of a block, for the first time, and stays so although the "
                "block is tried again (%d such): change averaged weights after optimizer.step()",
                changed[0],
                len(changed),
            )

    def modules(self) -> dict[str, Any]:
        """Return the state of those of the user's modules that were copied, as it was at the start of the block."""
        weights = self._undo.weights()
        return {
            name: {
                key: weights.get(id(value), value) for key, value in item.state_dict(keep_vars=True).items()
            }
            for name, item in self._state.objects().items()
            if isinstance(item, nn.Module)
            and any(id(t) in weights for t in chain(item.parameters(), item.buffers()))
        }


def _form(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _mark(tensor: torch.Tensor) -> tuple[int, int]:
    return local_of(tensor).data_ptr(), writes_of(tensor)
