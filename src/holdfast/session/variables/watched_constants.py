"""Tensors, containers and numbers that the source never seems to change, and on which the updates depend.

Theory. The search of the source finds a change by its form: an assignment, ``x.add_(y)``, ``x[i] = y``. It does not
find a change through a view (``row = bank[i]; row.add_(x)``), through a function that returns its argument, or by
``torch._foreach_add_(rows, y)``. To the search such a variable is a constant. So the constants that can change are
watched while the script runs. A tensor counts its changes in place, also those through its views, so a look costs a
comparison of numbers. A digest tells whether the content is another one. Writes through ``tensor.data`` or a NumPy
array with the same memory are not counted. So some looks also read one small constant, in turn.

A number of the script is watched if it is an attribute of an object or class of the script, or an item of a dict, and
if only code before the session seems to set it. So a change by ``C.n += 1`` (read as ``c.n``), by a thread, by
``setattr(o, name, y)`` or in a function that was not inlined is found, whatever its form.

A constant stays out of the history of the variables until it has changed. From then on it is one of the variables on
which the updates depend, with the content of the first look as its first value.

Invariants:
1. A look that is not due reads the unchanged constants whose count has grown, and at most one small constant.
2. A constant that has changed has two texts that differ: that of the first look in this process, and the newest one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, cast

from holdfast.frameworks.common.optional_abilities import CountsChanges, DescribesUpdates
from holdfast.runtime.worker.script_attributes import has_dtype, static_of
from holdfast.runtime.worker.script_frames import owners_of, values_of
from holdfast.session.variables.aliases import is_of_script
from holdfast.session.variables.deciding_variables import Places
from holdfast.session.variables.look_schedule import is_first_look
from holdfast.session.variables.loop_inputs import is_set_before_session
from holdfast.session.variables.plain_values import present_values
from holdfast.session.variables.variable_history import NUMBER, Names, PlainValue

CONTENT = "a value with checksum "
"""The begin of the text for the content of a constant that has changed."""
SIZE_BYTES_MAX = 64 << 20
ITEMS_MAX = 10_000
"""Largest number of values in a container of which a digest is taken."""
COUNTED_MAX = 64
"""Largest number of values, in all nested containers, that are looked at in each step."""
SMALL_SIZE_BYTES_MAX = 1 << 20
READ_EVERY = 8
"""Number of looks of which one finds the variables by their names, and reads a small constant."""
VAIN_MAX = 3
"""After so many digests without another content, one is taken only when a search of all values is due."""
DEPTH_MAX = 4
_NUMBERS = (bool, int, float, complex, type(None))
_CONTAINERS = (list, tuple, dict)


class _Reading(NamedTuple):
    """The newest look at a constant: its counts of changes, its content, and the digests that were taken in vain."""

    counts: object
    text: str
    vain: int = 0


class WatchedConstants:
    """The constants of one process on which its updates depend.

    Args:
        source: the adapter; None if it cannot digest values, so nothing is watched.

    Attributes:
        changed: the names of the constants that have changed in this job.
    """

    def __init__(self, source: DescribesUpdates | None) -> None:
        self._source = source
        self._counter: CountsChanges | None = source if isinstance(source, CountsChanges) else None
        self._names: dict[str, tuple[tuple[str, int], Places]] = {}
        self._held: dict[str, Callable[[], object]] = {}
        self._numbers: dict[str, Callable[[], object]] = {}
        self._at_begin: dict[str, object] = {}
        self._first: dict[str, str] = {}
        self._seen: dict[str, _Reading] = {}
        self.changed: set[str] = set()
        self._looks = 0

    def watch(self, names: Names) -> None:
        """Watch those of the variables ``names`` that are numbers of the script, or whose values can change in place.

        Read them for the first time.
        """
        if self._source is None:
            return
        for name, value in present_values(names).items():
            if isinstance(value, PlainValue):
                if (read := _reader(name, names[name])) is not None:
                    self._names[name], self._numbers[name] = names[name], read
                    self._first[name] = _text_of_number(value)
            elif _can_change(value) and (text := self._text(name, value, fresh=True)) is not None:
                self._names[name], self._first[name] = names[name], text
                self._held[name] = _reference(value)

    def begins(self) -> None:
        """Read the numbers where a block begins."""
        self._at_begin = {name: read() for name, read in self._numbers.items()}

    def changed_numbers(self) -> Names:
        """Return the numbers that have changed since the call before, with their places.

        This is for an update. Between two updates, the script may set a number for an evaluation (``training``). A
        number that the block sets before its update (the size of its batch) is watched no longer.
        """
        found: dict[str, tuple[tuple[str, int], Places]] = {}
        for name, read in list(self._numbers.items()):
            value = read()
            if self._at_begin.get(name, value) != value:
                del self._numbers[name]
            elif isinstance(value, PlainValue) and _text_of_number(value) != self._first[name]:
                found[name] = self._names[name]
                del self._numbers[name]
        self.changed |= found.keys()
        return found

    def look(self) -> Names:
        """Return the tensors and containers that have changed since the look before, with their places."""
        watched = {name: at for name, at in self._names.items() if name in self._held.keys() - self.changed}
        if not watched:
            return {}
        number, self._looks = self._looks, self._looks + 1
        due = is_first_look(number)
        by_name = due or number % READ_EVERY == 0
        names = list(watched)
        turn = names[number // READ_EVERY % len(names)] if by_name else ""
        # To find a variable by its name takes longer than to compare its count.
        values = present_values(watched) if by_name else {name: self._held[name]() for name in names}
        values = {name: value for name, value in values.items() if value is not None}  # the tensor was freed
        found: dict[str, tuple[tuple[str, int], Places]] = {}
        for name, value in values.items():
            text = self._text(name, value, fresh=due or (name == turn and _is_small(value)))
            if text is not None and text != self._first[name]:
                found[name] = watched[name]
        self.changed |= found.keys()
        return found

    def first(self, name: str) -> str:
        """Return the text for the content of a constant at the first look in this process."""
        return self._first[name]

    def texts(self, values: Mapping[str, object], *, fresh: bool) -> dict[str, PlainValue]:
        """Return the texts for the present ``values`` of constants that have changed.

        Args:
            values: the values by name.
            fresh: take new digests. Otherwise the newest digest stands for a value, as in ``rare_digests.py``.
        """
        found: dict[str, PlainValue] = {}
        for name, value in values.items():
            seen = self._seen.get(name)
            text = self._text(name, value, fresh=True) if fresh or seen is None else seen.text
            if text is not None:
                found[name] = text
        return found

    def stand_at(self, newest: Mapping[str, PlainValue]) -> None:
        """Take over which constants have changed, from the newest values of the loaded state."""
        self.changed = {
            name
            for name, text in newest.items()
            if isinstance(text, str) and text.startswith((CONTENT, NUMBER))
        }

    def _text(self, name: str, value: object, *, fresh: bool) -> str | None:
        if isinstance(value, PlainValue):
            return _text_of_number(value)
        counts = self._counts(value)
        seen = self._seen.get(name)
        if seen is not None and not fresh and (counts == seen.counts or seen.vain >= VAIN_MAX):
            return seen.text
        digest = self._digest(value)
        if digest is None:
            return None
        text = f"{CONTENT}{digest & 0xFFFFFFFF:08x}"
        vain = 0 if seen is None or text != seen.text else seen.vain + (counts != seen.counts)
        self._seen[name] = _Reading(counts, text, vain)
        return text

    def _digest(self, value: object) -> int | None:
        if self._source is None or _size_bytes(value) > SIZE_BYTES_MAX:
            return None
        return self._source.digest_of(value)

    def _counts(self, value: object) -> object:
        """Return a value that differs after each counted change of ``value``; None if its changes are not counted."""
        if self._counter is None:
            return None
        if (count := self._counter.changes_of(value)) is not None:
            return id(value), count
        found: list[object] = []
        for item in _items(value):
            if len(found) > COUNTED_MAX:
                return None
            found.append(item if isinstance(item, _NUMBERS) else (id(item), self._counter.changes_of(item)))
        return found


def _same(value: object) -> object:
    return value


def _reference(value: object) -> Callable[[], object]:
    """Return a function that returns ``value``, or None after it was freed. A container is not freed."""
    if not isinstance(value, _CONTAINERS):
        with suppress(TypeError):  # an object with slots only
            return weakref.ref(value)
    return partial(_same, value)


def _text_of_number(value: PlainValue) -> str:
    return f"{NUMBER}{value!r}"


def _reader(name: str, at: tuple[tuple[str, int], Places]) -> Callable[[], object] | None:
    """Return a function that reads a number of the script: an attribute or an item of a dict, by its present owner.

    The result is None if the number is no such value, if code computes it, or if code after the begin of the session
    may set it.
    """
    place, places = at
    owners = owners_of(name)
    owner = values_of(owners[-1:], place).get(owners[-1]) if owners else None
    part = name.removeprefix(owners[-1]) if owners else ""
    if isinstance(owner, dict):
        read: Callable[[], object] = partial(owner.get, part[2:-2])
    elif owner is not None and is_of_script(
        cast("type", owner) if issubclass(type(owner), type) else type(owner)
    ):
        read = partial(_attribute, _reference(owner), part[1:])
    else:
        return None
    return read if isinstance(read(), PlainValue) and is_set_before_session(name, place, places) else None


def _attribute(owner: Callable[[], object], attribute: str) -> object:
    """Return the attribute without running code of the script; None if its owner was freed."""
    return static_of(owner(), attribute)


def _can_change(value: object) -> bool:
    """Return whether ``value`` is a tensor or array, or a container of them or of numbers."""
    return has_dtype(value) or (isinstance(value, _CONTAINERS) and bool(value))


def _items(value: Any, depth: int = DEPTH_MAX) -> Iterator[object]:
    """Yield the items of nested containers; a container ``depth`` levels below ``value``, or another value, as it is.

    Of a container, ``ITEMS_MAX`` items and one more are yielded, so that a caller sees that there are too many.
    """
    if isinstance(value, _CONTAINERS) and depth:
        # A list at once: another thread may change the container.
        for item in list(islice(value.values() if isinstance(value, dict) else value, ITEMS_MAX + 1)):
            yield from _items(item, depth - 1)
    else:
        yield value


def _is_small(value: object) -> bool:
    on_host = (getattr(item, "is_cpu", True) for item in _items(value))
    return _size_bytes(value) <= SMALL_SIZE_BYTES_MAX and all(on_host)


def _size_bytes(value: Any) -> int:
    """Return the size of the tensors and arrays in ``value``; more than ``SIZE_BYTES_MAX`` if there are too many."""
    total = 0
    for number, item in enumerate(_items(value)):
        total += int(getattr(item, "nbytes", 0)) if has_dtype(item) else 64
        if total > SIZE_BYTES_MAX or number >= ITEMS_MAX:
            return SIZE_BYTES_MAX + 1
    return total
