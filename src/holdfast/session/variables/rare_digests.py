"""Digests of variables that are too large to be read at each update, or lie on a device.

Theory. A script may keep a bank of features on a device, or a list of large tensors. To read them at each update would
take long, or wait for the device. So their digests are taken at the first updates of a process, and at its updates 4,
16, 64 and so on. In between, the newest digest stands for the value. A process that continues the job takes digests at
its first update. If a digest is that of the first update of the job, and a later digest was another one, the script has
begun the variable again (``variable_history.py``).

The ranks do not compare these digests, because the digests of two ranks may be of different steps.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.frameworks.common.optional_abilities import DescribesUpdates
from holdfast.session.variables.plain_values import CONTAINERS
from holdfast.session.variables.variable_history import PlainValue

FIRST_UPDATES = 3
GROWTH_BITS = 2  # from the third update on, the number of updates grows by a factor of 4 between two digests
ITEMS_MAX = 10_000
"""Largest number of items in a container of which a digest is taken."""


class RareDigests:
    """The digests of the variables of one process that are not read at each update.

    Args:
        source: the adapter; None if it cannot digest values.
    """

    def __init__(self, source: DescribesUpdates | None) -> None:
        self._source = source
        self._updates = 0  # committed in this process
        self._newest: dict[str, int | None] = {}  # None: the value has no digest

    def committed(self) -> None:
        """Record that an update is committed."""
        self._updates += 1

    @property
    def due(self) -> bool:
        """True if new digests are taken at the next update."""
        digits = self._updates.bit_length() - 1
        is_power = self._updates == 1 << digits and digits % GROWTH_BITS == 0 if digits > 0 else True
        return self._updates < FIRST_UPDATES or is_power

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
            digest = self._digest(name, value, fresh=fresh) if _is_rare(value, plain.get(name)) else None
            if digest is not None:
                found[name] = f"{plain.get(name, 'a tensor')} with checksum {digest & 0xFFFFFFFF:08x}"
        return found

    def _digest(self, name: str, value: object, *, fresh: bool) -> int | None:
        if self._source is None:
            return None
        if fresh or name not in self._newest:
            self._newest[name] = self._source.digest_of(value)
        return self._newest[name]


def _is_rare(value: object, plain: PlainValue | None) -> bool:
    """Return whether a tensor or array has no plain value, or the plain value of a container is its number of items."""
    if isinstance(value, CONTAINERS):
        return plain == f"{len(value)} items" and len(value) <= ITEMS_MAX
    return plain is None and hasattr(value, "dtype")
