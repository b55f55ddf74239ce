"""The DataLoaders of an iterable that the session reads again from its start, prepared for each epoch.

Theory. A script may give a loader around another one (timm's ``PrefetchLoader``), or a ``DataLoader`` whose
``__iter__`` is its own (``DataLoaderX``). The session cannot make such a loader again around another order. It sets the
epoch of the samplers and datasets inside, seeds their generators, and ends the workers that a loader keeps. So an
epoch begins in each process as in a process that has read no earlier epoch.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from holdfast.frameworks.torch import private_api

DEPTH_MAX = 4
"""Largest number of objects and containers from the user's iterable to a DataLoader in it."""
OBJECTS_MAX = 1000
"""Largest number of objects at one distance that are searched. More of them are data."""


def inner_loaders(user: Any) -> list[DataLoader[Any]]:
    """Return the DataLoaders that ``user`` holds in its attributes; ``user`` itself if it is a DataLoader."""
    found: dict[int, DataLoader[Any]] = {}
    ahead = [user]
    for _ in range(DEPTH_MAX):
        found |= {id(each): each for each in ahead if isinstance(each, DataLoader)}
        held = (item for each in ahead if not isinstance(each, DataLoader) for item in _held(each))
        ahead = list(islice(held, OBJECTS_MAX))
    return list(found.values())


def _held(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, Dataset | Sampler | torch.nn.Module | torch.Tensor):
        return ()
    return cast("dict[str, Any]", getattr(value, "__dict__", {})).values()


def begin_epoch(user: Any, epoch: int, seed: int | None) -> None:
    """Prepare ``user`` for an epoch: set its number, seed the generators of its loaders, and end their workers.

    Args:
        seed: seed of the generators; None if the state of the loader holds theirs.
    """
    loaders = inner_loaders(user)
    inside = [owner for loader in loaders for owner in _owners(loader)]
    set_epoch(
        epoch, *inside, getattr(user, "dataset", None), *samplers_in(getattr(user, "sampler", None)), user
    )
    for loader in loaders:
        private_api.forget_workers(loader)
    for owner in (*loaders, *inside):
        generator = getattr(owner, "generator", None)
        if seed is not None and isinstance(generator, torch.Generator):
            generator.manual_seed(seed)


def set_epoch(epoch: int, *owners: Any) -> None:
    """Call ``set_epoch`` of each of ``owners`` that has one, once. The choice of the last one counts."""
    last = {id(owner): number for number, owner in enumerate(owners)}
    for owner in (each for number, each in enumerate(owners) if last[id(each)] == number):
        if callable(getattr(owner, "set_epoch", None)):
            owner.set_epoch(epoch)


def samplers_in(sampler: Any) -> list[Any]:
    """Return a sampler after the samplers inside it, the innermost first."""
    found: list[Any] = []
    while sampler is not None and len(found) < DEPTH_MAX:
        found.append(sampler)
        sampler = getattr(sampler, "sampler", getattr(sampler, "batch_sampler", None))
    return found[::-1]


def _owners(loader: DataLoader[Any]) -> list[Any]:
    """Return the objects of a loader that may draw by epoch."""
    return [loader.dataset, *samplers_in(loader.sampler), *samplers_in(loader.batch_sampler)]
