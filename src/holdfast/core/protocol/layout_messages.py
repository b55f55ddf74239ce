"""The layouts of all ranks in one message.

Theory. A layout is two pieces: what is the rank's own (which cells of the grids it holds) and the table of its tensors.
Ranks with the same tensors have the same table, byte for byte, and it is by far the longer one: 85 KB for 2000 tensors,
350 MB if each of 4096 ranks' were told. So each different table is kept and sent once, and is one object wherever it
is. The core reads neither piece.

Invariants:
1. What comes out for a rank is, byte for byte, what went in.
2. Every rank's index has a table: checked where a message is taken apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from holdfast.errors import ProtocolError


class Layout(NamedTuple):
    """What one rank says that it holds, encoded (``store.layouts.layout.RankLayout.encode``)."""

    own: bytes
    table: bytes


class Layouts(msgspec.Struct, frozen=True):
    """``ranks``: by rank (text), its own piece and the index of its table."""

    tables: tuple[bytes, ...]
    ranks: dict[str, tuple[bytes, int]]

    @staticmethod
    def of(layouts: Mapping[int, Layout]) -> Layouts:
        """From layouts by rank."""
        places: dict[bytes, int] = {}
        ranks = {
            str(rank): (layout.own, places.setdefault(layout.table, len(places)))
            for rank, layout in layouts.items()
        }
        return Layouts(tuple(places), ranks)

    def by_rank(self) -> dict[int, Layout]:
        """Inverse of :meth:`of`.

        Raises:
            ProtocolError: a rank that is no number, or a table that is not there.
        """
        if not all(0 <= index < len(self.tables) for _, index in self.ranks.values()):
            raise ProtocolError("layouts name a table that is not among them")
        try:
            return {int(rank): Layout(own, self.tables[index]) for rank, (own, index) in self.ranks.items()}
        except ValueError as error:
            raise ProtocolError(f"layouts of a rank that is no number: {error}") from error
