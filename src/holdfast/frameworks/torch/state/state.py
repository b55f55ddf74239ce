"""The training state as named tensors and plain values, for saving and loading.

Theory. Everything that training changes is either a tensor or a plain value. A tensor is known by a name and by the
boxes that this rank holds of it. ``collect`` walks the state once and returns both kinds. A *frozen* collection reads
buffers, schedules, scaler and tentatively updated weights from the copies made at the start of the step. So it shows
the last committed step even while the main thread is inside an aborted one.

Names: parameters and buffers as in the user's module; ``optimizer.<name>.<parameter>.<key>``;
``scheduler.<name>.<key>``; ``scaler.<key>``; ``state.<name>.<key>``. The result of a module's ``get_extra_state`` is
called ``<module>._extra_state``, as in torch, and its tensors ``<module>._extra_state.<key>``. All buffers are saved,
even those that a module does not persist. A forward pass may have changed them, and a retry in another process must
start from the same values.
"""

from __future__ import annotations

import functools
import logging
import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import nn
from torch.optim import Optimizer

from holdfast.errors import CheckpointMismatch, InternalError, StateError, UsageError
from holdfast.frameworks.common.restore_in_place import has_state
from holdfast.frameworks.common.state_tree import Plain, join, split
from holdfast.frameworks.common.user_state import tell_other_names
from holdfast.frameworks.torch.state.boxes import (
    DTYPES,
    TORCH_DTYPES,
    LocalPart,
    byte_view,
    copy_bytes,
    cuts_of,
    global_shape,
    is_direct,
    local_of,
    own_bytes,
    parts_of,
    placed,
    refuse_undeclared,
    region_of,
    writes_of,
)
from holdfast.frameworks.torch.state.declared_hyperparameters import Declared
from holdfast.frameworks.torch.state.devices import await_devices, devices_of, named_errors
from holdfast.frameworks.torch.state.hand_sharded import HandCut
from holdfast.frameworks.torch.state.locked_pages import host_bytes, host_pieces
from holdfast.frameworks.torch.state.optimizer_state import (
    Undo,
    allocate,
    by_name,
    hyperparameters,
    parameters_of,
    refuse_in_backward,
    trained_by,
)
from holdfast.frameworks.torch.state.parameter_names import Models, names_of
from holdfast.frameworks.torch.state.restore_in_place import put_into
from holdfast.frameworks.torch.state.rng import Generator
from holdfast.frameworks.torch.state.tensor_memory import address_of, share_memory
from holdfast.frameworks.torch.state.zero_redundancy import state_of
from holdfast.runtime.worker.script_attributes import instance_of
from holdfast.store.format.json_values import encode_values
from holdfast.store.layouts.layout import Box, Catalogue, RankLayout, TensorMeta, check_tensor

log = logging.getLogger("holdfast")

_PLAIN = frozenset({type(None), bool, int, float, str, bytes})

GENERATORS = (torch.Generator, np.random.Generator, random.Random)


class StepStartCopies(NamedTuple):
    """Copies, made at the start of a step, of the state that the step may change (see ``snapshot.py``)."""

    buffers: Mapping[str, torch.Tensor]  # fqn -> copy
    groups: Mapping[str, list[dict[str, Any]]]  # optimizer -> settings of its parameter groups
    plain: Mapping[
        str, Any
    ]  # "scheduler.<name>" or "scaler" -> state dict; a module's name -> its extra state
    extras: Mapping[str, Any]  # the user's plain values by name, and the state of small objects
    undo: Undo


class StateBefore(NamedTuple):
    """Copies of values that the script may change before its next block.

    They are made when the session gives a step to the script, and when a loop begins or ends.
    """

    groups: Mapping[str, list[dict[str, Any]]]  # optimizer -> settings of its parameter groups
    plain: Mapping[str, Any]  # "scheduler.<name>" -> state dict
    extras: Mapping[str, Any]  # the user's plain values by name, and the state of small objects
    buffers: Mapping[str, torch.Tensor]  # fqn -> copy


