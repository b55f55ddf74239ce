"""Counts and numbers in what people read."""

from collections.abc import Iterable


def plural(count: int, noun: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{count:,} {noun_of(count, noun)}"


def noun_of(count: int, noun: str) -> str:
    """The noun alone, for this count: ``rank`` or ``ranks``."""
    if count == 1:
        return noun
    return f"{noun}es" if noun.endswith(("x", "ch", "ss")) else f"{noun}s"


def ranges(ranks: Iterable[int]) -> str:
    """Ascending numbers as text, runs shortened: ``0-3, 8``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in runs)
