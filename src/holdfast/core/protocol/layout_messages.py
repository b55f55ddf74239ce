"""The layouts of all ranks in one message.

Theory. The layout of a rank has two parts: the rank's own part (its cells of the grids, where a grid is a regular
sharding) and the table of its tensors. Ranks with the same tensors have the same table, byte for byte. The table is by
far the larger part: 85 KB for 2000 tensors, 350 MB if sent for each of 4096 ranks. So each different table is kept and
sent once. The code in ``core`` reads neither part.

Invariants:
1. The layout that a reader gets for a rank is, byte for byte, the layout that the writer put in.
2. The index of a table that a message has for a rank is valid. This is checked when the message is decoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from holdfast.errors import ProtocolError


class Layout(NamedTuple):
    """The encoded layout of one rank (see ``store.layouts.layout.RankLayout.encode``).

    ``own``: the part that only this rank has. ``table``: its table of tensors, equal on ranks with the same tensors.
    """

    own: bytes
    table: bytes


class Layouts(msgspec.Struct, frozen=True):
    """The layouts of many ranks, with each different table once.

    Attributes:
        tables: the different tables.
        ranks: for each rank (as text) the part of the layout that only this rank has, and the index of its table.
    """

    tables: tuple[bytes, ...]
    ranks: dict[str, tuple[bytes, int]]

    @staticmethod
    def of(layouts: Mapping[int, Layout]) -> Layouts:
        """Return the message that holds the given layouts by rank."""
        places: dict[bytes, int] = {}
        ranks = {
            str(rank): (layout.own, places.setdefault(layout.table, len(places)))
            for rank, layout in layouts.items()
        }
        return Layouts(tuple(places), ranks)

    def by_rank(self) -> dict[int, Layout]:
        """Return the layouts by rank.

        Raises:
            ProtocolError: a rank is not a number, or a table is missing.
        """
        if not all(0 <= index < len(self.tables) for _, index in self.ranks.values()):
            raise ProtocolError("layouts name a table that is not among them")
        try:
            return {int(rank): Layout(own, self.tables[index]) for rank, (own, index) in self.ranks.items()}
        except ValueError as error:
            raise ProtocolError(f"layouts of a rank that is no number: {error}") from error
