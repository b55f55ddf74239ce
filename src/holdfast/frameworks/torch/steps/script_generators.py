"""The search for the random generators that a script's variables hold, also inside of objects of libraries.

The default generators are left out, because the session seeds them in each step. So are those in ``state=``, and those
of loaders and samplers, which the session seeds in each epoch.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from holdfast.frameworks.common.random_streams import digest_of_state
from holdfast.frameworks.torch.steps.script_tensors import values_in

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_SEEDED_BY_SESSION = (DataLoader, Sampler)


def generators_in(variables: Mapping[str, object], known: Collection[int]) -> dict[str, object]:
    """Return each random generator of the script by its name, an expression such as ``envs.envs[0]._np_random``.

    A generator with several names has the shortest one. The generators nearest to the variables come first.

    Args:
        variables: the script's variables by name.
        known: ids of objects that are part of the state.
    """
    found: dict[str, object] = {}
    seen = {*known, *_defaults()}
    for place in values_in(variables, known):
        value = place.value
        # A subclass may have code of the script. The state of a generator of a device would be read from there.
        if type(value) not in _KINDS or id(value) in seen or isinstance(place.container, _SEEDED_BY_SESSION):
            continue
        if not isinstance(value, torch.Generator) or value.device.type == "cpu":
            seen.add(id(value))
            found[place.path] = value
    return found


def _defaults() -> set[int]:
    """Return the ids of the default generators of torch on the CPU, ``random`` and NumPy."""
    functions: tuple[object, ...] = (
        random.random,
        np.random.random,
    )  # they are methods of the default generators
    return {id(torch.default_generator), *(id(getattr(each, "__self__", None)) for each in functions)}


def digest_of_generator(generator: object) -> int:
    """Return a digest of the present state of a generator of one of the kinds of :func:`generators_in`."""
    match generator:
        case torch.Generator():
            return digest_of_state(generator.get_state().numpy().tobytes())
        case np.random.Generator():
            return digest_of_state(generator.bit_generator.state)
        case np.random.RandomState():
            return digest_of_state(generator.get_state(legacy=False))
        case random.Random():
            return digest_of_state(generator.getstate())
    raise TypeError(f"{type(generator).__name__} is no random generator")
