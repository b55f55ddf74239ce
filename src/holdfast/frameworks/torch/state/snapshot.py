"""Copies, made at the start of a step, of the state that a block may change; an abort puts them back.

There are copies of buffers (BatchNorm's running statistics), extra state of modules (FP8 scales), settings of parameter
groups, schedules, the scaler's scale, and the user's own state: plain values, and small objects with ``state_dict``.
Gradients are dropped, not restored, because a step starts without gradients. Random generators need no copy, because
they are seeded at each step (``rng.py``).
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch

from holdfast.frameworks.torch import private_api
from holdfast.frameworks.torch.state.buffer_copies import BufferCopies
from holdfast.frameworks.torch.state.early_state import EarlyState
from holdfast.frameworks.torch.state.optimizer_state import Undo, clone, parameters_of
from holdfast.frameworks.torch.state.restore_in_place import put_into
from holdfast.frameworks.torch.state.state import (
    NOTHING_BEFORE,
    StateBefore,
    StepStartCopies,
    TorchState,
    arrays_in,
)
from holdfast.frameworks.torch.state.untrained_weights import UntrainedWeights
from holdfast.runtime.worker.script_attributes import attribute_of

SMALL_NUMEL = 65536
"""Largest state of a user's object, in elements, that is copied at each step."""


