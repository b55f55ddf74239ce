"""Digests of a block's inputs and results, and the search for the cause if two runs of the block differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from holdfast.frameworks.common.optional_abilities import TRAINED
from holdfast.frameworks.torch.state.optimizer_state import hyperparameters
from holdfast.frameworks.torch.state.parameter_names import BufferSlot, Models, modules_of
from holdfast.frameworks.torch.state.state import TorchState, arrays_in
from holdfast.frameworks.torch.state.tensor_digest import digest_of_tensor
from holdfast.frameworks.torch.steps.impurity_witness import Witness
from holdfast.runtime.worker.script_attributes import attribute_of


def found_by(state: TorchState) -> dict[str, int]:
    """Return digests of the optimizer settings, schedules, buffers and user state from which a block starts.

    Keys are descriptions of the values. A run without effect restores this state, so the next run must find the same
    digests. Of a table that grows with the longest batch, the part of its first size counts. Waits for the device.
    """
    found = {**dict(_settings_in(state)), **dict(_buffers_in(state, BufferSlot.first_part))}
    for name, scheduler in state.schedulers.items():
        found[f"scheduler {name!r}"] = digest_of_value(scheduler.state_dict())
    for name, item in state.plain_extras().items():
        found[f"state {name!r}"] = digest_of_value(item)
    for name, item in state.objects().items():
        if not (hasattr(item, "__iter__") or attribute_of(item, "shows_committed_steps", False)):
            found[f"state {name!r}"] = digest_of_value(item.state_dict())
    return found


def _settings_in(state: TorchState) -> Iterator[tuple[str, int]]:
    """Yield a description and a digest of each setting of each parameter group."""
    for name, optimizer in state.optimizers.items():
        for number, group in enumerate(hyperparameters(optimizer.optimizer)):
            for key, value in group.items():
                yield f"{key} of group {number} of optimizer {name!r}", digest_of_value(value)


def _buffers_in(
    state: TorchState, part: Callable[[BufferSlot], torch.Tensor | None] = BufferSlot.get
) -> Iterator[tuple[str, int]]:
    """Yield a description and a digest of each buffer, or of the ``part`` of it that counts."""
    for slot in state.names.buffers:
        live = part(slot)
        if live is not None:
            yield f"buffer {slot.fqn}", digest_of_tensor(live)


def trained_in(state: TorchState) -> dict[str, int]:
    """Return the digest of each weight that an optimizer trains. Waits for the device."""
    trained = state.trained()
    return {
        f"{TRAINED}{name}": digest_of_tensor(parameter)
        for name, parameter in state.names.parameters.items()
        if id(parameter) in trained
    }


def gradients_in(state: TorchState) -> Iterator[tuple[str, int]]:
    """Yield the name of each parameter that has a gradient, with the digest of the gradient. Waits for the device."""
    for name, parameter in state.names.parameters.items():
        if parameter.grad is not None:
            yield name, digest_of_tensor(parameter.grad)


def computed_in(state: TorchState, calls: Sequence[str]) -> dict[str, int]:
    """Return digests of gradients, buffers, optimizer settings and collectives; empty if there is no gradient.

    Waits for the device.

    Args:
        calls: the collectives that the script has made without peers.
    """
    found = {f"the gradient of {name}": digest for name, digest in gradients_in(state)}
    if not found:
        return found
    found.update(_buffers_in(state))
    if calls:
        found["the collectives that the script makes"] = digest_of_value(calls)
    return {**found, **dict(_settings_in(state))}


def digest_of_value(value: Any) -> int:
    """Return a digest of a tensor, an array, a container of them, or a plain value. Waits for the device."""
    if isinstance(value, torch.Tensor):
        return digest_of_tensor(value)
    if isinstance(value, np.ndarray):
        return xxhash.xxh3_64_intdigest(np.ascontiguousarray(value).tobytes())
    if isinstance(value, Mapping):
        return hash(tuple((repr(key), digest_of_value(item)) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return hash(tuple(digest_of_value(item) for item in value))
    return xxhash.xxh3_64_intdigest(repr(value).encode())


def _put_back(state: TorchState) -> Iterator[torch.Tensor]:
    """Yield the tensors that a run without effect leaves unchanged."""
    yield from state.names.parameters.values()
    yield from (live for slot in state.names.buffers if (live := slot.get()) is not None)
    for optimizer in state.optimizers.values():
        for value in optimizer.optimizer.state.values():
            yield from (item for item in value.values() if isinstance(item, torch.Tensor))
    for _, item in arrays_in(state.plain_extras(), "state"):
        if isinstance(item, torch.Tensor):
            yield item
    for item in state.objects().values():
        if isinstance(item, torch.nn.Module):
            yield from (*item.parameters(), *item.buffers())


def _numbers_in(model: Models) -> Iterator[tuple[str, float]]:
    """Yield the numbers in attributes of all modules, with their names (``module.loss_normalizer``)."""
    for prefix, outer in modules_of(model):
        for path, module in outer.named_modules(prefix=prefix.removesuffix(".")):
            for name, value in vars(module).items():
                if type(value) in (int, float):
                    yield f"{path}.{name}".removeprefix("."), value


class Suspicion:
    """The search for the cause when two runs of a block differ.

    The block runs twice more with deterministic algorithms. Meanwhile ``impurity_witness`` records the tensors that the
    block makes and uses.

    Args:
        state: state of the session.
        model: the session's model.
    """

    def __init__(self, state: TorchState, model: Models) -> None:
        self._state = state
        self._model = model
        self._numbers: tuple[Mapping[str, float], Mapping[str, float]] = (
            {},
            {},
        )  # at the begin of the last two runs
        self._witness: Witness | None = None
        self._before: tuple[bool, bool] | None = None  # the script's own settings, during a run
        self._trained: dict[str, int] = {}  # digest of each trained weight at the begin of the run
        self._written: list[str] | None = (
            None  # trained weights written before the first update ahead of the vote
        )

    @property
    def cause(self) -> str:
        """The cause of the difference, in words; empty if none was found.

        The cause is a trained weight that the block writes. Otherwise it is the impure input that the recorder of the
        block's tensors has found.
        """
        written = self._written_now() if self._written is None else self._written
        if written:
            return f"it writes {written[0]} before its update (write weights after optimizer.step())"
        return "" if self._witness is None else self._witness.cause

    def changed(self) -> list[str]:
        """Return, in words, which attributes of modules had other numbers when the last run of the block began."""
        before, now = self._numbers
        return [
            f"{name} (was {before[name]}, then {value})"
            for name, value in now.items()
            if before.get(name, value) != value
        ]

    def updates(self) -> None:
        """Record the weights that the block has written so far, because an update ahead of its vote comes next."""
        if self._before is not None and self._written is None:
            self._written = self._written_now()

    def _written_now(self) -> list[str]:
        """Return the names of the trained weights that have changed since the begin of the run.

        Torch does not count writes through ``parameter.data``, so the values are compared.
        """
        if self._witness is None:
            return []
        self._witness.paused = True
        found = trained_in(self._state)
        self._witness.paused = False
        changed = (name for name, digest in found.items() if self._trained.get(name, digest) != digest)
        return [name.removeprefix(TRAINED) for name in changed]

    def begin(self) -> None:
        """Begin to observe a run of the block, with deterministic algorithms."""
        if self._witness is None:
            generators = [generator for _, generator in self._state.generators]
            self._witness = Witness(generators, _put_back(self._state))
        self._numbers = self._numbers[1], dict(_numbers_in(self._model))
        self._trained, self._written = trained_in(self._state), None
        self._before = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        torch.use_deterministic_algorithms(True, warn_only=True)
        self._witness.turn()
        self._witness.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """End the observation of a run, and restore the script's settings for deterministic algorithms."""
        if self._before is not None and self._witness is not None:
            self._witness.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            torch.use_deterministic_algorithms(self._before[0], warn_only=self._before[1])
            self._before = None