NOTHING_BEFORE = StateBefore({}, {}, {}, {})


def arrays_in(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield all tensors and arrays in a tree of values, each with its key path.

    It runs at each step, so it creates no intermediate objects.
    """
    if isinstance(value, torch.Tensor | np.ndarray):
        yield path, value
        return
    for key, item in _items_of(value):
        if type(item) not in _PLAIN:
            yield from arrays_in(item, f"{path}.{key}")


def _items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the items of a dict, list, tuple or deque with their keys; for any other value nothing."""
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, list | tuple | deque) else ()


def _nested(value: Any) -> Iterator[Any]:
    """Yield the values in a tree of dicts, lists and tuples, without numbers and texts."""
    for _, item in _items_of(value):
        if type(item) not in _PLAIN:
            yield item
            yield from _nested(item)


class TorchCollected:
    """The training state at one moment: tensors by name, and plain values; implements the store's ``TensorSource``."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.values: dict[str, Plain] = {}
        self._parts: dict[str, dict[Box, LocalPart]] = {}
        self._own: dict[tuple[str, Box], tuple[int, memoryview | None]] = {}  # with its address
        self._layout: RankLayout | None = None
        self._copied_from: set[torch.device] = set()

    def add(self, value: Any, path: str) -> Plain:
        """Add ``value`` to the state's tensors under the name ``path``, if it is a tensor or an array.

        Returns: the plain value that replaces it in the tree of values; None if it is neither a tensor nor an array.
        """
        if isinstance(value, np.ndarray):
            return {"array": self.add(_from_array(value, path), path)}
        if not isinstance(value, torch.Tensor):
            return None
        if path in self.tensors:
            raise StateError(f"two tensors of the state are called {path!r}", hint="rename one of them")
        if value.dtype not in DTYPES or value.layout is not torch.strided or value.is_meta:
            raise StateError(
                f"{path}: a tensor of {value.dtype}, {value.layout} on {value.device} cannot be saved"
            )
        self.tensors[path] = value
        return path

    def parts(self, fqn: str) -> dict[Box, LocalPart]:
        """Return this rank's regions of one tensor, by box."""
        if fqn not in self._parts:
            self._parts[fqn] = {part.box: part for part in parts_of(self.tensors[fqn], fqn)}
        return self._parts[fqn]

    def view(self, fqn: str, box: Box) -> memoryview:
        """Return the C-contiguous bytes of one box; they share memory with the state if possible."""
        own = self.own(fqn, box)
        if own is not None:
            return own
        with named_errors(f"{fqn} cannot be read"):
            return host_bytes(self.region(fqn, box))

    def pieces(self, fqn: str, box: Box) -> Iterator[memoryview]:
        """Yield the bytes of one box piece after piece (the store's ``PiecewiseSource``)."""
        own = self.own(fqn, box)
        if own is not None:
            yield own
            return
        with named_errors(f"{fqn} cannot be read"):
            yield from host_pieces(self.region(fqn, box))

    def piece(self, fqn: str, box: Box, start: int, stop: int) -> memoryview:
        """Return bytes ``start`` to ``stop`` of one box (``frameworks.common.optional_abilities.GivesPieces``)."""
        own = self.own(fqn, box)
        if own is not None:
            return own[start:stop]
        region = self.region(fqn, box)
        stop = min(stop, region.numel() * region.element_size())
        data = memoryview(bytearray(max(stop - start, 0)))
        if data:
            self.copy_to(fqn, box, start, stop, data)
            self.finish_copies()
        return data

    def own(self, fqn: str, box: Box) -> memoryview | None:
        """Return the memory of one box if it holds the bytes in C order, otherwise None; the result is cached."""
        region = self.region(fqn, box)
        address, known = region.data_ptr(), self._own.get((fqn, box))
        if known is None or known[0] != address:  # `tensor.data = other` exchanges the memory
            known = self._own[fqn, box] = address, own_bytes(region)
        return known[1]

    def copy_to(self, fqn: str, box: Box, start: int, stop: int, goal: memoryview) -> None:
        """Begin to copy bytes ``start`` to ``stop`` of one box into ``goal`` (the store's ``DeviceSource``)."""
        own = self.own(fqn, box)
        if own is None:
            region = self.region(fqn, box)
            self._copied_from |= devices_of([region])
            with named_errors(f"{fqn} cannot be read"):
                copy_bytes(region, start, stop, goal)
        else:
            np.copyto(np.frombuffer(goal, np.uint8), np.frombuffer(own, np.uint8)[start:stop])

    def finish_copies(self) -> None:
        """Wait until the copies that :meth:`copy_to` began have ended."""
        devices, self._copied_from = self._copied_from, set()
        for device in devices:
            with named_errors(f"copies from {device} did not end well"):
                torch.get_device_module(device).current_stream(device).synchronize()

    def devices(self) -> set[torch.device]:
        """Return the accelerators that hold the state."""
        return devices_of(self.tensors.values())

    def region(self, fqn: str, box: Box) -> torch.Tensor:
        """Return the tensor of one box; it shares storage with the state."""
        part = self.parts(fqn).get(box)
        if part is None:
            raise InternalError(f"this rank does not hold {fqn}{box}")
        local = local_of(self.tensors[fqn])
        return local if local.shape == box.sizes else local[part.where]

    def writes(self) -> tuple[int, ...]:
        """Return numbers of each tensor that change with its content: address and write count, or a digest.

        Tensors of the user's own state get a digest, because code often writes averages of weights without being
        counted.
        """
        counts: list[int] = []
        for fqn, tensor in self.tensors.items():
            if fqn.startswith("state.") or tensor.is_inference():
                counts += (xxhash.xxh3_64_intdigest(self.view(fqn, box)) for box in self.parts(fqn))
            else:
                counts += local_of(tensor).data_ptr(), writes_of(tensor)
        return tuple(counts)

    def layout(self, rank: int, world_size: int) -> RankLayout:
        """Return the boxes that this rank holds."""
        known = self._layout
        if known is None or (known.rank, known.world) != (rank, world_size):
            known = self._layout = self._declare(rank, world_size)
        return known

    def _declare(self, rank: int, world_size: int) -> RankLayout:
        metas = [
            TensorMeta(
                fqn, DTYPES[tensor.dtype], global_shape(tensor), box, cuts_of(tensor, list(self.parts(fqn)))
            )
            for fqn, tensor in self.tensors.items()
            for box in self.parts(fqn)
        ]
        return RankLayout(rank, tuple(metas), world_size)


