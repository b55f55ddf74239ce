"""The flight recorder: the last collectives of a process, in its status page, as evidence for the cause of a hang.

A record is written with a few stores into shared memory and no system call. A read at the same moment may mix halves of
two records. This is accepted, because a record is one piece of evidence among others and is read when no rank makes
progress.
"""

from __future__ import annotations

import struct
import time
from typing import NamedTuple

from holdfast.core.protocol.status_page import FLIGHT_SLOT_BYTES, FLIGHT_SLOTS, Word

HEAD_WORDS = 4
_SLOT_WORDS = FLIGHT_SLOT_BYTES // 8
TEXT_SIZE_BYTES = FLIGHT_SLOT_BYTES - 8 * HEAD_WORDS
_SLOT = struct.Struct(f"={HEAD_WORDS}q{TEXT_SIZE_BYTES}s")


class Recorded(NamedTuple):
    """The record of one collective. Times are in nanoseconds on the monotonic clock.

    ``order``: number of the collective in this process. ``number``: its number in its group. ``ended_ns``: 0 while it
    is in progress.
    """

    order: int
    group: str
    number: int
    what: str
    begun_ns: int
    ended_ns: int
    broken: bool

    def __str__(self) -> str:
        state = "broken" if self.broken else "done" if self.ended_ns else "under way"
        took = f" after {(self.ended_ns - self.begun_ns) / 1e6:.1f} ms" if self.ended_ns else ""
        return f"#{self.number} of group {self.group}: {self.what}, {state}{took}"


def text_of(group: str, what: str) -> bytes:
    """Return the bytes with the group and the operation of a collective, for :meth:`Flight.begin`."""
    return f"{group}\t{what}".encode()[:TEXT_SIZE_BYTES].ljust(TEXT_SIZE_BYTES, b"\0")


class Flight:
    """The ring buffer with the records of the last collectives.

    Args:
        area: the ``FLIGHT_SLOTS * FLIGHT_SLOT_BYTES`` bytes of the status page for the records.
        words: the status page as 64-bit words.
    """

    def __init__(self, area: memoryview, words: memoryview) -> None:
        self._bytes = area
        self._slots = area.cast("q")
        self._words = words

    def begin(self, count: int, number: int, text: bytes) -> None:
        """Record that collective ``count`` of this process begins.

        Args:
            number: the number of the collective in its group.
            text: result of :func:`text_of`.
        """
        _SLOT.pack_into(
            self._bytes, count % FLIGHT_SLOTS * FLIGHT_SLOT_BYTES, number, time.monotonic_ns(), 0, count, text
        )

    def end(self, count: int, broken: bool = False) -> None:
        """Record the end of collective ``count`` of this process. ``broken`` is True if it ended with an error."""
        at = count % FLIGHT_SLOTS * _SLOT_WORDS
        if self._slots[at + 3] == count:
            now_ns = time.monotonic_ns()
            self._slots[at + 2] = -now_ns if broken else now_ns
            if broken and not self._words[Word.FREED_NS]:  # a fence resets it
                self._words[Word.FREED_NS] = now_ns

    def counted(self, count: int) -> None:
        """Publish the number of collectives on the status page. A session, if there is one, does this itself."""
        self._words[Word.COLLECTIVES] = self._words[Word.SEQUENCE] = count

    def waits(self) -> bool:
        """Return True if the newest collective is in progress.

        An older one may also be in progress, because its caller never waited for it.
        """
        ended_ns, count = self._newest()
        return count != 0 and ended_ns == 0

    def rests(self) -> bool:
        """Return True if the newest collective is over. Return False also if there was no collective."""
        return self._newest()[0] != 0

    def _newest(self) -> tuple[int, int]:
        """Return the end time of the newest collective (0 while in progress) and its number (0 if there was none)."""
        at = self._words[Word.COLLECTIVES] % FLIGHT_SLOTS * _SLOT_WORDS
        return self._slots[at + 2], self._slots[at + 3]

    def read(self) -> list[Recorded]:
        """Return the recorded collectives, oldest first."""
        found = []
        for slot in range(FLIGHT_SLOTS):
            at = slot * _SLOT_WORDS
            number, begun_ns, ended_ns, count = self._slots[at : at + HEAD_WORDS]
            if not count or count % FLIGHT_SLOTS != slot:
                continue
            start = slot * FLIGHT_SLOT_BYTES + 8 * HEAD_WORDS
            raw = bytes(self._bytes[start : start + TEXT_SIZE_BYTES]).rstrip(b"\0")
            group, _, what = raw.decode("utf-8", "replace").partition("\t")
            found.append(Recorded(count, group, number, what, begun_ns, abs(ended_ns), ended_ns < 0))
        return sorted(found)

    def close(self) -> None:
        """Release the views of the status page."""
        self._slots.release()
        self._bytes.release()