class Snapshot:
    """Copies of the state at the start of the current step.

    ``undo`` holds the copies of weights and optimizer state, from which tentative updates are undone. ``early`` holds
    the copies of optimizer state that the block changes before an update.
    """

    def __init__(self, state: TorchState) -> None:
        self._state = state
        self._buffers = BufferCopies(state.names.buffers)
        self._buffers_before = BufferCopies(state.names.buffers, self._buffers)
        self._groups: dict[str, list[dict[str, Any]]] = {}
        self._plain: dict[str, Any] = {}
        self._modules: dict[str, Any] = {}  # extra state by its name
        self._scaler: dict[str, torch.Tensor | None] = {}
        self._extras: dict[str, Any] = {}
        self._objects: dict[str, Any] = {}  # state of the user's objects that have a ``state_dict``
        self._uncopied: set[int] = set()  # ids of objects too large to be copied at each step
        # A step, and the state from before the script was given that step.
        self._before: tuple[int, StateBefore] = (-1, NOTHING_BEFORE)
        self.early = EarlyState({name: each.optimizer for name, each in state.optimizers.items()})
        self.undo = Undo(self.early.before)
        self.averages = UntrainedWeights(state, self.undo)

    def take(self) -> None:
        """Copy the state that the coming block may change before its vote."""
        self._buffers.take()
        state = self._state
        self._groups = self._group_values()
        self._modules = {fqn: clone(module.get_extra_state()) for fqn, module in state.names.extra.items()}
        self._plain = self._schedules()
        if state.scaler is not None:
            # Not state_dict(), which would wait for the device. The tensors exist from the scaler's first use on.
            self._scaler = {
                key: clone(getattr(state.scaler, key, None)) for key in private_api.SCALER_TENSORS
            }
        self._extras = clone(state.plain_extras())
        self._objects = self._small_objects()
        self.undo.clear()
        self.early.take()
        self.averages.take()

    def take_before(self, step: int, *, whole: bool = False) -> None:
        """Copy the state that the script may change before it enters the block of ``step``.

        That is: learning rates, schedules, the user's own state, and buffers (a forward pass in training mode changes
        them).

        Args:
            whole: copy all objects of the user, also large ones.
        """
        self._buffers_before.take()
        extras = {
            **clone(self._state.plain_extras()),
            **(self._all_objects() if whole else self._small_objects()),
        }
        buffers = self._buffers_before.by_name()
        self._before = (step, StateBefore(self._group_values(), self._schedules(), extras, buffers))

    def note_tables(self) -> None:
        """Record which tables the open block has stretched (``Names.stretched``)."""
        self._state.names.stretched.update(self._buffers.stretched())

    def before(self, step: int) -> StateBefore:
        """Return the copies that :meth:`take_before` made for ``step``; empty copies if it made none."""
        taken, before = self._before
        return before if taken == step else NOTHING_BEFORE

    def _group_values(self) -> dict[str, list[dict[str, Any]]]:
        found = {name: o.hyperparameters() for name, o in self._state.optimizers.items()}
        for groups in found.values():
            for group in groups:
                for key, value in group.items():
                    if isinstance(value, torch.Tensor):
                        group[key] = value.detach().clone()
        return found

    def _schedules(self) -> dict[str, Any]:
        return {f"scheduler.{n}": copy.deepcopy(s.state_dict()) for n, s in self._state.schedulers.items()}

    def _all_objects(self) -> dict[str, Any]:
        items = self._state.objects().items()
        return {
            name: clone(item.state_dict())
            for name, item in items
            if not attribute_of(item, "shows_committed_steps", False)
        }

    def _small_objects(self) -> dict[str, Any]:
        """Return copies of the state of the user's small objects.

        Modules (averaged weights) and loaders are left out: a copy at each step would cost too much, and they change
        after the update.
        """
        found: dict[str, Any] = {}
        for name, item in self._state.objects().items():
            if isinstance(item, torch.nn.Module) or hasattr(item, "__iter__"):
                continue
            if id(item) in self._uncopied or attribute_of(item, "shows_committed_steps", False):
                continue
            value = item.state_dict()
            if _numel(value) > SMALL_NUMEL:
                self._uncopied.add(id(item))
            else:
                found[name] = clone(value)
        return found

    def size(self) -> int:
        """Return the number of elements of the modules' extra state. It changes with the layout of that state."""
        return _numel(self._modules)

    def restore(self) -> None:
        """Put all copied values back and drop all gradients."""
        state = self._state
        self.averages.put_back()
        self.undo.restore()
        self.early.put_back()
        self._buffers.put_back()
        for fqn, extra in self._modules.items():
            state.names.extra[fqn].set_extra_state(clone(extra))
        for name, groups in self._groups.items():
            state.optimizers[name].set_hyperparameters(groups)
        for name, scheduler in state.schedulers.items():
            scheduler.load_state_dict(copy.deepcopy(self._plain[f"scheduler.{name}"]))
        for key, saved_tensor in self._scaler.items():
            setattr(state.scaler, key, clone(saved_tensor))
        self._restore_extras()
        self.drop_gradients()

    def _restore_extras(self) -> None:
        for name, saved in self._extras.items():
            self._state.extras[name] = put_into(self._state.extras.get(name), clone(saved))
        for name, saved in self._objects.items():
            self._state.extras[name].load_state_dict(clone(saved))

    def drop_gradients(self) -> None:
        """Drop the gradients of all parameters."""
        for parameter in self._state.names.parameters.values():
            parameter.grad = None
        for optimizer in self._state.optimizers.values():
            for parameter in parameters_of(optimizer.optimizer):
                parameter.grad = None

    def copies(self) -> StepStartCopies:
        """Return the copies made at the start of the step, from which a frozen state is collected."""
        buffers = self._buffers.by_name()
        plain = {**self._plain, **self._modules}
        scaler = self._state.scaler
        if scaler is not None and self._scaler.get("_scale") is not None:
            plain["scaler"] = _scaler_values(scaler, self._scaler)
        extras = {**self._extras, **self._objects, **self.averages.modules()}
        return StepStartCopies(buffers, self._groups, plain, extras, self.undo)


def _numel(value: Any) -> int:
    """Return the number of elements of all tensors and arrays in a tree of values."""
    return sum(math.prod(array.shape) for _, array in arrays_in(value, "state"))


def _scaler_values(scaler: Any, saved: dict[str, torch.Tensor | None]) -> dict[str, Any]:
    """Return the scaler's state dict with the scale and the growth counter from the start of the step (``saved``)."""
    values: dict[str, Any] = dict(scaler.state_dict())
    scale, tracker = saved["_scale"], saved["_growth_tracker"]
    if values and scale is not None and tracker is not None:
        values["scale"], values["_growth_tracker"] = float(scale.item()), int(tracker.item())
    return values
