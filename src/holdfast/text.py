"""Functions that write counts, numbers and suggestions as text for people."""

from collections.abc import Iterable, Sequence


def plural(count: int, noun: str) -> str:
    """Return the count with the noun: ``1 step``, ``2 steps``."""
    return f"{count:,} {noun_of(count, noun)}"


def noun_of(count: int, noun: str) -> str:
    """Return the form of the noun for this count, without the count: ``rank`` or ``ranks``."""
    if count == 1:
        return noun
    return f"{noun}es" if noun.endswith(("x", "ch", "ss")) else f"{noun}s"


def closest(word: str, words: Sequence[str]) -> str:
    """Return the word of ``words`` that the user probably meant by ``word``; empty if none is likely.

    The result is the only word that begins with ``word``, or otherwise a similar word.
    """
    import difflib  # slow to import, and most runs make no mistake

    begun = [each for each in words if each.startswith(word)]
    if len(begun) == 1:
        return begun[0]
    found = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    return found[0] if found else ""


def ranges(ranks: Iterable[int]) -> str:
    """Return ascending numbers as text, with consecutive numbers joined: ``0-3, 8``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in runs)


def span(duration_s: float) -> str:
    """Return a duration in the unit that fits: ``0.3 s``, ``42 s``, ``3 min 20 s``, ``2 h 5 min``."""
    if duration_s < 10:
        return f"{duration_s:.1f} s"
    minutes, seconds = divmod(round(duration_s), 60)
    if minutes == 0:
        return f"{seconds} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
