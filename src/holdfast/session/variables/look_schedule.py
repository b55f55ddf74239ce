"""The steps at which the values of the script are looked at, if this takes too long for each step."""

LOOKS = 3
GROWTH_BITS = 2  # the distance of three looks from the first look grows by a factor of 4


def is_first_look(since: int) -> bool:
    """Return whether a look is one of the first ``LOOKS``, or the first of a later group of three.

    Args:
        since: steps since the first look.
    """
    return since < LOOKS or number_of_look(since) == 0


def number_of_look(since: int) -> int | None:
    """Return which search of a group of three (0, 1 or 2) is due ``since`` steps after the first search.

    The result is None if no search is due.
    """
    if since < LOOKS:
        return since
    begin = 1 << (since.bit_length() - 1) // GROWTH_BITS * GROWTH_BITS
    return since - begin if 1 < begin and since - begin < LOOKS else None
