"""The board (an all-reduce in shared memory): votes and broadcasts of real processes, and the end of a wait."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from holdfast.errors import InternalError, PeerLost, StateError
from holdfast.runtime.node import shm_allreduce
from holdfast.runtime.node.shm_allreduce import NOTE_SIZE_BYTES_MAX, VOTE_LENGTH_MAX, SharedMemoryAllReduce

WORLD_SIZE = 4
ROUNDS = 300
_SPAWN = multiprocessing.get_context("spawn")


class Told(Exception):
    """An exception that the check of a wait raises."""


def never() -> None:
    """Let the wait continue."""


def ballot(seed: int, rank: int, turn: int) -> list[int]:
    """Return words that no other rank posts and no other round has."""
    numbers = random.Random(f"{seed}.{rank}.{turn}")
    return [numbers.randrange(-(2**40), 2**40) for _ in range(1 + turn % 9)]


def many_rounds(path: Path, rank: int, seed: int, to_parent: Connection) -> None:
    """Run votes and broadcasts at random paces. Report ``right`` when every result was correct."""
    board = SharedMemoryAllReduce(path, rank, WORLD_SIZE).start()
    pace = random.Random(seed * 31 + rank)
    for turn in range(ROUNDS):
        if pace.random() < 0.05:
            time.sleep(pace.random() * 0.002)
        source = turn % WORLD_SIZE
        note = b"%d.%d" % (seed, turn) * (1 + turn % 50)
        if rank == source:
            board.tell(note)
        else:
            assert board.hear(source, never) == note
        everyone = [ballot(seed, other, turn) for other in range(WORLD_SIZE)]
        assert board.reduce(everyone[rank], never) == [sum(words) for words in zip(*everyone, strict=True)]
    to_parent.send("right")


def vote_once(path: Path, rank: int, seed: int, to_parent: Connection) -> None:
    """Cast one vote of two ranks. Report the sums, or the rank that was missing."""
    board = SharedMemoryAllReduce(path, rank, 2).start()
    to_parent.send("here")
    try:
        to_parent.send(board.reduce([1, seed], never))
    except PeerLost as error:
        to_parent.send(error.message)
    time.sleep(60.0)


Job = Callable[[Path, int, int, Connection], None]


def start(
    job: Job, path: Path, rank: int, seed: int
) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    """Start a rank in its own process. Return the process and the connection to it."""
    mine, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=job, args=(path, rank, seed, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, mine


@pytest.mark.parametrize("seed", [1, 2])
def test_every_rank_reads_the_same_sums_and_notes(tmp_path: Path, seed: int) -> None:
    ranks = [start(many_rounds, tmp_path / "board", rank, seed) for rank in range(WORLD_SIZE)]
    assert [line.recv() for _, line in ranks] == ["right"] * WORLD_SIZE
    for process, _ in ranks:
        process.join()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_dead_rank_ends_the_wait(tmp_path: Path, how: signal.Signals) -> None:
    board = SharedMemoryAllReduce(tmp_path / "board", 0, 2).start()
    process, line = start(vote_once, tmp_path / "board", 1, 5)
    assert line.recv() == "here"
    assert board.reduce([1, 2], never) == [2, 7]
    assert process.pid is not None
    os.kill(process.pid, how)
    with pytest.raises(PeerLost, match="rank 1"):
        board.reduce([1, 2], never)
    process.join()


def test_a_rank_whose_state_cannot_be_read_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a free descriptor, no process can be looked up. Regression: all peers counted as lost."""

    def full(pid: int) -> bool:
        looks.append(pid)
        raise OSError(errno.EMFILE, "Too many open files")

    looks: list[int] = []
    monkeypatch.setattr(shm_allreduce, "alive", full)
    board = SharedMemoryAllReduce(tmp_path / "board", 0, 2).start()
    SharedMemoryAllReduce(tmp_path / "board", 1, 2).start()

    def enough() -> None:
        if len(looks) > 1:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        board.reduce([1, 2], enough)


def test_the_ballot_of_a_dead_rank_counts(tmp_path: Path) -> None:
    process, line = start(vote_once, tmp_path / "board", 1, 5)
    assert line.recv() == "here"
    board = SharedMemoryAllReduce(tmp_path / "board", 0, 2).start()
    while not board._words[board._ballot(1, 1)]:
        time.sleep(0.001)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert board.reduce([1, 2], never) == [2, 7]


def test_the_check_ends_the_wait_for_a_rank_that_never_came(tmp_path: Path) -> None:
    board = SharedMemoryAllReduce(tmp_path / "board", 0, 2).start()
    deadline_s = time.monotonic() + 0.1

    def check() -> None:
        if time.monotonic() > deadline_s:
            raise Told

    with pytest.raises(Told):
        board.reduce([1], check)
    with pytest.raises(Told):
        board.hear(1, check)


@pytest.mark.parametrize("word", [1, 2, 3])
def test_a_record_that_is_not_whole_is_not_believed(tmp_path: Path, word: int) -> None:
    """The record is in the state in which a processor shows it that delays some of the stores."""
    ours = SharedMemoryAllReduce(tmp_path / "board", 0, 2).start()
    theirs = SharedMemoryAllReduce(tmp_path / "board", 1, 2).start()
    at = theirs._ballot(1, 1)
    theirs._post(at, 1, (7).to_bytes(8, "little"))
    right = int(theirs._words[at + word])
    theirs._words[at + word] = right ^ 4
    looks = 0

    def check() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            theirs._words[at + word] = right

    assert ours.reduce([1], check) == [8]
    assert looks >= 3


def test_ranks_in_different_agreements_get_no_sum(tmp_path: Path) -> None:
    ours = SharedMemoryAllReduce(tmp_path / "board", 0, 2).start()
    theirs = SharedMemoryAllReduce(tmp_path / "board", 1, 2).start()
    theirs._post(theirs._ballot(1, 1), 1, bytes(24))
    with pytest.raises(PeerLost, match="in different agreements: 3 words on rank 1, 2 here"):
        ours.reduce([1, 2], never)


def test_limits(tmp_path: Path) -> None:
    board = SharedMemoryAllReduce(tmp_path / "board", 0, 1).start()
    assert board.reduce([3] * VOTE_LENGTH_MAX, never) == [3] * VOTE_LENGTH_MAX
    with pytest.raises(InternalError, match="holds"):
        board.reduce([3] * (VOTE_LENGTH_MAX + 1), never)
    with pytest.raises(InternalError, match="holds"):
        board.tell(b"x" * (NOTE_SIZE_BYTES_MAX + 1))
    board.close()
    board.close()
    with pytest.raises(StateError, match="cannot be had"):
        SharedMemoryAllReduce(tmp_path / "missing" / "board", 0, 1).start()
