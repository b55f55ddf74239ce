"""The recording of optimizer updates, so that they can be repeated bit for bit.

Theory. An optimizer that does not communicate computes new weights from data of this rank alone: the weights, its
state, the local gradients and the settings of its parameter groups. The same code gives the same bits from the same
inputs. So an update is recorded as gradients and settings, just before the optimizer steps. It is repeated by the same
optimizer class on the same shards. A check during training shows that no other input matters: an update is first made
on a copy (*foretold*). At the next update, weights and state must equal those of the copy.

Invariants:
1. A copy shares no memory with the trained tensors, and the session's hooks ignore the copy's update.
2. No collective starts while an update is foretold or repeated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.errors import CheckpointInvalid, StateError
from holdfast.frameworks.common.state_tree import join, no_leaf, split
from holdfast.frameworks.torch import private_api
from holdfast.frameworks.torch.comm.comm_state import fabric
from holdfast.frameworks.torch.state.boxes import (
    DTYPES,
    TORCH_DTYPES,
    byte_view,
    lies_as,
    local_of,
)
from holdfast.frameworks.torch.state.locked_pages import host_bytes
from holdfast.frameworks.torch.state.optimizer_state import (
    clone,
    hyperparameters,
    parameters_of,
    set_hyperparameters,
    shared_state,
)
from holdfast.frameworks.torch.state.outermost_step import OutermostStep
from holdfast.frameworks.torch.state.state import TorchState
from holdfast.frameworks.torch.state.wrapper_reset import scalers_of
from holdfast.store.format.json_values import decode_mapping, encode_values
from holdfast.store.shared_memory.update_log import Gradient, Update

_SEED = 0x5EED
PIECES, PIECE_NUMEL = 4, 8192
"""Number of weights sampled between two updates, and number of elements sampled in each."""


class UpdateReplay:
    """The records of one optimizer's updates, and their repetition.

    It implements ``frameworks.common.optional_abilities.Updates``, for a session with one optimizer.

    Args:
        state: state of the session.
        owner: the session's adapter. Updates cannot be repeated if another object has hooks on the optimizer's step.

    Attributes:
        alone: True while an update is foretold or repeated; hooks ignore that step.
        outermost: the running ``step()`` of each optimizer; hooks ignore a ``step()`` that is called inside of it.
    """

    def __init__(self, state: TorchState, owner: object) -> None:
        self.alone = False
        self.outermost = OutermostStep()
        self._state = state
        self._owner = owner
        self._refused = ""
        self._comes = False  # True: the optimizer is about to step in this block
        self._written: tuple[object, ...] | None = None  # write counts after the last update
        # Samples: weight, position in it, bytes found there.
        self._pieces: list[tuple[torch.Tensor, int, torch.Tensor]] = []
        self._turn = 0
        self._foretold: dict[str, int] = {}

    # ------------------------------------------------------------------ from the adapter

    def begin(self) -> None:
        """Record that a block begins."""
        self._comes = False

    def comes(self) -> None:
        """Record that the optimizer is about to step."""
        self._comes = True

    def made(self) -> None:
        """Record that the optimizer has stepped: the next update starts from the present weights and state."""
        if self._written is not None:
            self.settle()

    def refuse(self, what: str) -> None:
        """Stop the recording, because a gradient log cannot record an action of the script (``what``)."""
        self._refused = self._refused or what

    # ------------------------------------------------------------------ from the session

    def why_not(self) -> str:
        """Return why the updates of this script cannot be repeated; empty if no reason is known beforehand."""
        optimizers = list(self._state.optimizers.values())
        if self._refused:
            return self._refused
        if scalers_of(self._state.scaler, self._state.extras):
            return "a GradScaler decides about each update"
        if len(optimizers) != 1:
            return f"there are {len(optimizers)} optimizers"
        if private_api.is_replaced(optimizers[0].optimizer):
            return "step() of the optimizer was replaced by another function"
        for hook in private_api.step_hooks(optimizers[0].optimizer):
            if getattr(hook, "__self__", None) is not self._owner:
                return "another hook runs at the optimizer's step"
        return ""

    def rebuilds(self, fqn: str) -> bool:
        """Return True if the gradient log can rebuild tensor ``fqn``: it is a weight, or state of the optimizer."""
        state = self._state
        of_optimizer = any(fqn.startswith(f"{o.prefix}.") for o in state.optimizers.values())
        return fqn in state.names.parameters or (
            of_optimizer and all(slot.fqn != fqn for slot in state.names.buffers)
        )

    def settle(self) -> None:
        """Record write counts and sample bytes of the weights; the next update starts from these weights."""
        self._written = self._counts()
        self._turn += 1
        self._pieces = [(p, at, _piece(p, at).clone()) for p, at in self._choose()]

    def rest(self) -> None:
        """Stop the checks of :meth:`undisturbed` until the next :meth:`settle`."""
        self._written, self._pieces = None, []

    def undisturbed(self) -> bool:
        """Return True if only the optimizer has changed the weights and its state since :meth:`settle`.

        The check compares torch's write counts, and the bytes of a sample of the weights. Callable from any thread.
        """
        return self._written is None or (
            self._written == self._counts()
            and all(torch.equal(_piece(p, at), noted) for p, at, noted in self._pieces)
        )

    def _choose(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield some weights and a position in each, different ones after each update.

        Bytes are compared because torch does not count a write such as ``parameter.data.clamp_()``.
        """
        parameters = list(self._state.names.parameters.values())
        for number in range(min(PIECES, len(parameters))):
            parameter = parameters[(self._turn * PIECES + number) % len(parameters)]
            yield parameter, self._turn * PIECE_NUMEL % max(local_of(parameter).numel(), 1)

    def take(self, step: int) -> Update:
        """Return the record of the update of ``step`` that is about to be made.

        The record refers to the memory of the gradients, so it is valid only until the update.

        Raises:
            StateError: an input of the update cannot be recorded.
        """
        if reason := self.why_not():
            raise StateError(reason)
        optimizer = self._optimizer()
        groups = hyperparameters(optimizer)
        if any(isinstance(value, torch.Tensor) for group in groups for value in group.values()):
            raise StateError("a setting of the optimizer is a tensor")
        settings = {"made": self._comes, "groups": split(groups, "groups", no_leaf)}
        gradients: list[Gradient] = []
        if self._comes:
            updated = {id(p) for p in parameters_of(optimizer)}
            gradients = [
                _gradient_of(fqn, parameter)
                for fqn, parameter in self._state.names.parameters.items()
                if parameter.grad is not None and id(parameter) in updated
            ]
        return Update(step, encode_values(settings, "settings"), tuple(gradients))

    def foretell(self, update: Update) -> None:
        """Make ``update`` on a copy of the weights and the optimizer's state, and keep the digests of the result.

        Raises:
            StateError: the update cannot be made on a copy.
        """
        optimizer = self._optimizer()
        copies = {p: _copy_of(p) for p in parameters_of(optimizer)}
        double: Any = object.__new__(type(optimizer))
        double.__dict__.update(optimizer.__dict__)
        double.param_groups = [
            {**group, "params": [copies[p] for p in group["params"]]} for group in optimizer.param_groups
        ]
        double.state = defaultdict(dict, clone(shared_state(optimizer.state)))
        for p, copied in copies.items():
            if p in optimizer.state:
                double.state[copied] = clone(optimizer.state[p])
        named = {fqn: copies[p] for fqn, p in self._state.names.parameters.items() if p in copies}
        self._make(double, update, named)
        self._foretold = _digests(double, named)

    def as_foretold(self) -> str:
        """Return the name of the first tensor that differs from the foretold result; empty if all are equal."""
        optimizer, foretold = self._optimizer(), self._foretold
        ours = set(parameters_of(optimizer))
        now = _digests(optimizer, {f: p for f, p in self._state.names.parameters.items() if p in ours})
        self._foretold = {}
        return next((name for name in {**foretold, **now} if foretold.get(name) != now.get(name)), "")

    def replay(self, updates: Sequence[Update]) -> None:
        """Repeat ``updates`` in order, starting from the state before the first one.

        Raises:
            CheckpointInvalid: the updates are of another model, or cannot be made.
        """
        optimizer = self._optimizer()
        for update in updates:
            try:
                self._make(optimizer, update, self._state.names.parameters)
            except StateError as error:
                raise CheckpointInvalid(f"update of step {update.step}: {error.message}") from error

    # ------------------------------------------------------------------ helpers

    def _optimizer(self) -> Optimizer:
        return next(iter(self._state.optimizers.values())).optimizer

    def _counts(self) -> tuple[object, ...]:
        tensors = list(self._state.names.parameters.values())
        others: list[object] = []
        for held in self._state.optimizers.values():
            others += map(id, parameters_of(held.optimizer))
            for key, of_one in held.optimizer.state.items():
                for value in of_one.values() if isinstance(key, torch.Tensor) else (of_one,):
                    if isinstance(value, torch.Tensor):
                        tensors.append(value)
                    else:
                        others.append(repr(value))
        return (*map(id, tensors), *private_api.write_counts(tensors), *others)

    def _make(self, optimizer: Optimizer, update: Update, parameters: Mapping[str, torch.Tensor]) -> None:
        """Make the recorded update with ``optimizer``. Raises: StateError."""
        settings = decode_mapping(update.settings, f"settings of step {update.step}")
        if not settings["made"]:
            return
        groups = join(settings["groups"], lambda _: None)
        if len(groups) != len(optimizer.param_groups):
            raise StateError(f"it has {len(groups)} parameter groups, not {len(optimizer.param_groups)}")
        for parameter in parameters_of(optimizer):
            parameter.grad = None
        for gradient in update.gradients:
            if gradient.name not in parameters:
                raise StateError(f"{gradient.name} is not in the model")
            parameters[gradient.name].grad = _filled(parameters[gradient.name], gradient)
        set_hyperparameters(optimizer, groups)
        step: Any = type(optimizer).step  # not optimizer.step, whose calls a schedule counts
        with self._leave_alone(optimizer):
            try:
                step(optimizer)
            except Exception as error:
                raise StateError(f"{type(optimizer).__name__}: {type(error).__name__}: {error}") from error
        for parameter in parameters_of(optimizer):
            parameter.grad = None

    @contextmanager
    def _leave_alone(self, optimizer: Optimizer) -> Iterator[None]:
        devices = sorted({p.device.index for p in parameters_of(optimizer) if p.device.type == "cuda"})
        self.alone = True
        fabric().seal_updates(True)
        try:
            with torch.random.fork_rng(devices):
                # This seed differs from the seed of the real update. If an update uses random numbers, the foretold
                # result therefore differs, and the test refuses the log.
                torch.default_generator.manual_seed(_SEED)
                for device in devices:
                    with torch.cuda.device(device):
                        torch.cuda.manual_seed(_SEED)
                yield
        finally:
            fabric().seal_updates(False)
            self.alone = False


