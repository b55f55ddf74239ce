"""The difference between the updates of two ranks, in words.

Theory. A vote shows that a replacement is about to make other updates than the other ranks (``equal_updates.py``), but
not which ones. All ranks then raise an error. Before the error, the replacement and another rank publish their updates
in the key-value store, and each rank compares its own with those of the other side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from holdfast.errors import GroupError
from holdfast.runtime.worker.published_values import first_published, published
from holdfast.runtime.worker.worker_client import WorkerClient
from holdfast.store.format.json_values import decode_values
from holdfast.text import plural

Updates = Mapping[str, Mapping[str, list[float]]]
"""The numbers of each setting of the optimizers that step, by the names of optimizer and setting."""

WAIT_S = 5.0
NAMED_MAX = 3  # differences in an error


def described(updates: Updates) -> str:
    """Return the optimizers that step, with their learning rates: ``steps 'adam' (lr 0.1)``."""
    steps = [
        f"{name!r}{f' (lr {numbers[0]:g})' if (numbers := settings.get('lr')) else ''}"
        for name, settings in updates.items()
    ]
    return f"steps {', '.join(steps)}" if steps else "makes no update"


def difference(client: WorkerClient | None, rank: int, step: int, mine: Updates, *, replaces: bool) -> str:
    """Return how the updates of another rank in ``step`` differ from those of this rank.

    The result is empty if the difference is not known.

    Args:
        rank: number of this rank.
        mine: the updates of this rank.
        replaces: this process replaces a lost process. A replacement is compared with another rank, and each other
            rank is compared with a replacement.
    """
    if client is None:
        return ""
    key = f"holdfast/updates/{client.generation}/{step}"
    first_published(
        client, f"{key}/{replaces}", [rank, mine], f"the updates of the ranks in step {step} were"
    )
    try:
        found = published(client, f"{key}/{not replaces}", "when updates were compared", WAIT_S)
    except GroupError:
        return ""
    if not found:
        return ""
    other, theirs = cast("tuple[int, dict[str, Any]]", decode_values(found, key))
    return in_words(mine, other, theirs)


def in_words(mine: Updates, other: int, theirs: Updates) -> str:
    """Return how the updates ``theirs`` of rank ``other`` differ from ``mine``; empty if they are equal."""
    if mine.keys() != theirs.keys():
        return f"rank {other} {described(theirs)}"
    differences = [*_differences(mine, other, theirs)]
    more = len(differences) - NAMED_MAX
    return ", ".join(differences[:NAMED_MAX]) + (f" and {plural(more, 'more setting')}" if more > 0 else "")


def _differences(mine: Updates, other: int, theirs: Updates) -> Iterator[str]:
    """Yield a text for each setting that differs, with the first number in which it differs."""
    for name, settings in mine.items():
        for setting, numbers in settings.items():
            found = theirs[name].get(setting, [])
            if len(numbers) != len(found):
                yield f"{setting} of {name!r} has {len(numbers)} numbers here and {len(found)} on rank {other}"
            elif differing := [pair for pair in zip(numbers, found, strict=True) if pair[0] != pair[1]]:
                here, there = differing[0]
                yield f"{setting} of {name!r} is {here} here and {there} on rank {other}"
