"""Variables of a Keras model and its optimizer as training state.

Theory. TensorFlow sums and applies gradients in one function, so a step that breaks may have changed some variables.
All variables are therefore copied to the host when a step begins. These copies are the state if the step is left early.
Outside of a step the state is the variables' present values, with the script's changes after the block. A variable is
read and set only on this worker, because a read across workers would be a collective. ``local`` names the variables
that differ between workers (BatchNorm's moving statistics). Between two steps a script may change single numbers
(learning rates, counters) and its own state (``frameworks/common/user_state.py``). Both are also copied earlier, when
the script is given the step, before its block.

Invariants:
1. ``collect(frozen=True)`` is the state at the start of the current step, whatever happened since.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from holdfast.errors import CheckpointMismatch, StateError
from holdfast.frameworks.common.numpy_state import DTYPE_NAMES, NumpyState, digests, metas_to_fill
from holdfast.frameworks.common.state_tree import Plain
from holdfast.frameworks.common.user_state import (
    NOTHING_BEFORE,
    NOTHING_TAKEN,
    Taken,
    UserState,
    UserStateBefore,
)
from holdfast.store.layouts.layout import Box, Catalogue, RankLayout, TensorMeta

Array = NDArray[Any]

OPTIMIZER = "optimizer."


class TensorFlowCollected:
    """The training state at one moment, as a source for saves."""

    def __init__(self, arrays: Mapping[str, Array], extras: Taken) -> None:
        self.values: dict[str, Plain] = {
            "optimizers": {},
            "schedulers": {},
            "state": extras.plain,
            "framework": "tensorflow",
        }
        if both := sorted(arrays.keys() & extras.arrays.keys()):
            raise StateError(f"two tensors are called {both[0]!r}", hint="rename the one in state={...}")
        self._state = NumpyState.whole({**arrays, **extras.arrays})

    def view(self, fqn: str, box: Box) -> memoryview:
        """Return the bytes of one box that this rank holds. Raises: StateError: this rank does not hold the box."""
        return self._state.view(fqn, box)

    def layout(self, rank: int, world_size: int) -> RankLayout:
        """Return the layout of ``rank``, which has every tensor as a whole, because each worker holds a replica."""
        return self._state.layout(rank, world_size)

    def writes(self) -> tuple[int, ...]:
        """Return digests of the tensors, because TensorFlow has no counts of writes (``CountsWrites``)."""
        return digests(self, self.layout(0, 1))


class Live:
    """The present variables of this worker. Each is copied from the framework when it is requested."""

    def __init__(self, state: TensorFlowState) -> None:
        self.values: dict[str, Plain] = {}
        self._state = state

    def view(self, fqn: str, box: Box) -> memoryview:
        """Return the bytes of one variable. Raises: StateError: ``box`` is not the whole variable."""
        return NumpyState.whole(self._state.read((fqn,))).view(fqn, box)

    def layout(self, rank: int, world_size: int) -> RankLayout:
        """Return the layout of ``rank``, which has every variable as a whole."""
        return NumpyState.whole(self._state.copies).layout(rank, world_size)


class TensorFlowRestore:
    """A load in progress. The arrays are filled first, then written to the variables."""

    def __init__(self, state: TensorFlowState, catalogue: Catalogue, values: Mapping[str, Plain]) -> None:
        self._state = state
        self._arrays = {fqn: np.empty_like(array) for fqn, array in state.copies.items()}
        self._users, self._put = state.extras.prepare(catalogue, values.get("state", {}))

    def buffers(self) -> list[tuple[TensorMeta, memoryview]]:
        """Return every tensor to fill, with the writable bytes for its values."""
        return metas_to_fill(NumpyState.whole({**self._arrays, **self._users}).shards)

    def finish(self) -> None:
        """Write the filled arrays to the variables, and the values of the user's own state to its objects."""
        self._state.write(self._arrays)
        self._put()