def _gradient_of(fqn: str, parameter: torch.Tensor) -> Gradient:
    """Return the record of a parameter's gradient. Raises: StateError: both are not sharded in the same way."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        raise StateError(f"the gradient of {fqn} is sparse")
    local, lies = private_api.local_tensor(gradient), private_api.local_tensor(parameter)
    alike = local.dtype is lies.dtype and local.layout is torch.strided and local.shape == lies.shape
    if not alike or not (_cut_alike(gradient, parameter) or lies_as(gradient, parameter)):
        raise StateError(f"the gradient of {fqn} does not lie as its weight")
    return Gradient(fqn, DTYPES[local.dtype], tuple(local.shape), host_bytes(local))


def _cut_alike(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return True if a quick check shows that gradient and parameter are sharded alike, as in almost every step."""
    if not (isinstance(gradient, DTensor) and isinstance(parameter, DTensor)):
        return not isinstance(gradient, DTensor) and not isinstance(parameter, DTensor)
    return gradient.device_mesh is parameter.device_mesh and gradient.placements == parameter.placements


def _piece(parameter: torch.Tensor, at: int) -> torch.Tensor:
    """Return the bytes of ``PIECE_NUMEL`` elements of a parameter from ``at`` on. As bytes, NaN equals itself."""
    return local_of(parameter).reshape(-1)[at : at + PIECE_NUMEL].view(torch.uint8)


