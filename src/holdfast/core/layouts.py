"""The layouts of all ranks in one message.

Theory. A layout is two lines: what is the rank's own (which cells of the grids it holds) and the table of its tensors.
Ranks with the same tensors have the same table, byte for byte, and it is by far the longer line: 85 KB for 2000
tensors, 350 MB if each of 4096 ranks' were told. So each different table is kept and sent once. The core reads neither
line.

Invariants:
1. What comes out for a rank is, byte for byte, what went in.
2. Every rank's index has a table: checked where a message is taken apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from holdfast.errors import ProtocolError


def split(layout: bytes) -> tuple[bytes, bytes]:
    """The rank's own line with its end, and the table; a layout of one line has an empty table."""
    own, end, table = layout.partition(b"\n")
    return own + end, table


class Layouts(msgspec.Struct, frozen=True):
    """``ranks``: by rank (text), its own line and the index of its table."""

    tables: tuple[bytes, ...]
    ranks: dict[str, tuple[bytes, int]]

    @staticmethod
    def of(layouts: Mapping[int, tuple[bytes, bytes]]) -> Layouts:
        """From :func:`split` layouts by rank."""
        places: dict[bytes, int] = {}
        ranks = {
            str(rank): (own, places.setdefault(table, len(places))) for rank, (own, table) in layouts.items()
        }
        return Layouts(tuple(places), ranks)

    def by_rank(self) -> ByRank:
        """The layouts, each put together when it is asked for.

        Raises:
            ProtocolError: a rank that is no number, or a table that is not there.
        """
        try:
            places = {int(rank): place for rank, place in self.ranks.items()}
        except ValueError as error:
            raise ProtocolError(f"layouts of a rank that is no number: {error}") from error
        if not all(0 <= index < len(self.tables) for _, index in places.values()):
            raise ProtocolError("layouts name a table that is not among them")
        return ByRank(self.tables, places)


class ByRank(Mapping[int, bytes]):
    """Rank -> layout."""

    def __init__(self, tables: tuple[bytes, ...], places: Mapping[int, tuple[bytes, int]]) -> None:
        self._tables = tables
        self._places = places

    def __getitem__(self, rank: int) -> bytes:
        own, index = self._places[rank]
        return own + self._tables[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def but(self, rank: int, layout: bytes) -> ByRank:
        """The same with another layout of ``rank``."""
        own, table = split(layout)
        return ByRank((*self._tables, table), {**self._places, rank: (own, len(self._tables))})
