"""The optimizer state that a block changes before its update, for example an average of the norms of gradients.

Theory. A block that runs again starts from the state of its first start. Most optimizers change their state only in
``step()``, after the vote, so that it needs no copy. But a method that clips gradients may keep averages in the state,
and change them in the block. The first blocks of a process copy all small entries of the state, and note which of them
the block has changed or added when the update comes. The later blocks copy only the entries with these names. Large
entries are not copied: the check of the block finds a block that depends on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from holdfast.frameworks.torch.state.boxes import writes_of
from holdfast.frameworks.torch.state.optimizer_state import clone

SMALL_NUMEL = 4096
"""Largest entry of an optimizer's state, in elements, that is copied."""
FIRST_BLOCKS = 8
"""Blocks with an update, check runs included, for which all small entries of an optimizer's state are copied."""
_PLAIN = (bool, int, float)


class _Entry(NamedTuple):
    """An entry of the state of a parameter: the value, torch's count of writes to it, and a copy."""

    live: Any
    writes: int
    copy: Any


class EarlyState:
    """Copies, from the start of a block, of the entries of optimizer states that the block may change.

    Args:
        optimizers: the optimizers of the session by name.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self._optimizers = optimizers
        self._names: set[str] = set()  # of entries that a block has changed
        self._updates = dict.fromkeys(optimizers, 0)  # compared blocks by the name of the optimizer
        self._compared: set[str] = set()  # optimizers that were about to step in this block
        # Optimizer -> parameter -> entry by its name.
        self._kept: dict[str, dict[torch.Tensor, dict[str, _Entry]]] = {}

    def take(self) -> None:
        """Copy the entries at the start of a block."""
        self._compared = set()
        self._kept = {
            name: {
                parameter: {key: _entry(value) for key, value in self._entries(name, entries)}
                for parameter, entries in _states(optimizer)
            }
            for name, optimizer in self._optimizers.items()
            if self._names or self._is_new(name)
        }

    def compare(self, name: str) -> None:
        """Note the entries that the block has changed or added before the first update of optimizer ``name``."""
        if name in self._compared or not self._is_new(name):
            return
        self._compared.add(name)
        kept = self._kept.get(name, {})
        for parameter, entries in _states(self._optimizers[name]):
            before = kept.get(parameter, {})
            for key, value in self._entries(name, entries):
                entry = before.get(key)
                if entry is None or entry.live is not value or entry.writes != _writes(value):
                    self._names.add(key)
        self._updates[name] += 1

    def put_back(self) -> None:
        """Give all entries the values from the start of the block, and remove the entries that the block has added."""
        with torch.no_grad():
            for name, kept in self._kept.items():
                for parameter, entries in _states(self._optimizers[name]):
                    before = kept.get(parameter, {})
                    for key in [key for key, _ in self._entries(name, entries) if key not in before]:
                        del entries[key]
                    for key, entry in before.items():
                        if isinstance(entry.live, torch.Tensor) and entry.writes != _writes(entry.live):
                            entry.live.copy_(
                                entry.copy
                            )  # each write ends the log of gradients (`update_replay.py`)
                        entries[key] = entry.live

    def clear(self) -> None:
        """Drop the copies, because the update of the block is final."""
        self._kept = {}

    def before(self, optimizer: Optimizer, state: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Return ``state``, the state of ``optimizer``, with the entries from the start of the block."""
        name = next((name for name, each in self._optimizers.items() if each is optimizer), "")
        kept = self._kept.get(name)
        if kept is None:
            return state
        found = dict(state)
        for parameter, entries in _states_in(state):
            before = kept.get(parameter, {})
            added = {key for key, _ in self._entries(name, entries)} - before.keys()
            held = {key: value for key, value in entries.items() if key not in added}
            found[parameter] = {**held, **{key: entry.copy for key, entry in before.items()}}
        return found

    def _is_new(self, name: str) -> bool:
        return self._updates[name] < FIRST_BLOCKS

    def _entries(self, name: str, entries: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield the small entries of a parameter: all in the first blocks, later those with the noted names."""
        for key, value in entries.items():
            if (key in self._names or self._is_new(name)) and _is_small(value):
                yield key, value


def _states(optimizer: Optimizer) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    """Yield each parameter of an optimizer that has a state, with this state."""
    return _states_in(optimizer.state)


def _states_in(state: Mapping[Any, Any]) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    for parameter, entries in state.items():
        if isinstance(parameter, torch.Tensor) and isinstance(entries, dict):
            yield parameter, entries


def _entry(value: Any) -> _Entry:
    return _Entry(value, _writes(value), clone(value))


def _writes(value: Any) -> int:
    counted = isinstance(value, torch.Tensor) and not value.is_inference()
    return writes_of(value) if counted else 0


def _is_small(value: Any) -> bool:
    """Return True for a number, and for a plain tensor with few elements."""
    return type(value) in _PLAIN or (type(value) is torch.Tensor and value.numel() <= SMALL_NUMEL)