class TensorFlowState:
    """The state of a training: all variables by name. ``copies`` has their values at the start of the current step.

    Args:
        model: the Keras model, built.
        optimizer: its optimizer, built.
        extras: the user's own state.

    Raises:
        StateError: two variables have one name, or a variable has a type that cannot be saved.
    """

    def __init__(self, model: Any, optimizer: Any, extras: dict[str, Any]) -> None:
        self.extras = UserState(extras, TensorFlowTensors())
        self._taken = NOTHING_TAKEN
        self._before = NOTHING_BEFORE
        self._variables: dict[str, Any] = {}
        for prefix, variables in (("", model.variables), (OPTIMIZER, _variables(optimizer))):
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
        weights = {id(variable) for variable in model.trainable_variables}
        self._trained = frozenset(
            fqn
            for fqn, variable in self._variables.items()
            if id(variable) in weights or fqn.startswith(OPTIMIZER)
        )
        self.local = tuple(
            fqn
            for fqn, variable in self._variables.items()
            if id(variable) in kept and self.copies[fqn].dtype.kind == "f"
        )
        self._single = tuple(
            fqn for fqn, array in self.copies.items() if fqn.startswith(OPTIMIZER) and array.size == 1
        )
        for fqn, array in self.copies.items():
            if array.dtype.name not in DTYPE_NAMES:
                raise StateError(f"variable {fqn!r}: type {array.dtype} cannot be saved")

    def read(self, names: Iterable[str]) -> dict[str, Array]:
        """Return copies of this worker's present values of the named variables."""
        return {fqn: np.array(_components(self._variables[fqn])[0].numpy(), order="C") for fqn in names}

    def take(self) -> None:
        """Copy all variables and the user's own state at the start of a step."""
        self.copies = self.read(self._variables)
        self._taken = self.extras.take()

    def put_back(self) -> None:
        """Restore the values that :meth:`take` has copied."""
        self.write(self.copies)
        self.extras.put(self._taken)

    def take_before(self, step: int) -> None:
        """Copy the values that the script may change before it enters the block of ``step``."""
        self._before = UserStateBefore(step, self.read(self._single), self.extras.take())

    def collect(self, *, frozen: bool, before: int = -1) -> TensorFlowCollected:
        """Return the present state, or, if ``frozen``, the state at the start of the current step.

        Values that :meth:`take_before` has copied for the step ``before`` replace the values of that state.
        """
        arrays = self.copies if frozen else self.read(self._variables)
        if self._before.step == before:
            return TensorFlowCollected({**arrays, **self._before.arrays}, self._before.extras)
        return TensorFlowCollected(arrays, self._taken if frozen else self.extras.take())

    def write(self, arrays: Mapping[str, Array]) -> None:
        """Set variables on this worker to the values of ``arrays``, by variable name."""
        for fqn, array in arrays.items():
            assign(self._variables[fqn], array)

    def owns(self, fqn: str) -> bool:
        """Return True for a floating-point variable of the model or the optimizer, False for any other tensor.

        Variables of other types, such as the random state of a layer, may differ between workers.
        """
        return fqn in self._variables and self.copies[fqn].dtype.kind == "f"

    def trains(self, fqn: str) -> bool:
        """Return True if only updates change the tensor: a weight, or state of the optimizer."""
        return fqn in self._trained

    def put_bytes(self, arrays: Mapping[str, NDArray[np.uint8]]) -> None:
        """Overwrite variables of this worker with these bytes, by variable name."""
        for fqn, data in arrays.items():
            self.write({fqn: data.view(self.copies[fqn].dtype).reshape(self.copies[fqn].shape)})

    def collect_live(self) -> Live:
        """Return the present variables as a source. Each is copied when it is requested."""
        return Live(self)

    def restore(self, catalogue: Catalogue, values: Mapping[str, Plain]) -> TensorFlowRestore:
        """Return the object that loads a checkpoint into this state.

        Raises:
            CheckpointMismatch: the checkpoint is of another framework.
        """
        if values.get("framework") != "tensorflow":
            raise CheckpointMismatch("the checkpoint was not written by a TensorFlow training")
        return TensorFlowRestore(self, catalogue, values)


class TensorFlowTensors:
    """The operations on TensorFlow tensors in the user's own state (``frameworks.common.user_state.UserTensors``)."""

    def owns(self, item: Any) -> bool:
        """Return True for a variable or tensor of TensorFlow or Keras."""
        return isinstance(item, tf.Variable | tf.Tensor) or _is_keras(item)

    def read(self, item: Any) -> Array:
        """Return this worker's values of a tensor or variable as an array."""
        return np.asarray(_components(item)[0].numpy())

    def make(self, array: Array) -> Any:
        """Return a new TensorFlow tensor with these values."""
        return tf.constant(array)

    def fill(self, current: Any, value: Any) -> bool:
        """Copy ``value`` into the variable ``current``.

        Return False if ``current`` is not a variable of the same form.
        """
        if not (isinstance(current, tf.Variable) or _is_keras(current)) or not isinstance(value, tf.Tensor):
            return False
        if tuple(current.shape) != tuple(value.shape) or tf.as_dtype(current.dtype) != value.dtype:
            return False
        assign(current, value.numpy())
        return True


def assign(variable: Any, array: Array) -> None:
    """Set the value of a variable on this worker."""
    for component in _components(variable):
        component.assign(array)


def _variables(optimizer: Any) -> list[Any]:
    """Return the variables of an optimizer of Keras 3 or tf_keras, with the learning rate if it is a variable.

    In old versions of tf_keras ``variables`` is a method, and lacks the learning rate.
    """
    found = optimizer.variables
    variables = list(found() if callable(found) else found)
    rate = getattr(optimizer, "_learning_rate", None)
    if isinstance(rate, tf.Variable) and all(rate is not variable for variable in variables):
        variables.append(rate)
    return variables


def _components(variable: Any) -> list[Any]:
    """Return the parts of a variable on this worker. Without a strategy that is the variable itself."""
    # Keras 3 wraps TensorFlow's variable in ``_value``. On TensorFlow's own class ``_value`` would start a collective.
    held = variable._value if _is_keras(variable) else variable
    return list(getattr(held, "values", None) or [held])


def _is_keras(item: Any) -> bool:
    """Return True for Keras 3's own variable class."""
    return type(item).__module__.startswith("keras.") and hasattr(item, "_value")
