"""Tensors of the script that carry state from step to step and are not part of the session.

Theory. An example is an average of weights that a script updates after the optimizer's update: it is neither a weight,
nor a buffer, nor state of an optimizer. A process that joins or resumes begins with another value of such a tensor, and
no result of a block shows that. Such tensors are found by their behaviour: they exist when a step begins, they differ
when a later step begins, and one of two conditions holds:
1. a module that is not part of the session has registered them (``AveragedModel``, a loss with a center), or
2. they have the shapes of weights of a model: weights with at least half of the model's trained elements.

A counter is also found if its object holds state of the session in another attribute. An example is YOLO's
``ModelEMA``: ``ema`` is a module, and its decay depends on ``updates``. A counter that equals a number in the
session's state is a copy of that number.

Two kinds of change count. The tensor itself was written. Or a container that existed before the first step holds
another tensor under the same key (``shadow[name] = decay * shadow[name] + ...``). A list that each step makes again
does not count as such a container, unless the source shows that the new list is computed from the old one. A sample
of the elements is compared. Tensors are found again by weak references, so none is kept alive.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast.frameworks.torch.state.boxes import local_of
from holdfast.frameworks.torch.state.optimizer_state import parameters_of
from holdfast.frameworks.torch.state.parameter_names import Models, modules_of
from holdfast.frameworks.torch.state.state import TorchState, arrays_in
from holdfast.frameworks.torch.state.tensor_memory import address_of
from holdfast.frameworks.torch.steps.block_proof import digest_of_value
from holdfast.frameworks.torch.steps.script_tensors import Place, places_in
from holdfast.frameworks.torch.steps.undeclared_schedules import UndeclaredSchedules
from holdfast.text import plural

SAMPLE = 256
_SHARED = (type(None), int, float, complex, str, bytes, tuple)
_Slot = tuple[int, object]  # id of the container, and the key; ``_BY_PATH`` and the path
_BY_PATH = 0


class _Seen(NamedTuple):
    ref: weakref.ref[Any]
    sample: int


class UndeclaredTensors:
    """The search for tensors of a script that change from step to step and are not part of the session.

    Args:
        state: state of the session.
        model: the model, or the models by name.

    Attributes:
        counters: the counters that have changed between the last two calls of :meth:`changed`.
    """

    def __init__(self, state: TorchState, model: Models) -> None:
        self._state = state
        self._model = model
        self._schedules = UndeclaredSchedules(state)
        self.counters: Sequence[str] = ()
        self._seen: dict[int, _Seen] = {}
        # Digests or counters by slot. Slots by path are added at each call of ``changed``. Other slots are added at the
        # first call only, because a later container may have the id of another one. None: before the first call.
        self._slots: dict[_Slot, int] | None = None

    def changed(self, variables: Mapping[str, object], renewed: Set[str] = frozenset()) -> list[str]:
        """Return descriptions of the tensors that have changed since the previous call. Waits for the device.

        Args:
            variables: the script's variables by name.
            renewed: variables and attributes whose container each step replaces by a new one, computed from the old
                one.
        """
        self._schedules.search()
        trained = self._state.trained()
        weights = [Counter(_shapes(m.parameters(), trained)) for _, m in modules_of(self._model)]
        known = set(self._known_memory())
        seen: dict[int, _Seen] = {}
        slots: dict[_Slot, int] = {}
        changed: dict[int, Place] = {}
        counters: list[str] = []
        saved = [item.state_dict() for item in self._state.plain_objects()]
        numbers = set(_ints_in([self._state.extras, *saved]))
        for place in places_in(variables, self._known_objects(), self._trained_objects()):
            value = place.value
            slot = _slot(place, renewed)
            if isinstance(value, int):
                if self._slots is not None and self._slots.get(slot, value) != value and value not in numbers:
                    counters.append(place.path)
                if self._slots is None or slot in self._slots:
                    slots[slot] = value
                continue
            fits = bool(place.modules) or any(_shape(value) in shapes for shapes in weights)
            if id(value) in seen or not fits or not _is_plain(value) or _memory(value) in known:
                continue
            sample = _sample(value)
            before = self._seen.get(id(value))
            if before is not None and before.ref() is value:
                moved = before.sample != sample
            else:
                moved = self._slots is not None and self._slots.get(slot, sample) != sample
            if moved:
                changed[id(value)] = place
            seen[id(value)] = _Seen(weakref.ref(value), sample)
            has_slot = self._slots is None or slot in self._slots or slot[0] == _BY_PATH
            if place.container is not None and has_slot:
                slots[slot] = sample
        self._seen, self._slots = seen, slots
        self.counters = counters
        return _in_words(list(changed.values()), weights)

    def require_savable(self) -> None:
        """Raise StateError if the session's state holds a value that cannot be saved."""
        self._state.collect()

    def moved(self) -> list[str]:
        """Return descriptions of schedules outside of the session that have moved since a call of :meth:`changed`."""
        return self._schedules.moved()

    def _trained_objects(self) -> set[int]:
        models = [module for _, model in modules_of(self._model) for module in model.modules()]
        return {id(each) for each in (*models, *(held.optimizer for held in self._state.optimizers.values()))}

    def _known_objects(self) -> set[int]:
        extras = self._state.extras
        declared = [*extras.values(), *self._state.schedulers.values(), extras, self._state.scaler]
        # Python has one object for all equal small values, so other objects of the script hold the same ones.
        return {id(each) for each in declared if not isinstance(each, _SHARED)}

    def _known_memory(self) -> Iterator[int]:
        state = self._state
        yield from map(_memory, state.names.parameters.values())
        yield from (_memory(live) for slot in state.names.buffers if (live := slot.get()) is not None)
        for optimizer in state.optimizers.values():
            inner = optimizer.optimizer
            yield from map(_memory, parameters_of(inner))
            yield from (_memory(item) for _, item in arrays_in(list(inner.state.values()), ""))
        yield from (_memory(place.value) for place in places_in({"": state.extras}, ()))