def _copy_of(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().clone().requires_grad_(parameter.requires_grad)


def _filled(parameter: torch.Tensor, gradient: Gradient) -> torch.Tensor:
    """Return the recorded gradient as a tensor for ``parameter``.

    Raises: StateError: the gradient has another dtype or shape.
    """
    made = torch.empty_like(parameter, requires_grad=False)
    local = local_of(made)
    dtype = TORCH_DTYPES.get(gradient.dtype)
    if dtype is not local.dtype or gradient.shape != tuple(local.shape):
        raise StateError(
            f"the gradient of {gradient.name} is {gradient.dtype} {list(gradient.shape)}, the weight here "
            f"{DTYPES[local.dtype]} {list(local.shape)}"
        )
    staged = torch.empty(gradient.shape, dtype=dtype)
    if staged.numel():
        np.copyto(np.frombuffer(byte_view(staged), np.uint8), np.frombuffer(gradient.data, np.uint8))
    with torch.no_grad():
        local.copy_(staged)
    return made


def _digests(optimizer: Optimizer, parameters: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return the digest of every tensor that the optimizer changes, by the name of the tensor."""
    found: dict[str, int] = {}
    for fqn, parameter in parameters.items():
        found[fqn] = _digest(parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{key} of {fqn}"] = _digest(value)
    for key, value in shared_state(optimizer.state).items():
        found[f"the optimizer's {key}"] = _digest(value)
    return found


def _digest(value: Any) -> int:
    if isinstance(value, torch.Tensor | DTensor):
        return xxhash.xxh3_64_intdigest(byte_view(local_of(value)))
    return xxhash.xxh3_64_intdigest(repr(value).encode())
