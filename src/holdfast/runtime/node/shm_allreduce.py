"""A board: an all-reduce in shared memory among the ranks of one node, without messages.

Theory. A vote is one small all-reduce that every rank waits for. Over sockets it would cost several hand-overs between
threads and processes, and each of them waits for the scheduler. In shared memory a rank stores its own words and reads
those of the other ranks. Every rank owns two ballots and two notes (short byte strings), used alternately. A rank may
write its ballot of vote n + 2 only after it has read the ballots of vote n + 1 of all ranks. Each of these ranks had
read the ballots of vote n of all ranks before it wrote its ballot of vote n + 1. So no ballot is overwritten before all
ranks have read it. A note is also read before it is overwritten, because there is a vote between two notes of a rank.

Invariants:
1. A record (a ballot or a note) is accepted only if its sequence number is the expected one and its digest matches. If
   a store becomes visible late, or in another order, the reader waits.
2. A vote that returns has read a ballot of every rank of the board. A posted record is kept when its rank dies.
3. Each wait ends: with the record, with an exception of the caller's function ``check``, or because the rank that has
   to write the record is gone.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import xxhash

from holdfast.errors import InternalError, PeerLost, StateError
from holdfast.runtime.node.process_info import alive

VOTE_LENGTH_MAX = 1008
NOTE_SIZE_BYTES_MAX = 128 * 1024
_HEAD_WORDS = 16  # at the start of a rank's part; the first is its process id
_RECORD_HEAD = 3  # sequence, size in bytes, digest
_BALLOT_WORDS = 1024
_NOTE_WORDS = NOTE_SIZE_BYTES_MAX // 8 + 16
_RANK_WORDS = _HEAD_WORDS + 2 * (_BALLOT_WORDS + _NOTE_WORDS)
_NAP_MIN_S = 20e-6
_NAP_MAX_S = 1e-3
_LOOK_S = 0.02  # pause between two checks whether the awaited process exists

Check = Callable[[], None]


def sum_in_votes(vector: Sequence[int], vote: Callable[[list[int]], list[int]]) -> list[int]:
    """Return the sum of ``vector`` over all ranks, computed in pieces of the length of a vote.

    Args:
        vector: numbers of this rank. Any count is allowed, if it is the same on all ranks.
        vote: returns the sum of up to ``VOTE_LENGTH_MAX`` ints over all ranks.
    """
    total: list[int] = []
    for start in range(0, len(vector), VOTE_LENGTH_MAX):
        total += vote(list(vector[start : start + VOTE_LENGTH_MAX]))
    return total


class SharedMemoryAllReduce:
    """The board (shared-memory all-reduce) of one generation.

    All ranks map one file, and each writes only its own part.

    Args:
        path: the file, in a directory of shared memory. The first rank to start creates it.
        rank, world_size: rank of this process, and size of the job. All ranks of the job are on this node.
    """

    def __init__(self, path: Path, rank: int, world_size: int) -> None:
        self._path = path
        self.rank = rank
        self._world_size = world_size
        self._votes = 0
        self._notes = [0] * world_size
        self._words: np.ndarray[tuple[int], np.dtype[np.int64]] = np.empty(0, np.int64)

    def start(self) -> Self:
        """Create or open the file, map it, and return this object.

        Raises:
            StateError: shared memory is full or cannot be written.
        """
        size_bytes = 8 * _RANK_WORDS * self._world_size
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                # Without this reservation, a full tmpfs would raise SIGBUS at a later store.
                os.posix_fallocate(fd, 0, size_bytes)
                mapping = mmap.mmap(fd, size_bytes)
            finally:
                os.close(fd)
        except OSError as error:
            raise StateError(
                f"{self._path}: {size_bytes} bytes of shared memory cannot be had: {error.strerror}",
                hint="free some space there (df -h /dev/shm)",
            ) from error
        self._words = np.frombuffer(mapping, np.int64)
        self._words[self._base(self.rank)] = os.getpid()
        return self

    def close(self) -> None:
        """Remove the file of the board. The mapping is freed together with this object."""
        self._path.unlink(missing_ok=True)

    # ------------------------------------------------------------------ use

    def reduce(self, vector: Sequence[int], check: Check) -> list[int]:
        """Post ``vector`` (int64, the same length on all ranks), and return the element-wise sum over all ranks.

        Raises:
            PeerLost: a rank is gone and has not posted its vector, or has posted one of another length.
            Exception: any exception of ``check``, which is called again and again during the wait.
        """
        if len(vector) > VOTE_LENGTH_MAX:
            raise InternalError(f"a vote of {len(vector)} words; a board holds {VOTE_LENGTH_MAX}")
        self._votes += 1
        turn = self._votes
        self._post(self._ballot(self.rank, turn), turn, np.array(vector, np.int64).tobytes())
        total = np.zeros(len(vector), np.int64)
        for rank in range(self._world_size):
            other = np.frombuffer(self._await(rank, self._ballot(rank, turn), turn, check), np.int64)
            if len(other) != len(total):
                raise PeerLost(
                    f"the ranks are in different agreements: {len(other)} words on rank {rank}, {len(total)} here"
                )
            total += other
        return [int(word) for word in total]

    def tell(self, data: bytes) -> None:
        """Post a note that other ranks read with :meth:`hear`. At most one note per rank is allowed between two votes.

        Raises:
            InternalError: the note is larger than ``NOTE_SIZE_BYTES_MAX``.
        """
        if len(data) > NOTE_SIZE_BYTES_MAX:
            raise InternalError(f"a note of {len(data)} bytes; a board holds {NOTE_SIZE_BYTES_MAX}")
        self._notes[self.rank] += 1
        turn = self._notes[self.rank]
        self._post(self._note(self.rank, turn), turn, data)

    def hear(self, rank: int, check: Check) -> bytes:
        """Wait for the next note of ``rank``, and return it.

        Raises:
            PeerLost: the rank is gone and has not posted the note.
            Exception: any exception of ``check``, which is called again and again during the wait.
        """
        self._notes[rank] += 1
        turn = self._notes[rank]
        return self._await(rank, self._note(rank, turn), turn, check)

    # ------------------------------------------------------------------ records

    def _base(self, rank: int) -> int:
        return rank * _RANK_WORDS

    def _ballot(self, rank: int, turn: int) -> int:
        return self._base(rank) + _HEAD_WORDS + (turn & 1) * _BALLOT_WORDS

    def _note(self, rank: int, turn: int) -> int:
        return self._base(rank) + _HEAD_WORDS + 2 * _BALLOT_WORDS + (turn & 1) * _NOTE_WORDS

    def _post(self, at: int, turn: int, data: bytes) -> None:
        body = self._words[at + _RECORD_HEAD : at + _RECORD_HEAD + -(-len(data) // 8)]
        body.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
        self._words[at + 1] = len(data)
        self._words[at + 2] = _digest(turn, data)
        self._words[at] = turn

    def _read(self, at: int, turn: int) -> bytes | None:
        if self._words[at] != turn:
            return None
        size_bytes = int(self._words[at + 1])
        if not 0 <= size_bytes <= NOTE_SIZE_BYTES_MAX:
            return None
        body = self._words[at + _RECORD_HEAD : at + _RECORD_HEAD + -(-size_bytes // 8)]
        data = body.tobytes()[:size_bytes]
        return data if int(self._words[at + 2]) == _digest(turn, data) else None

    def _await(self, rank: int, at: int, turn: int, check: Check) -> bytes:
        data = self._read(at, turn)
        began_s = looked_s = time.monotonic()
        while data is None:
            check()
            now_s = time.monotonic()
            time.sleep(min(max((now_s - began_s) / 16, _NAP_MIN_S), _NAP_MAX_S))
            gone = False
            if now_s - looked_s > _LOOK_S:
                looked_s = now_s
                gone = self._gone(rank)
            data = self._read(at, turn)  # after the check: a record posted before a death counts
            if gone and data is None:
                raise PeerLost(f"rank {rank} is gone", hint="see the fault that holdfast names")
        return data

    def _gone(self, rank: int) -> bool:
        pid = int(self._words[self._base(rank)])
        try:
            return pid != 0 and not alive(pid)  # 0: the rank has not started, and its agent watches it
        except OSError:  # no descriptor is left here: its agent sees whether it has ended
            return False


def _digest(turn: int, data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data, seed=turn) >> 1