def _slot(place: Place, renewed: Set[str]) -> _Slot:
    """Return the identity of a place: container and key, or its path if each step replaces the container.

    A buffer that the ``state_dict`` leaves out has another identity with another shape: a table that has grown.
    """
    outer = place.path
    while outer.endswith("]"):
        outer = outer.rpartition("[")[0]
        if outer in renewed:
            return _BY_PATH, place.path
    return id(place.container), (place.key, _shape(place.value)) if place.unlisted else place.key


def _in_words(changed: list[Place], weights: Iterable[Counter[torch.Size]]) -> list[str]:
    """Return descriptions of the changed places: names of modules, and of tensors that are copies of weights."""
    # Outermost module -> the path of modules that all its changed tensors have in common.
    modules: dict[str, list[str]] = {}
    for place in changed:
        if place.modules:
            common = modules.setdefault(place.modules[0], list(place.modules))
            common[:] = [name for name, other in zip(common, place.modules, strict=False) if name == other]
    found = [common[-1] for common in modules.values()]
    copies = [place for place in changed if not place.modules]
    for shapes in weights:
        left, covered = shapes.copy(), 0
        for place in copies:
            shape = _shape(place.value)
            if left[shape] > 0:
                left[shape] -= 1
                covered += shape.numel()
        if covered and 2 * covered >= sum(shape.numel() * number for shape, number in shapes.items()):
            more = f" (and {plural(len(copies) - 1, 'tensor')} more)" if len(copies) > 1 else ""
            found.append(f"{copies[0].path}{more}")
            break
    return found


def _ints_in(value: object) -> Iterator[int]:
    """Yield the ints in nested dicts, lists and tuples."""
    if type(value) is int:
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _ints_in(item)


def _shapes(parameters: Iterable[torch.Tensor], trained: set[int]) -> Iterator[torch.Size]:
    for parameter in parameters:
        if parameter.requires_grad or id(parameter) in trained:
            yield _shape(parameter)


def _shape(value: Any) -> torch.Size:
    return torch.Size(value.shape) if isinstance(value, np.ndarray) else local_of(value).shape


def _is_plain(value: Any) -> bool:
    """Return True if the elements of a tensor or array can be read.

    A tensor of another library's class may refuse this.
    """
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "fiub"
    try:
        strided = value.layout is torch.strided and not value.is_meta and not value.is_quantized
        return strided and local_of(value).numel() > 0 and local_of(value).untyped_storage().data_ptr() != 0
    except (RuntimeError, NotImplementedError, TypeError):
        return False


def _memory(value: Any) -> int:
    """Return the address of the memory that a tensor or array shares with its views."""
    if isinstance(value, np.ndarray):
        return value.ctypes.data
    return address_of(value)


def _sample(value: Any) -> int:
    """Return a digest of up to ``SAMPLE`` elements of a tensor or array."""
    row = value.reshape(-1) if isinstance(value, np.ndarray) else local_of(value).reshape(-1)
    return digest_of_value(row[:: -(-len(row) // SAMPLE) or 1])
