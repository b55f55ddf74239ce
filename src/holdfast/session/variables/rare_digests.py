"""Digests of variables that are too large to be read at each update, or lie on a device.

Theory. A script may keep a bank of features on a device, or a list of large tensors. To read them at each update would
take long, or wait for the device. So their digests are taken at the first updates of a process, and at its updates 4,
16, 64 and so on. In between, the newest digest stands for the value. A process that continues the job takes digests at
its first update. If a digest is that of the first update of the job, and a later digest was another one, the script has
begun the variable again (``variable_history.py``).

Containers of objects (``[Meter() for _ in range(3)]``) have a digest of the plain values in the attributes of these
objects, and of the tensors and arrays there. Meters of libraries have one of their content (``library_meters.py``).
Tables that the script only makes larger have digests of their first parts (``growing_tables.py``).

The ranks do not compare these digests, because the digests of two ranks may be of different steps.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from itertools import islice
from types import FunctionType, ModuleType

from holdfast.frameworks.common.optional_abilities import DescribesUpdates
from holdfast.runtime.worker.script_attributes import has_dtype, has_static
from holdfast.session.variables.growing_tables import first_parts
from holdfast.session.variables.library_meters import meter_states, meter_text
from holdfast.session.variables.look_schedule import is_first_look
from holdfast.session.variables.plain_values import CONTAINERS
from holdfast.session.variables.variable_history import PlainValue
from holdfast.session.variables.watched_constants import ITEMS_MAX, WatchedConstants

DEPTH_MAX = 5
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class RareDigests:
    """The digests of the variables of one process that are not read at each update.

    Args:
        source: the adapter; None if it cannot digest values.

    Attributes:
        tables: the dimensions of tables that the script only makes larger, by name.
        constants: the watch over the variables that the source never seems to change.
    """

    def __init__(self, source: DescribesUpdates | None) -> None:
        self.tables: dict[str, frozenset[int]] = {}
        self.constants = WatchedConstants(source)
        self._source = source
        self._updates = 0  # committed in this process
        self._parts: dict[str, tuple[object, str]] = {}  # form and text of each table
        self._newest: dict[str, int | None] = {}  # None: the value has no digest
        self._meters: dict[str, str | None] = {}  # text of each meter of a library

    def committed(self) -> None:
        """Record that an update is committed."""
        self._updates += 1

    @property
    def due(self) -> bool:
        """True if new digests are taken at the next update."""
        return is_first_look(self._updates)

    def texts(
        self, values: Mapping[str, object], plain: Mapping[str, PlainValue], *, fresh: bool
    ) -> dict[str, PlainValue]:
        """Return ``plain``, with a text for each variable that it leaves out or of which it has only a number of items.

        Args:
            values: the present values of variables.
            plain: their result of :func:`plain_values`.
            fresh: take new digests.
        """
        found = dict(plain)
        for name, value in values.items():
            if name in self.tables and (
                parts := self._first_parts(name, value, plain.get(name), fresh=fresh)
            ):
                found[name] = parts
            elif name not in self.tables and _is_rare(value, plain.get(name)):
                digest = self._digest(name, value, fresh=fresh)
                if digest is not None:
                    found[name] = f"{plain.get(name, 'a tensor')} with checksum {digest & 0xFFFFFFFF:08x}"
            elif name not in plain and meter_states(value) is not None:
                if fresh or name not in self._meters:
                    self._meters[name] = meter_text(value, self._source)
                if (text := self._meters[name]) is not None:
                    found[name] = text
        return found

    def _first_parts(self, name: str, value: object, content: object, *, fresh: bool) -> str | None:
        """Return the text for a table. ``content``: the text of its whole content if that is read at each update."""
        form = getattr(value, "shape", None), content
        before, text = self._parts.pop(name, (None, None))
        if fresh or form != before:
            text = None if self._source is None else first_parts(value, self.tables[name], self._source)
        if text is not None:
            self._parts[name] = form, text
        return text

    def _digest(self, name: str, value: object, *, fresh: bool) -> int | None:
        if self._source is None:
            return None
        if fresh or name not in self._newest:
            found = self._source.digest_of(value)
            if found is None:
                parts = list(islice(_parts(value, self._source, DEPTH_MAX), ITEMS_MAX + 1))
                found = zlib.crc32("".join(parts).encode()) if len(parts) <= ITEMS_MAX else None
            self._newest[name] = found
        return self._newest[name]


def _parts(value: object, source: DescribesUpdates, depth: int) -> Iterator[str]:
    """Yield a text for each plain value, tensor and array in nested containers, and in the attributes of objects."""
    if isinstance(value, _PLAIN):
        yield repr(value)
    elif has_dtype(value):
        yield repr(source.digest_of(value))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield repr(key) if isinstance(key, _PLAIN) else type(key).__name__
            yield from _parts(item, source, depth - 1) if depth else ()
    elif isinstance(value, CONTAINERS):
        for item in value if not isinstance(value, set | frozenset) else ():
            yield from _parts(item, source, depth - 1) if depth else ()
    elif not isinstance(value, type | FunctionType | ModuleType):
        yield from _parts(getattr(value, "__dict__", {}), source, depth - 1) if depth else ()


def _is_rare(value: object, plain: PlainValue | None) -> bool:
    """Return whether a tensor or array has no plain value, or the plain value of a container is its number of items."""
    if isinstance(value, CONTAINERS):
        return plain == f"{len(value)} items" and len(value) <= ITEMS_MAX
    return plain is None and has_dtype(value) and not has_static(value, "parameters")
