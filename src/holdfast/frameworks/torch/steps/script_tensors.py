"""The walk from the script's variables to the tensors that they hold: attributes, containers, closures, modules.

Only values are walked. Classes, Python modules and the objects of torch's runtime are left out, and so is what belongs
to Holdfast. Long containers are data. The nearest values come first, and the walk ends after ``VALUES_MAX`` of them, so
that it takes a fraction of a second.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

VALUES_MAX = 20_000
LONG = 1024  # entries of a container that is data, if the first of them is no tensor
_ATOMS = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray, type, range, torch.dtype, torch.device),
    *(types.ModuleType, types.BuiltinFunctionType, types.CodeType, types.FrameType, torch.Size),
)
_RUNTIMES = ("holdfast", "torch.distributed", "torch._", "torch.autograd", "torch.fx", "torch.jit")
"""Python modules, with all modules inside them, whose objects are left out."""
_CONTAINERS = (dict, list, tuple, deque)
_OF_A_MODULE = ("_parameters", "_buffers", "_modules")
_OF_AN_OPTIMIZER = ("state", "param_groups")


class Place(NamedTuple):
    """A place of the script that holds a tensor or an array.

    Attributes:
        path: the place in words of the script: ``ema.shadow['fc.weight']``.
        module: the path and class of the outermost module that has registered the tensor; empty: none.
        container: the dict, list, object or cell that holds it; None: a variable.
        key: its key there.
        value: the tensor or array.
    """

    path: str
    module: str
    container: object
    key: object
    value: Any


class _Visit(NamedTuple):
    path: str
    module: str
    value: Any


def places_in(variables: Mapping[str, object], known: Collection[int]) -> Iterator[Place]:
    """Yield each place that is reached from the script's variables.

    Args:
        variables: values by name.
        known: ids of objects that are not walked: they are part of the state.
    """
    seen: set[int] = set()
    ahead: deque[_Visit] = deque()
    for name, value in variables.items():
        if isinstance(value, torch.Tensor | np.ndarray):
            yield Place(name, "", None, name, value)
        else:
            ahead.append(_Visit(name, "", value))
    while ahead and len(seen) < VALUES_MAX:
        visit = ahead.popleft()
        if id(visit.value) in seen or id(visit.value) in known or _left_out(visit.value):
            continue
        seen.add(id(visit.value))
        for place in _children(visit):
            if isinstance(place.value, torch.Tensor | np.ndarray):
                yield place
            elif not isinstance(place.value, _ATOMS):
                ahead.append(_Visit(place.path, place.module, place.value))


def _left_out(value: object) -> bool:
    home = value if isinstance(value, types.FunctionType) else type(value)
    return isinstance(value, _ATOMS) or (home.__module__ or "").startswith(_RUNTIMES)


def _children(visit: _Visit) -> Iterator[Place]:
    path, module, value = visit
    if isinstance(value, nn.Module):
        yield from _children_of_module(path, module, value)
    elif isinstance(value, _CONTAINERS) and len(value) > LONG and not _holds_tensors(value):
        return
    elif isinstance(value, dict):
        yield from (Place(f"{path}[{key!r}]", module, value, key, item) for key, item in tuple(value.items()))
    elif isinstance(value, _CONTAINERS):
        for number, item in enumerate(tuple(value)):
            yield Place(f"{path}[{number}]", module, value, number, item)
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            if (held := _held(cell)) is not None:
                yield Place(name, "", cell, "", held)
        for number, item in enumerate(value.__defaults__ or ()):
            yield Place(f"{path}.__defaults__[{number}]", "", value.__defaults__, number, item)
    elif isinstance(value, types.MethodType):
        yield Place(path, "", value, "self", value.__self__)
    elif isinstance(value, functools.partial):
        yield Place(path, "", value, "func", value.func)
        yield Place(f"{path}.args", "", value, "args", value.args)
        yield Place(f"{path}.keywords", "", value, "keywords", value.keywords)
    else:
        own = _attributes(value)
        for key, item in tuple(own.items()):
            if not (isinstance(value, Optimizer) and key in _OF_AN_OPTIMIZER):
                yield Place(f"{path}.{key}", module, value, key, item)


def _holds_tensors(container: Iterable[object]) -> bool:
    values = container.values() if isinstance(container, dict) else container
    return isinstance(next(iter(values), None), torch.Tensor | np.ndarray)


def _children_of_module(path: str, module: str, value: nn.Module) -> Iterator[Place]:
    outermost = module or f"{path} ({type(value).__name__})"
    for registered in (value._parameters, value._buffers):
        for key, tensor in tuple(registered.items()):
            if tensor is not None:
                yield Place(f"{path}.{key}", outermost, registered, key, tensor)
    for key, child in tuple(value._modules.items()):
        yield Place(f"{path}.{key}", outermost, value._modules, key, child)
    own = _attributes(value)
    for key, item in tuple(own.items()):
        # A tensor in an attribute is a result of the module's forward pass (weight norm, a cache).
        if key not in _OF_A_MODULE and not isinstance(item, torch.Tensor):
            yield Place(f"{path}.{key}", "", value, key, item)


def _attributes(value: object) -> Mapping[str, object]:
    """Return the attributes of an object. No code of its class runs: a stand-in would answer for another object."""
    own: dict[str, object] = {}
    try:
        own = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        pass  # it has slots alone
    slots = {
        name: item
        for each in type(value).__mro__
        for name in _slots(each)
        if (item := _in_slot(value, name)) is not None
    }
    return {**own, **slots} if slots else own


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(name for name in slots if name != "__dict__")


def _in_slot(value: object, name: str) -> object:
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return None


def _held(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
