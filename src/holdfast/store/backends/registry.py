"""The choice of the store for a location (a path or URL)."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.store.backends.interfaces import Attempt, Store
from holdfast.store.backends.local_store import LocalAttempt, LocalStore
from holdfast.store.backends.location import Place, place_of


def open_store(where: Place | str | os.PathLike[str]) -> Store:
    """Return the store at a location. Nothing is read or sent yet.

    Raises:
        UsageError: the scheme of the URL is unknown, or the package of its store is not installed.
    """
    place = place_of(where)
    if isinstance(place, Path):
        return LocalStore(place)
    if place.scheme == "faulty":
        from holdfast.store.backends.faulty_store import faulty_store

        return faulty_store(place)
    from holdfast.store.backends.s3_store import S3Store

    return S3Store(place)


def open_attempt(where: Place | str | os.PathLike[str]) -> Attempt:
    """Open the attempt at a location. A renamed attempt is opened as well.

    Raises:
        CheckpointInvalid: the attempt does not exist.
        UsageError: the scheme of the URL is unknown, or the package of its store is not installed.
    """
    place = place_of(where)
    if isinstance(place, Path):
        return LocalAttempt.open(place)
    return open_store(place.parent).open(place.name)
