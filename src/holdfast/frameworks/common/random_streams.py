"""The ranks that draw the same random numbers.

Theory. In a script without a session, two ranks draw the same numbers exactly if their generators were in the same
state before. Scripts depend on this. Ranks that hold parts of one copy of the model need the same order of the data
and the same dropout masks. Ranks that take slices of one batch need the same batch. A session seeds all generators at
each step, so it must keep this relation, and the wrappers of a model do not always show it. So when the session of a
new job opens, the ranks compare the states of their generators. The result is part of the state of the job. A
replacement has no ranks to compare with, and a process that resumes may have drawn other numbers before.

The result is a :class:`Streams`, which gives each copy of the model the number of a stream for each generator:

============================================  ================================================================
states of one generator on the ranks          number of the stream
============================================  ================================================================
all equal                                     0
not all equal, wrappers define the copies     the number of the copy
not all equal, no wrapper defines the copies  the lowest rank with the same state (each rank counts as a copy)
============================================  ================================================================

Invariant: the result is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import xxhash

from holdfast.runtime.node.shm_allreduce import sum_in_votes

DIGEST_BITS: Final = 62
"""Bits of a digest of a generator's state. A sum over the ranks, of which one has the digest, must fit 64 bits."""

Rule = Literal["equal", "own"] | Sequence[int]
"""``equal``: all copies have stream 0; ``own``: each copy has a stream; else the number of the stream of each copy."""


@dataclass(frozen=True)
class Streams:
    """The streams of random numbers of all copies of the model, by generator.

    Attributes:
        rules: for each generator, the rule that gives a copy its stream.
    """

    rules: Mapping[str, Rule]

    def number(self, generator: str, copy: int) -> int:
        """Return the number of the stream that copy number ``copy`` of the model draws from ``generator``."""
        rule = self.rules.get(generator, "own")
        if rule == "equal":
            return 0
        return copy if isinstance(rule, str) else int(rule[copy])

    def plain(self) -> dict[str, object]:
        """Return this object as plain values, for a checkpoint."""
        return {name: rule if isinstance(rule, str) else list(rule) for name, rule in self.rules.items()}

    @staticmethod
    def of_plain(value: object, copies: int) -> Streams | None:
        """Return the streams in ``value``, a result of :meth:`plain`; None if they are not for ``copies`` copies."""
        if not isinstance(value, dict):
            return None
        for rule in value.values():
            known = rule in ("equal", "own") if isinstance(rule, str) else _is_table(rule, copies)
            if not known:
                return None
        return Streams(dict(value))


def _is_table(rule: object, copies: int) -> bool:
    fits = isinstance(rule, list) and len(rule) == copies
    return fits and all(type(number) is int and 0 <= number < copies for number in rule)  # type: ignore[attr-defined]


def digest_of_state(state: object) -> int:
    """Return a digest of the state of a generator: nested dicts of plain values and arrays."""
    return xxhash.xxh3_64_intdigest(repr(_without_arrays(state)).encode()) >> 64 - DIGEST_BITS


def _without_arrays(value: object) -> object:
    """Return the state with bytes in place of arrays, because the text of an array may leave out elements."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return {key: _without_arrays(item) for key, item in value.items()}
    return value


def compare_generators(
    digests: Mapping[str, int],
    rank: int,
    world_size: int,
    vote: Callable[[list[int]], list[int]],
    *,
    copies_known: bool,
) -> Streams:
    """Compare the states of the generators of all ranks. All ranks call it, with the same generators.

    Args:
        digests: digest of the state of each generator of this rank, of at most ``DIGEST_BITS`` bits.
        rank, world_size: rank of this process and number of ranks.
        vote: returns the sum of a vector over all ranks.
        copies_known: wrappers of the model define its data-parallel copies.

    Raises:
        PeerLost: a rank is gone.
    """
    names, mine = list(digests), list(digests.values())
    first = vote([digest if rank == 0 else 0 for digest in mine])
    *differ, known = vote([*(int(a != b) for a, b in zip(mine, first, strict=True)), int(copies_known)])
    rules: dict[str, Rule] = {}
    for name, digest, others in zip(names, mine, differ, strict=True):
        if not others:
            rules[name] = "equal"
        elif known == world_size:
            rules[name] = "own"
        else:
            firsts: dict[int, int] = {}
            states = sum_in_votes([digest if at == rank else 0 for at in range(world_size)], vote)
            table = [firsts.setdefault(state, at) for at, state in enumerate(states)]
            rules[name] = "own" if table == list(range(world_size)) else table
    return Streams(rules)
