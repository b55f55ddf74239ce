"""Defects of a search in the script's source: a warning in place of an exception."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("holdfast")


@contextmanager
def warns_of_defects(consequence: str) -> Iterator[None]:
    """Turn an exception of a search into a warning. It must not end a training, nor be hidden.

    Args:
        consequence: what follows from a search that failed, in words.
    """
    try:
        yield
    except Exception as error:
        log.warning(
            "holdfast: %s: please report %s: %s", consequence, type(error).__name__, error, exc_info=True
        )
