"""Counts in what people read."""


def plural(count: int, noun: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{count:,} {noun_of(count, noun)}"


def noun_of(count: int, noun: str) -> str:
    """The noun alone, for this count: ``rank`` or ``ranks``."""
    if count == 1:
        return noun
    return f"{noun}es" if noun.endswith(("x", "ch", "ss")) else f"{noun}s"
