"""Copies of weights that no optimizer trains and that a block may change before its vote.

Examples are target networks, momentum encoders and averages of the weights.

Theory. An optimizer changes weights after the vote, or in a tentative update that can be undone. The script itself
changes an average of the weights, at any point of the block. A block that runs again, or a rehearsal, would change
the average once too often. So the average is copied at the start of a block, like a buffer. Copies of all frozen
weights would cost too much. So a tensor is copied if it is small, or if it has the shape and dtype of a trained
weight (as an average has). Other tensors are copied while the memory of invariant 1 suffices: a momentum encoder also
averages layers that are frozen in the trained network, so no trained weight has their shape. Frozen layers of the
trained network come last. A tensor that did not change before the votes of several blocks is no longer copied. If
torch's count of writes or the address of such a tensor changes later, it is copied from the next block on. A block
may also replace a tensor of a module by another tensor: ``self.center = 0.9 * self.center + ...``. So the dict and
the key that hold each tensor are recorded, and after an aborted block the first tensor is put back under this key.

Invariants:
1. The copies take at most twice the memory of the trained weights, plus the memory of tensors known to change.
2. If a tensor was written before a vote and was not copied, a warning names it when its block is put back. The check
   of a block refuses such a tensor.
3. After a block was put back, every module of the user's state holds the same tensors as before the block.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import nn

from holdfast.frameworks.torch.state.boxes import Mark, local_of
from holdfast.frameworks.torch.state.optimizer_state import Undo
from holdfast.frameworks.torch.state.state import TorchState

log = logging.getLogger("holdfast")

STILL_BLOCKS = 8
ALLOWED = 2  # untrained tensors copied for each trained weight of the same shape and dtype
SMALL_NUMEL = 4096  # up to this size a tensor of any shape is copied, such as an average's counter


class _Held(NamedTuple):
    """An untrained tensor, and the dict and key that hold it when a block begins.

    Attributes:
        path: name of the user's object (empty: the model), and name of the tensor in it.
        holder: dict that holds the tensor: parameters or buffers of a module.
        key: its key in ``holder``.
        tensor: the tensor.
    """

    path: tuple[str, str]
    holder: MutableMapping[str, Any]
    key: str
    tensor: torch.Tensor

    @property
    def is_replaced(self) -> bool:
        """True if ``holder`` now holds another tensor under this key."""
        return self.holder.get(self.key) is not self.tensor

    def put_back(self) -> None:
        """Put this tensor back into ``holder``."""
        self.holder[self.key] = self.tensor


class UntrainedWeights:
    """Copies of untrained tensors that may change (kept in ``undo``), and marks of the other untrained tensors.

    A mark holds a tensor's memory and torch's count of its writes.
    """

    def __init__(self, state: TorchState, undo: Undo) -> None:
        self._state = state
        self._undo = undo
        self._moves: set[tuple[str, str]] = set()  # by path: changed before a vote at least once
        self._stood: Counter[tuple[str, str]] = Counter()  # by path: number of votes without a change
        self._kept: list[_Held] = []  # tensors copied for this block
        # Address and write count of the other tensors at the start of the block.
        self._marks: list[tuple[_Held, Mark]] = []
        self._lost: Counter[tuple[str, str]] = Counter()  # by path: changes that were not put back

    def take(self) -> None:
        """Copy or mark each untrained tensor at the start of a block."""
        self._kept, self._marks = [], []
        trained = self._state.trained()
        others = list(self._untrained(trained))
        if not others:
            return
        weights = self._trained(trained)
        allowed = Counter({form: ALLOWED * n for form, n in Counter(map(_form, weights.values())).items()})
        room = ALLOWED * sum(map(_size, weights.values()))
        copied: set[int] = set()  # a tensor that several modules share is copied once
        rest: list[_Held] = []
        for held in others:
            form = _form(held.tensor)
            fits = allowed[form] > 0 or held.tensor.numel() <= SMALL_NUMEL or id(held.tensor) in copied
            if held.path in self._moves or (fits and self._stood[held.path] < STILL_BLOCKS):
                allowed[form] -= id(held.tensor) not in copied
                room -= self._copy(held, copied)
            else:
                rest.append(held)
        beside = {name.partition(".")[0] for name in weights}
        for held in sorted(
            rest, key=lambda held: held.path[0] == "" and held.path[1].partition(".")[0] in beside
        ):
            watched = self._stood[held.path] < STILL_BLOCKS and _may_be_average(held.tensor)
            if watched and _size(held.tensor) <= room:
                room -= self._copy(held, copied)
            else:
                self._marks.append((held, Mark(held.tensor)))

    def _copy(self, held: _Held, copied: set[int]) -> int:
        """Copy a tensor, unless its ``id`` is in ``copied``. Return the size of the new copy in bytes."""
        self._kept.append(held)
        if id(held.tensor) in copied:
            return 0
        copied.add(id(held.tensor))
        self._undo.keep(held.tensor)
        return _size(held.tensor)

    def _trained(self, trained: set[int]) -> dict[str, torch.Tensor]:
        return {name: p for name, p in self._state.names.parameters.items() if id(p) in trained}

    def _untrained(self, trained: set[int]) -> Iterator[_Held]:
        parameters = self._state.names.parameters
        for name, parameter in parameters.items():
            if id(parameter) not in trained:
                yield _Held(("", name), parameters, name, parameter)
        for name, item in self._state.objects().items():
            if isinstance(item, nn.Module):
                for path, module in item.named_modules():
                    for holder in (module._parameters, module._buffers):
                        for key, tensor in holder.items():
                            if tensor is not None and id(tensor) not in trained:
                                yield _Held((name, f"{path}.{key}" if path else key), holder, key, tensor)

    def _all(self) -> list[_Held]:
        return [*self._kept, *(held for held, _ in self._marks)]

    def settle(self) -> None:
        """Find the tensors that changed in the block, at its vote. They are copied in every later block."""
        weights = self._undo.weights()
        for held in self._kept:
            if held.path in self._moves:
                continue
            same = torch.equal(local_of(held.tensor), local_of(weights[id(held.tensor)]))
            if same and not held.is_replaced:
                self._stood[held.path] += 1
            else:
                self._moves.add(held.path)
        self._moves |= {
            held.path for held, mark in self._marks if held.is_replaced or not mark.fits(held.tensor)
        }

    def put_back(self) -> None:
        """Put the tensors of an aborted block back into their modules; ``undo`` then restores their values.

        Warn about tensors that the block has written and that were not copied: their values cannot be restored.
        """
        for held in self._all():
            if held.is_replaced:
                self._moves.add(held.path)
                held.put_back()
        copied = self._undo.weights()  # also by an update ahead of the vote
        changed = [
            held.path
            for held, mark in self._marks
            if not mark.fits(held.tensor) and id(held.tensor) not in copied
        ]
        self._moves |= set(changed)
        if changed and not self._lost:
            log.warning(
                "holdfast: %s was changed before the vote of a block, for the first time, and stays so although the "
                "block is tried again (%d such): change averaged weights after optimizer.step()",
                ".".join(filter(None, changed[0])),
                len(changed),
            )
        self._lost.update(changed)

    def lost(self) -> dict[str, int]:
        """Return, for each tensor by name, the number of its changes that were not put back."""
        return {".".join(filter(None, path)): count for path, count in self._lost.items()}

    def modules(self) -> dict[str, Any]:
        """Return the state dicts, as of the start of the block, of the user's modules that have copies."""
        weights = self._undo.weights()
        before: dict[str, dict[str, torch.Tensor]] = {}
        for held in self._all():
            name, path = held.path
            before.setdefault(name, {})[path] = weights.get(id(held.tensor), held.tensor)
        copied = {held.path[0] for held in self._kept}
        copied |= {held.path[0] for held, _ in self._marks if held.is_replaced}
        return {
            name: {
                key: before[name].get(key, weights.get(id(value), value))
                for key, value in item.state_dict(keep_vars=True).items()
            }
            for name, item in self._state.objects().items()
            if name in copied
        }


def _form(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _size(tensor: torch.Tensor) -> int:
    """Return the bytes of the elements that this rank holds."""
    here = local_of(tensor)
    return here.numel() * here.element_size()


def _may_be_average(tensor: torch.Tensor) -> bool:
    """Return True if a tensor may be an average of weights; False for quantized weights and a library's own classes."""
    return tensor.is_floating_point() and type(local_of(tensor)) is torch.Tensor