def _from_array(value: Any, path: str) -> torch.Tensor:
    """Return a NumPy array as a tensor, which shares the array's memory if possible."""
    if type(value) in (np.ndarray, np.memmap):
        try:
            return torch.from_numpy(np.require(value, requirements=["C", "W"]))
        except (TypeError, ValueError):
            pass
    raise StateError(
        f"{path}: a {type(value).__module__}.{type(value).__qualname__} of {value.dtype} cannot be saved",
        hint="offer a plain array of numbers in this machine's byte order (x.astype(x.dtype.newbyteorder('=')))",
    )


def _left_out_by(module: nn.Module) -> list[str]:
    """Return the names of tensors and states of metrics in ``module`` if its ``state_dict()`` is empty."""
    if module.state_dict():
        return []
    buffers = [name for name, _ in module.named_buffers()]
    held = [
        f"{path}.{name}".removeprefix(".")
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, torch.Tensor) or name in vars(part).get("_defaults", ())
    ]
    return buffers + held


class TorchState:
    """The model, optimizers, schedulers, scaler and extra objects of one rank.

    Args:
        model: a module, or modules by name.
        optimizers: the optimizers by name.
        schedulers: one, a list or a dict of objects with ``state_dict``/``load_state_dict``.
        scaler: a ``GradScaler`` or None.
        extras: the user's own state: objects with ``state_dict``/``load_state_dict``, plain values, or random
            generators (which are seeded at each step and have nothing to save).

    Attributes:
        devices: the accelerators that held the state when this object was made.

    Raises:
        StateError: a value that cannot be saved; the error names its key path and type.
        UsageError: an argument has a wrong type.
    """

    def __init__(
        self,
        model: Models,
        optimizers: Mapping[str, Optimizer],
        schedulers: Any = None,
        scaler: Any = None,
        extras: dict[str, Any] | None = None,
    ) -> None:
        self.names = names_of(model)
        refuse_in_backward(self.names.parameters)
        refuse_undeclared(self.names.parameters)
        self.optimizers = {n: state_of(n, o, self.names.parameters) for n, o in optimizers.items()}
        self.schedulers = by_name(schedulers, "scheduler", has_state)
        self.declared = Declared(optimizers, self.schedulers)
        self.scaler = scaler
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            inner = [
                name for name, item in instance_of(scaler).items() if isinstance(item, torch.amp.GradScaler)
            ]
            given = (
                f"scaler=scaler.{inner[0]}, the one inside" if inner else "scaler=torch.amp.GradScaler(...)"
            )
            raise UsageError(
                f"scaler is a {type(scaler).__name__}, and not a GradScaler",
                hint=f"{given}; anything else goes into state={{...}}",
            )
        self.extras: dict[str, Any] = {} if extras is None else extras
        self.generators: list[tuple[str, Generator]] = [
            (name, item) for name, item in self.extras.items() if isinstance(item, GENERATORS)
        ]
        self.devices = self._check()

    def _check(self) -> set[torch.device]:
        """Refuse state that no checkpoint can hold, before the first save; return the devices of the state."""
        for name, item in self.extras.items():
            if isinstance(item, nn.Module) and (left := _left_out_by(item)):
                raise UsageError(
                    f"state={{{name!r}: ...}}: the state_dict() of this {type(item).__name__} is empty, so the session "
                    f"would keep nothing of it ({', '.join(left[:4])})",
                    hint="a metric of torchmetrics is one rank's: keep its sums as plain numbers by "
                    "s.attach(NAME, {'sum': 0.0}); one that is equal on all ranks at each update: "
                    "metric.persistent(True). A tensor of a module: register_buffer(NAME, tensor)",
                )
        collected = self.collect()
        encode_values(collected.values)
        for meta in collected.layout(0, 1).tensors:
            check_tensor(meta)
        return collected.devices()

    def updated_parameters(self) -> Iterator[torch.Tensor]:
        """Yield the parameters of all optimizers."""
        for optimizer in self.optimizers.values():
            yield from parameters_of(optimizer.optimizer)

    def declares(self, value: object) -> bool:
        """Return whether the state of the session contains ``value``.

        True for tensors of the state, arrays that use their memory, schedules, the scaler, states and parameter
        groups of optimizers, and for the user's own values, also inside of lists and dicts. False for modules and
        optimizers, because most of their attributes are not part of the state (:meth:`keeps`). False for None, the
        scaler of a session without a scaler.
        """
        if value is None or isinstance(value, torch.nn.Module | Optimizer):
            return False
        if isinstance(value, torch.Tensor) and self._has_tensor(value):
            return True
        if isinstance(value, np.ndarray) and value.ctypes.data in self.addresses():
            return True  # the memory of a tensor: torch.from_numpy(value)
        optimizers = [each.optimizer for each in self.optimizers.values()]
        of_optimizers = (item for each in optimizers for item in (each.state, *each.param_groups))
        items = (self.scaler, *of_optimizers, *self.schedulers.values(), *_nested(self.extras))
        return any(value is item for item in items)

    def in_user_state(self, value: object) -> bool:
        """Return whether ``value`` is ``extras``, an entry of it, or lies in a container there.

        False for a part of a larger tensor, because ranks hold different parts.
        """
        if isinstance(value, torch.Tensor) and region_of(value) is not None:
            return False
        return value is self.extras or any(value is item for item in _nested(self.extras))

    def keeps(self, owner: object, attribute: str) -> bool:
        """Return whether the state of the session contains a plain attribute of ``owner``: an optimizer has some."""
        return any(each.keeps(owner, attribute) for each in self.optimizers.values())

    def _has_tensor(self, tensor: torch.Tensor) -> bool:
        of_objects = (arrays_in(item.state_dict(), name) for name, item in self.objects().items())
        # A state dict has other tensor objects, which share the memory.
        others = (array for arrays in of_objects for _, array in arrays)
        return any(share_memory(each, tensor) for each in chain(self._live(), others))

    def _live(self) -> Iterator[torch.Tensor | None]:
        """Yield the parameters and buffers; None for a buffer that is not there now."""
        yield from self.names.parameters.values()
        yield from (slot.get() for slot in self.names.buffers)

    def addresses(self) -> set[int]:
        """Return the addresses of the memory of parameters, buffers and the user's own tensors."""
        own = (array for _, array in arrays_in(self.plain_extras(), "state"))
        tensors = (each for each in chain(self._live(), own) if isinstance(each, torch.Tensor))
        return {address_of(tensor) for tensor in tensors} - {0}

    def trained(self) -> set[int]:
        """Return the ids of the parameters that the optimizers train (:func:`trained_by`)."""
        return trained_by(optimizer.optimizer for optimizer in self.optimizers.values())

    def size(self) -> int:
        """Return a hash that changes when a tensor of an optimizer or the user's state is added, lost or reshaped."""
        forms: list[object] = [optimizer.size() for optimizer in self.optimizers.values()]
        for name, item in self.extras.items():
            if not isinstance(item, (nn.Module, *GENERATORS)):  # a module has its tensors from the start
                for path, array in arrays_in(self._extra(name, item, {}), name):
                    forms.append((path, tuple(array.shape), array.dtype))
        return hash(tuple(forms))

    def collect(
        self, copies: StepStartCopies | None = None, before: StateBefore = NOTHING_BEFORE
    ) -> TorchCollected:
        """Return the state now, or with ``copies`` the state at the start of the step.

        Args:
            copies: copies made at the start of the step.
            before: copies made when the script was given the step; they take precedence over ``copies``.

        Raises:
            StateError: a value that cannot be saved.
        """
        out = TorchCollected()
        weights = {} if copies is None else copies.undo.weights()
        known = {**({} if copies is None else copies.extras), **before.extras}
        plain = {**({} if copies is None else copies.plain), **before.plain}
        groups = {**({} if copies is None else copies.groups), **before.groups}
        for fqn, parameter in self.names.parameters.items():
            out.add(placed(weights.get(id(parameter), parameter), parameter), fqn)
        for slot in self.names.buffers:
            live = slot.get()
            buffer = live if copies is None else copies.buffers.get(slot.fqn)
            buffer = before.buffers.get(slot.fqn, buffer)
            if buffer is not None:
                out.add(self.names.state_of(slot, buffer if live is None else placed(buffer, live)), slot.fqn)
        out.values = {
            "aliases": dict(self.names.aliases),
            "transient": [slot.fqn for slot in self.names.buffers if not slot.persistent],
            "modules": {
                fqn: self._extra_state(fqn, module, copies, out) for fqn, module in self.names.extra.items()
            },
            "optimizers": {
                name: o.split(
                    out.add,
                    groups[name] if name in groups else hyperparameters(o.optimizer),
                    None if copies is None else copies.undo,
                )
                for name, o in self.optimizers.items()
            },
            "schedulers": {
                name: self._plain(f"scheduler.{name}", scheduler, plain, out)
                for name, scheduler in self.schedulers.items()
            },
            "declared": self.declared.values(),
            "scaler": None if self.scaler is None else self._plain("scaler", self.scaler, plain, out),
            "state": {
                name: split(self._extra(name, item, known), f"state.{name}", out.add)
                for name, item in self.extras.items()
                if not isinstance(item, GENERATORS)
            },
        }
        return out

    def _plain(self, path: str, item: Any, known: Mapping[str, Any], out: TorchCollected) -> Plain:
        return split(known[path] if path in known else item.state_dict(), path, out.add)

    def trained_extras(self) -> set[str]:
        """Return the names of the parameters of modules in the user's state that an optimizer there updates.

        A rank may hold another value of the user's state, but not of such a parameter.
        """
        updated = {
            id(p) for item in self.extras.values() if isinstance(item, Optimizer) for p in parameters_of(item)
        }
        if not updated:  # as with an average of the model: a transfer asks for each of its tensors
            return set()
        return {fqn for fqn, p in self._parameters_of_extras() if id(p) in updated}

    def _parameters_of_extras(self) -> Iterator[tuple[str, torch.Tensor]]:
        known = set(map(id, self.names.parameters.values()))
        for name, item in self.extras.items():
            for key, parameter in item.named_parameters() if isinstance(item, nn.Module) else ():
                if id(parameter) not in known:
                    yield f"state.{name}.{key}", parameter

    def updates_unsaved(self, optimizer: Optimizer) -> str:
        """Return the name of a weight in the user's state that ``optimizer`` updates; empty if there is none.

        Empty as well if the optimizer itself is in the user's state.
        """
        if any(item is optimizer for item in self.extras.values()):
            return ""
        updated = {id(p) for p in parameters_of(optimizer)}
        return next((fqn for fqn, p in self._parameters_of_extras() if id(p) in updated), "")

    def plain_extras(self) -> dict[str, Any]:
        """Return the entries of the user's state that are plain values, by name."""
        return {
            name: item
            for name, item in self.extras.items()
            if not (has_state(item) or isinstance(item, GENERATORS))
        }

    def objects(self) -> dict[str, Any]:
        """Return the entries of the user's state that have a ``state_dict``, by name."""
        return {name: item for name, item in self.extras.items() if has_state(item)}

    def plain_objects(self) -> list[Any]:
        """Return the values of :meth:`objects` that are neither modules nor optimizers."""
        return [item for item in self.objects().values() if not isinstance(item, nn.Module | Optimizer)]

    def _extra(self, name: str, item: Any, known: Mapping[str, Any]) -> Any:
        if name in known:
            return known[name]
        return item.state_dict() if has_state(item) else item

    def _extra_state(
        self, fqn: str, module: nn.Module, copies: StepStartCopies | None, out: TorchCollected
    ) -> Plain:
        return split(module.get_extra_state() if copies is None else copies.plain[fqn], fqn, out.add)

    def restore(
        self,
        catalogue: Catalogue,
        values: Mapping[str, Plain],
        place: tuple[int, int] = (0, 1),
        *,
        cast: bool = False,
        partial: bool = False,
    ) -> TorchRestore:
        """Return an object that loads a checkpoint into this state.

        The caller fills the buffers of that object, then finishes the load.

        Args:
            catalogue: the tensors of the checkpoint.
            values: the plain values of the checkpoint.
            place: rank of this process, and the number of ranks.
            cast: convert floating numbers that are stored in another dtype.
            partial: a module whose extra state is not in the checkpoint keeps its present extra state.

        Raises:
            CheckpointMismatch: the checkpoint was written by a training script of another structure.
        """
        finish = self.declared.compare(values.get("declared"), shown=place[0] == 0)
        restore = TorchRestore(self, catalogue, values, HandCut(catalogue, *place), cast, partial)
        restore.then(finish)
        return restore


