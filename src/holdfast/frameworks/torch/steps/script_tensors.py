"""The search for the tensors that a script's variables hold: in attributes, containers, closures and modules.

It also finds counters of wrappers: an int attribute of an object that holds state of the session in another attribute.

Only values are searched. Classes, Python modules, the objects of torch's runtime and those of Holdfast are left out.
Long containers count as data and are also left out. The nearest values come first, and the search ends after
``VALUES_MAX`` values, so it takes a fraction of a second. No code of the script's classes runs: a lazy mapping would
load its values, and a proxy would answer for another object. So exact types are compared instead of ``isinstance``,
and only methods of the built-in types are called.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.frameworks.torch import private_api

VALUES_MAX = 10_000
LONG = 1024  # a container with more entries is data, if its first entry is no tensor
_ATOMS = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray, type, range, torch.dtype, torch.device),
    *(types.ModuleType, types.BuiltinFunctionType, types.CodeType, types.FrameType, torch.Size),
)
_RUNTIMES = ("holdfast", "torch.distributed", "torch._", "torch.autograd", "torch.fx", "torch.jit")
"""Prefixes of the names of Python modules whose objects are left out."""
_CONTAINERS = (dict, list, tuple, deque)
_ARRAYS = (torch.Tensor, np.ndarray)
_OF_A_MODULE = ("_parameters", "_buffers", "_modules")
_OF_AN_OPTIMIZER = ("state", "param_groups")


class Place(NamedTuple):
    """A variable, attribute, entry or closure cell of the script that holds a value, such as a tensor or an array.

    Attributes:
        path: the expression for this place in the script: ``ema.shadow['fc.weight']``.
        modules: the modules that have registered the tensor, the outermost first, each with its path and class.
        container: the dict, list, object or cell that holds it; None for a variable.
        key: its key in ``container``.
        value: the tensor, the array, the counter or another value.
        unlisted: True for a buffer that the ``state_dict`` of its module leaves out.
    """

    path: str
    modules: tuple[str, ...]
    container: object
    key: object
    value: Any
    unlisted: bool = False


def places_in(
    variables: Mapping[str, object], known: Collection[int], trained: Collection[int] = ()
) -> Iterator[Place]:
    """Yield each variable, attribute, entry or closure cell of the script that holds a tensor or an array.

    Yield also the counters of wrappers (see the module). The search begins at the script's variables and continues in
    the objects that they hold.

    Args:
        variables: the script's variables by name.
        known: ids of objects that are not searched, because they are part of the state.
        trained: ids of the trained models and their optimizers. An object that holds one of them is not a wrapper of
            state but the script's loop, and its numbers do not count.
    """
    wraps: dict[int, bool] = {}  # by id of the object with the attribute
    for place in values_in(variables, known):
        if _is(place.value, *_ARRAYS):
            yield place
        elif type(place.value) is int:
            holder = id(place.container)
            if holder not in wraps:
                wraps[holder] = _wraps(place.container, known, trained)
            if wraps[holder]:
                yield place


def values_in(variables: Mapping[str, object], known: Collection[int]) -> Iterator[Place]:
    """Yield each variable, attribute, entry and closure cell of the script (see the module).

    Args:
        variables: the script's variables by name.
        known: ids of objects that are not searched.
    """
    seen: set[int] = set(known)
    roots = (Place(name, (), None, name, value) for name, value in variables.items())
    ahead: deque[Iterator[Place]] = deque([roots])
    for _ in range(VALUES_MAX):
        if not ahead:
            return
        for place in ahead.popleft():
            yield place
            value = place.value
            if not _is(value, *_ARRAYS) and not _is_end(value) and id(value) not in seen:
                seen.add(id(value))
                ahead.append(_children(place))


def _wraps(holder: object, known: Collection[int], trained: Collection[int]) -> bool:
    """Return True if an object holds a known object in an attribute, and holds no trained object."""
    if holder is None or _is(holder, *_CONTAINERS):
        return False
    own = _attributes(holder)
    modules: Any = own.get("_modules")
    held = {id(each) for each in (*own.values(), *(dict.values(modules) if _is(modules, dict) else ()))}
    return not held.isdisjoint(known) and held.isdisjoint(trained)


def _is(value: object, *kinds: type) -> bool:
    return issubclass(type(value), kinds)


def _is_end(value: Any) -> bool:
    """Return True if the search does not continue inside ``value``.

    The result is True for most values: numbers, texts and empty dicts (the hooks of modules).
    """
    kind: Any = type(value)
    if _is(value, types.FunctionType):
        return str(value.__module__).startswith(_RUNTIMES)
    return _is_left_out(kind) or (kind in (dict, OrderedDict, list, tuple) and not value)


@functools.lru_cache(maxsize=4096)
def _is_left_out(kind: type) -> bool:
    return issubclass(kind, _ATOMS) or str(kind.__module__).startswith(_RUNTIMES)


def _children(place: Place) -> Iterator[Place]:
    path, modules, value = place.path, place.modules, place.value
    if _is(value, nn.Module):
        yield from _children_of_module(path, modules, value)
    elif (entries := _entries(value)) is not None:
        for key, item in entries:
            yield Place(f"{path}[{key!r}]", modules, value, key, item)
    elif _is(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            if (held := _held(cell)) is not None:
                yield Place(name, (), cell, "", held)
        for number, item in enumerate(value.__defaults__ or ()):
            yield Place(f"{path}.__defaults__[{number}]", (), value.__defaults__, number, item)
    elif _is(value, types.MethodType):
        yield Place(path, (), value, "self", value.__self__)
    elif _is(value, functools.partial):
        yield Place(path, (), value, "func", value.func)
        yield Place(f"{path}.args", (), value, "args", value.args)
        yield Place(f"{path}.keywords", (), value, "keywords", value.keywords)
    else:
        own = _attributes(value)
        for key, item in tuple(own.items()):
            if not (_is(value, Optimizer) and key in _OF_AN_OPTIMIZER):
                yield Place(f"{path}.{key}", modules, value, key, item)


def _entries(value: Any) -> list[tuple[object, Any]] | None:
    """Return keys and values of a dict, list, tuple or deque; None if ``value`` is none of these.

    A long container whose first value is not a tensor or array holds data of the script: the result is an empty list.
    """
    kind: Any = next((kind for kind in _CONTAINERS if _is(value, kind)), None)
    if kind is None:
        return None
    values = dict.values(value) if kind is dict else kind.__iter__(value)
    if kind.__len__(value) > LONG and not _is(next(iter(values)), *_ARRAYS):
        return []
    if kind is dict:
        return [(key if _is(key, str, int, float) else "...", item) for key, item in dict.items(value)]
    return list(enumerate(kind.__iter__(value)))


def _children_of_module(path: str, modules: tuple[str, ...], value: nn.Module) -> Iterator[Place]:
    here = (*modules, f"{path} ({type(value).__name__})")
    for key, item in tuple(_attributes(value).items()):
        if key in _OF_A_MODULE:
            for name, registered in _entries(item) or ():
                unlisted = key == "_buffers" and name in private_api.unlisted_buffers(value)
                yield Place(f"{path}.{name}", here, item, name, registered, unlisted)
        elif not _is(item, torch.Tensor):
            # A tensor in a plain attribute is a result of the module's forward pass (weight norm, a cache).
            yield Place(f"{path}.{key}", (), value, key, item)


def _attributes(value: object) -> Mapping[str, object]:
    """Return the attributes of an object, read by Python's own descriptors, so that no code of its class runs."""
    own: dict[str, object] = {}
    slots: dict[str, object] = {}
    for each in type(value).__mro__:
        found = vars(each)
        descriptor = found.get("__dict__")  # of a SimpleNamespace it is a member
        if isinstance(descriptor, types.GetSetDescriptorType | types.MemberDescriptorType):
            own = descriptor.__get__(value)
        for name in _names(found.get("__slots__")):
            if isinstance(slot := found.get(name), types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # not assigned
                    slots[name] = slot.__get__(value)
    return {**own, **slots} if slots else own


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots) if isinstance(slots, tuple | list) else ()


def _held(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
