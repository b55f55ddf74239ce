"""Variables of a Keras model and its optimizer as training state, always read from copies on the host.

Theory. TensorFlow adds and applies gradients in one function, so a step that breaks may have changed some variables.
The state that counts is therefore a copy made when a step has been committed; nothing else is ever saved, and a fault
at any later moment finds it complete. Variables are read and set as this worker's value, because a read across
workers would be a collective. ``local`` names those that drift apart (BatchNorm's moving statistics).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.adapters.numpy import DTYPE_NAMES, NumpyState
from holdfast.adapters.values import Plain
from holdfast.errors import CheckpointMismatch, StateError
from holdfast.store.layout import Box, Catalogue, RankLayout, TensorMeta

Array = NDArray[Any]


class Collected:
    """The state at one moment."""

    def __init__(self, arrays: Mapping[str, Array], extras: Mapping[str, Plain]) -> None:
        self.values: dict[str, Plain] = {
            "optimizers": {},
            "schedulers": {},
            "state": dict(extras),
            "framework": "tensorflow",
        }
        self._state = NumpyState.whole(arrays)

    def view(self, fqn: str, box: Box) -> memoryview:
        """Bytes of one box of this rank. Raises: StateError."""
        return self._state.view(fqn, box)

    def layout(self, rank: int, world_size: int) -> RankLayout:
        """Everything, whole: each worker holds a replica."""
        return self._state.layout(rank, world_size)


class Restore:
    """A load under way."""

    def __init__(self, state: TensorFlowState, values: Mapping[str, Plain]) -> None:
        self._state = state
        self._values = values
        self._arrays = {fqn: np.empty_like(array) for fqn, array in state.copies.items()}

    def buffers(self) -> list[tuple[TensorMeta, memoryview]]:
        """Every tensor to fill."""
        return [
            (TensorMeta(t.fqn, t.dtype, t.shape, t.box), t.buffer)
            for t in NumpyState.whole(self._arrays).targets()
        ]

    def finish(self) -> None:
        """Put the arrays into the variables."""
        self._state.write(self._arrays)
        self._state.extras.update(self._values.get("state", {}))


class TensorFlowState:
    """All variables, by name; ``copies`` are their values at the last committed step.

    Args:
        model, optimizer: built.
        extras: plain values that travel too.

    Raises:
        StateError: two variables of one name, or one of a type that cannot be saved.
    """

    def __init__(self, model: Any, optimizer: Any, extras: dict[str, Any]) -> None:
        self.extras = extras
        self._variables: dict[str, Any] = {}
        for prefix, variables in (("", model.variables), ("optimizer.", _variables(optimizer))):
            for variable in variables:
                fqn = prefix + str(getattr(variable, "path", None) or variable.name).partition(":")[0]
                if fqn in self._variables:
                    raise StateError(
                        f"two variables are called {fqn!r}", hint="give each layer a name of its own"
                    )
                self._variables[fqn] = variable
        self.copies: dict[str, Array] = {}
        self.take()
        kept = {id(variable) for variable in model.non_trainable_variables}
        self.local = tuple(
            fqn
            for fqn, variable in self._variables.items()
            if id(variable) in kept and self.copies[fqn].dtype.kind == "f"
        )
        for fqn, array in self.copies.items():
            if array.dtype.name not in DTYPE_NAMES:
                raise StateError(f"variable {fqn!r}: type {array.dtype} cannot be saved")

    def read(self, names: Iterable[str]) -> dict[str, Array]:
        """This worker's values now, copied."""
        return {fqn: np.array(_components(self._variables[fqn])[0].numpy(), order="C") for fqn in names}

    def take(self) -> None:
        """Copy everything: these values count from now on."""
        self.copies = self.read(self._variables)

    def write(self, arrays: Mapping[str, Array]) -> None:
        """Set variables on this worker."""
        for fqn, array in arrays.items():
            for component in _components(self._variables[fqn]):
                component.assign(array)

    def restore(self, catalogue: Catalogue, values: Mapping[str, Plain]) -> Restore:
        """Prepare a load. Raises: CheckpointMismatch: of another framework."""
        if values.get("framework") != "tensorflow":
            raise CheckpointMismatch("the checkpoint was not written by a TensorFlow training")
        return Restore(self, values)


def _variables(optimizer: Any) -> list[Any]:
    """Of Keras 3 (an attribute) and of tf_keras (a method in old versions)."""
    found = optimizer.variables
    return list(found() if callable(found) else found)


def _components(variable: Any) -> list[Any]:
    """The parts of a variable on this worker; itself without a strategy."""
    # Keras 3 wraps TensorFlow's variable; the same name on one of TensorFlow's own would start a collective.
    held = variable._value if type(variable).__module__.startswith("keras.") else variable
    return list(getattr(held, "values", None) or [held])