class TorchRestore:
    """A load in progress: the caller fills the memory of ``targets``, then :meth:`finish` puts all values into place.

    If dtypes are converted, fill the tensors of :meth:`converted` first and call :meth:`check`. Fill the other tensors
    after that, because many of them are filled in place.

    Attributes:
        targets: name -> tensor; parameters and buffers are filled in place, the rest is new memory.
    """

    def __init__(
        self,
        state: TorchState,
        catalogue: Catalogue,
        values: Mapping[str, Plain],
        cuts: HandCut,
        cast: bool,
        partial: bool,
    ) -> None:
        self._state = state
        self._catalogue = catalogue
        self._cast = cast
        self._staged: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self._finish: list[Callable[[], None]] = []
        self.targets: dict[str, torch.Tensor] = dict(state.names.parameters)
        for slot in state.names.buffers:
            buffer = slot.get()
            if buffer is not None:
                self.targets[slot.fqn] = state.names.state_of(slot, buffer)
        self._prepare_modules(values.get("modules"), partial)
        self._same("optimizer", state.optimizers, values["optimizers"])
        self._same("scheduler", state.schedulers, values["schedulers"])
        for name, optimizer in state.optimizers.items():
            saved = values["optimizers"][name]
            self._finish.append(optimizer.prepare(saved, catalogue, self.targets, cuts))
        for name, scheduler in state.schedulers.items():
            self._load(f"scheduler.{name}", scheduler, values["schedulers"][name])
        if state.scaler is not None:
            if values["scaler"] is None:
                log.warning(
                    "holdfast: the checkpoint holds no scaler; the scaler of this run starts with its initial scale"
                )
            else:
                self._load("scaler", state.scaler, values["scaler"])
        self._prepare_extras(values["state"])

    def then(self, what: Callable[[], None]) -> None:
        """Make :meth:`finish` call the function ``what`` at the end of the load."""
        self._finish.append(what)

    def _same(self, kind: str, ours: Mapping[str, Any], saved: Mapping[str, Plain]) -> None:
        if set(ours) != set(saved):
            raise CheckpointMismatch(
                f"this run has {kind}s {sorted(ours)}, the checkpoint {sorted(saved)}",
                hint=f"give the {kind}s that wrote it, under the same names",
            )

    def _prepare_modules(self, saved: Mapping[str, Plain] | None, partial: bool) -> None:
        """Prepare the load of the modules' extra state; ``saved`` is None in old checkpoints without extra state."""
        lacking = sorted(self._state.names.extra.keys() - (saved or {}).keys())
        if saved is None and lacking:
            log.warning(
                "holdfast: the checkpoint holds no %s; it keeps its initial value", ", ".join(lacking)
            )
        elif lacking and not partial:
            raise CheckpointMismatch(
                f"the checkpoint holds no {', '.join(lacking)}",
                hint="build the model as it was when the checkpoint was written",
            )
        for fqn, module in self._state.names.extra.items():
            if saved is not None and fqn in saved:
                value = self._value(module.get_extra_state(), saved[fqn], fqn)
                self._finish.append(functools.partial(module.set_extra_state, value))

    def _prepare_extras(self, saved: Mapping[str, Plain]) -> None:
        generators = {name for name, _ in self._state.generators}
        tell_other_names(self._state.extras.keys() - generators, saved.keys() - generators)
        for name, item in self._state.extras.items():
            if isinstance(item, GENERATORS) or name not in saved:
                continue
            if has_state(item):
                self._load(f"state.{name}", item, saved[name])
            else:
                value = self._value(item, saved[name], f"state.{name}")
                self._finish.append(functools.partial(self._set_plain, name, value))

    def _set_plain(self, name: str, value: Any) -> None:
        self._state.extras[name] = put_into(self._state.extras[name], value)

    def _load(self, path: str, item: Any, saved: Plain) -> None:
        self._finish.append(
            functools.partial(item.load_state_dict, self._value(item.state_dict(), saved, path))
        )

    def _value(self, current: Any, saved: Plain, path: str) -> Any:
        """Return ``saved`` with its tensors in new memory, each sharded like the tensor of that name in ``current``."""
        known = TorchCollected()
        split(current, path, known.add)
        return join(saved, self._fetch(known.tensors))

    def _fetch(self, current: Mapping[str, torch.Tensor]) -> Callable[[Plain], Any]:
        def fetch(stands_for: Plain) -> Any:
            if isinstance(stands_for, dict):
                return fetch(stands_for["array"]).numpy()
            entry = self._catalogue.by_fqn.get(stands_for)
            if entry is None:
                raise CheckpointMismatch(f"the checkpoint names {stands_for} but does not hold it")
            made = allocate(entry.shape, TORCH_DTYPES[entry.dtype], current.get(stands_for))
            self.targets[stands_for] = made
            return made

        return fetch

    def buffers(self) -> list[tuple[TensorMeta, memoryview]]:
        """Return all boxes that the caller must fill, each with its writable memory; then call :meth:`finish`."""
        out: list[tuple[TensorMeta, memoryview]] = []
        for fqn, tensor in self.targets.items():
            local = local_of(tensor)
            dtype = self._stored_dtype(fqn, tensor.dtype)
            for part in parts_of(tensor, fqn):
                meta = TensorMeta(fqn, DTYPES[dtype], global_shape(tensor), part.box)
                region = local[part.where]
                if not is_direct(region) or dtype is not tensor.dtype:
                    staged = torch.empty(region.shape, dtype=dtype)
                    self._staged.append((fqn, region, staged))
                    region = staged
                out.append((meta, byte_view(region)))
        return out

    def _stored_dtype(self, fqn: str, dtype: torch.dtype) -> torch.dtype:
        """Return the checkpoint's dtype if it can be converted to ``dtype``; otherwise ``dtype``."""
        entry = self._catalogue.by_fqn.get(fqn)
        if not self._cast or entry is None:
            return dtype
        stored = TORCH_DTYPES[entry.dtype]
        return stored if _is_number(stored) and _is_number(dtype) else dtype

    def converted(self) -> frozenset[str]:
        """Return the names of the tensors that the checkpoint stores in another dtype; :meth:`finish` converts them."""
        return frozenset(fqn for fqn, region, data in self._staged if data.dtype is not region.dtype)

    def check(self, untouched: Collection[str] = ()) -> None:
        """Check that the numbers that were read for :meth:`converted` tensors fit into the dtype of this run.

        Args:
            untouched: names of tensors that were not filled.

        Raises:
            CheckpointMismatch: a number is too large for the dtype that it is converted to.
        """
        for fqn, region, data in self._staged:
            if fqn not in untouched and data.dtype is not region.dtype and _overflows(data, region.dtype):
                raise CheckpointMismatch(
                    f"{fqn}: it has numbers that {region.dtype} cannot hold (stored as {data.dtype})",
                    hint="load it into a wider dtype",
                )

    def finish(self, untouched: Collection[str] = ()) -> None:
        """Put the new state into place, after all boxes were filled and verified.

        Args:
            untouched: names of tensors that were not filled; they keep their values.
        """
        with torch.no_grad():
            for fqn, region, data in self._staged:
                if fqn not in untouched:
                    region.copy_(data)
        for act in self._finish:
            act()
        await_devices(devices_of(self.targets.values()))  # the script may train on another stream


def _is_number(dtype: torch.dtype) -> bool:
    """Return True for signed floating dtypes; other dtypes cannot be converted."""
    return dtype.is_floating_point and dtype is not torch.float8_e8m0fnu


def _overflows(data: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return True if ``data`` has a number that ``dtype`` cannot hold."""
    limit = torch.finfo(dtype).max
    if torch.finfo(data.dtype).max <= limit:
        return False
    magnitude = (data if data.dtype.itemsize >= 4 else data.float()).abs()
    # A wider dtype has an infinity. For an 8-bit dtype torch turns an infinity into the largest number.
    if dtype.itemsize > 1:
        magnitude = magnitude[magnitude.isfinite()]
    return bool((magnitude > limit).any())
