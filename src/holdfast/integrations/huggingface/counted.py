"""Values that a subclass of the ``Trainer`` counts in its own attributes while it computes a step.

Theory. TRL's trainers, for example, sum tokens and collect metrics in ``compute_loss``, and log them later. The block
of a step may run several times. Each run begins with the values from before the first run. A replacement begins with
the values of the lost rank.

A counted value is an attribute of the Trainer that a training step has changed. Before and after the step it must
consist of plain values: None, numbers and texts, in lists, deques and dicts. Attributes that hold other values, such
as tensors, are not restored.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from holdfast.errors import StateError
from holdfast.session.loops.plain_attributes import NotPlainError, plain_copy, put_back
from holdfast.store.format.json_values import encode_values

log = logging.getLogger("holdfast")

KEPT_BYTES_MAX = 64 * 1024
"""The largest size of the counted values, which are kept with other values of the rank (128 KiB in all)."""


class CountedValues:
    """The values that one Trainer, of a subclass of ``Trainer``, counts in its own attributes."""

    def __init__(self, trainer: Any) -> None:
        self._attributes = vars(trainer)
        self._kind = type(trainer).__name__
        self._names: set[str] = set()
        self._before: dict[str, Any] = {}
        self._too_large: set[str] = set()

    def begin(self) -> None:
        """Begin a step: keep the values from before the step."""
        self._before = self._found()

    def put_back(self) -> None:
        """Begin a run of the block: restore the values from before the step."""
        self._restore({name: self._before[name] for name in self._names & self._before.keys()})

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note which attributes of the Trainer change in the ``with`` body, even if a fault aborts the body."""
        before = self._found()
        try:
            yield
        finally:
            after = self._found()
            self._names |= {name for name in before.keys() & after.keys() if before[name] != after[name]}

    def own(self) -> dict[str, Any]:
        """Return the values to keep for a replacement of this rank: the smallest ones, at most 64 KiB in all."""
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
                self._attributes[name] = put_back(self._attributes.get(name), value)

    def _found(self) -> dict[str, Any]:
        """Return copies of all attributes that consist of plain values."""
        found = {}
        for name, value in self._attributes.items():
            try:
                found[name] = plain_copy(value, objects=False)
            except NotPlainError:
                continue
        return found


def _size_of(value: Any) -> int:
    try:
        return len(encode_values(value))
    except (StateError, ValueError):  # too large by far, or a text that is no Unicode
        return sys.maxsize
