"""Values that a subclass of the ``Trainer`` counts in its own attributes while it computes a step.

Theory. TRL's trainers, for example, sum tokens and collect metrics in ``compute_loss``, and log them later. The block
of a step may run several times, so each run begins with the values before the first one. A replacement begins with the
values of the lost rank.

A counted value is an attribute of the Trainer that a training step has changed, and that consists of plain values
before and after it: None, numbers and texts, in lists, deques and dicts. Attributes that hold anything else, such as
tensors, stay as they are.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

from holdfast.errors import StateError
from holdfast.store.format.json_values import encode_values

log = logging.getLogger("holdfast")

VALUES_MAX = 20_000
"""The most values in one attribute: more are data of the script, and no counted values."""
KEPT_BYTES_MAX = 64 * 1024
"""The share of the counted values in what a rank keeps for its replacement (128 KiB)."""


class CountedValues:
    """The counted values of one ``trainer``."""

    def __init__(self, trainer: Any) -> None:
        self._attributes = vars(trainer)
        self._kind = type(trainer).__name__
        self._names: set[str] = set()
        self._before: dict[str, Any] = {}
        self._too_large: set[str] = set()

    def begin(self) -> None:
        """Begin a step: keep the values before it."""
        self._before = self._found()

    def put_back(self) -> None:
        """Begin a run of the block with the values before the step."""
        self._restore({name: self._before[name] for name in self._names & self._before.keys()})

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Find the attributes that change in the body, a part of the block. An aborted body counts as well."""
        before = self._found()
        try:
            yield
        finally:
            after = self._found()
            self._names |= {name for name in before.keys() & after.keys() if before[name] != after[name]}

    def own(self) -> dict[str, Any]:
        """Return the values for the replacement of this rank: all that fit, the small ones first."""
        found = self._found()
        sizes = {name: _size_of(found[name]) for name in self._names & found.keys() - self._too_large}
        kept: dict[str, Any] = {}
        room_bytes = KEPT_BYTES_MAX
        for name in sorted(sizes, key=lambda name: (sizes[name], name)):
            room_bytes -= sizes[name]
            if room_bytes >= 0:
                kept[name] = found[name]
            else:
                self._leave_out(name, sizes[name])
        return kept

    def _leave_out(self, name: str, size_bytes: int) -> None:
        self._too_large.add(name)
        log.warning(
            "holdfast: %s.%s takes %d bytes, too much to keep for a replacement: if this rank is lost, what is logged "
            "from it covers the steps since then only",
            self._kind, name, size_bytes,
        )  # fmt: skip

    def go_on(self, kept: Mapping[str, Any]) -> None:
        """Restore the values that :meth:`own` returned in an earlier process with this rank."""
        self._names |= kept.keys() & self._found().keys()
        self._restore(kept)

    def _restore(self, kept: Mapping[str, Any]) -> None:
        for name, value in kept.items():
            if name in self._names:
                self._attributes[name] = _put_back(self._attributes.get(name), value)

    def _found(self) -> dict[str, Any]:
        """Return copies of all attributes that consist of plain values."""
        found = {}
        for name, value in self._attributes.items():
            try:
                found[name] = _copied(value, count(1))
            except _NotPlainError:
                continue
        return found


class _NotPlainError(Exception):
    """The value is not made of plain values, or of too many."""


def _copied(value: Any, number: Iterator[int]) -> Any:
    """Return a copy of ``value`` in lists and dicts. Raises: _NotPlainError."""
    if next(number) > VALUES_MAX:
        raise _NotPlainError
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list | deque):
        return [_copied(item, number) for item in value]
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return {key: _copied(item, number) for key, item in value.items()}
    raise _NotPlainError


def _size_of(value: Any) -> int:
    try:
        return len(encode_values(value))
    except (StateError, ValueError):  # too large by far, or a text that is no Unicode
        return sys.maxsize


def _put_back(live: Any, kept: Any) -> Any:
    """Return ``kept``, in the containers of ``live`` where it has them: a ``defaultdict`` remains one."""
    if isinstance(kept, dict):
        into = live if isinstance(live, dict) else {}
        before = dict(into)
        into.clear()
        into.update({key: _put_back(before.get(key), item) for key, item in kept.items()})
        return into
    if isinstance(kept, list):
        listed = live if isinstance(live, list | deque) else []
        listed.clear()
        listed.extend(_put_back(None, item) for item in kept)
        return listed
    return kept
