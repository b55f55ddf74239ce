"""The handling of defects in a search of the script's source: they cause a warning instead of an exception."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("holdfast")


@contextmanager
def warns_of_defects(consequence: str) -> Iterator[None]:
    """Turn an exception in the ``with`` body into a warning.

    A defect of a search must neither end a training nor be hidden.

    Args:
        consequence: the consequence of the failed search, in words, for the warning.
    """
    try:
        yield
    except Exception as error:
        log.warning(
            "holdfast: %s: please report %s: %s", consequence, type(error).__name__, error, exc_info=True
        )
