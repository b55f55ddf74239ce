"""MindSpore parameters as training state that the store can save and load.

Theory. Everything that a training step changes is a ``Parameter`` of the training cell: weights, BatchNorm's moving
statistics, optimizer slots, step counters. Weights and large slots change only after the gate (``gradient_gate.py``)
has let the gradients pass. Moving statistics change in forward. Counters (``global_step``, Adam's beta powers) do not
depend on gradients, so the graph may change them at any time. Moving statistics and counters are therefore copied when
a step begins, and a state requested during the step takes them from the copies. In PYNATIVE mode a read from another
thread waits for running operators, which may never end, so all parameters are copied. Between two steps a script may
change single numbers (learning rates, counters) and its own state (``frameworks/common/user_state.py``). These numbers
and this state are therefore copied twice: when the loop gives the step to the script, and when the block begins. A
compiled graph sees only changes by ``assign``; changes by ``set_data`` are visible only to Python.

Invariants:
1. ``collect(frozen=True)`` is the state at the start of the current step, whatever the graph or the script did since.
2. In GRAPH mode, a parameter that is not copied can be read while the main thread hangs in an operator.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import cache
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import ops
from numpy.typing import NDArray

from holdfast.errors import CheckpointMismatch, StateError
from holdfast.frameworks.common.numpy_state import DTYPE_NAMES, NumpyState, Shard, digests, metas_to_fill
from holdfast.frameworks.common.state_tree import Plain
from holdfast.frameworks.common.user_state import (
    NOTHING_BEFORE,
    NOTHING_TAKEN,
    Taken,
    UserState,
    UserStateBefore,
)
from holdfast.store.layouts.layout import Box, Catalogue, RankLayout, Shape, TensorMeta
from holdfast.text import plural

log = logging.getLogger("holdfast")

Array = NDArray[Any]

SMALL_NUMEL = 1024
IGNORED = frozenset({"graceful_exit", "graceful_init"})
"""Parameters of MindSpore's own exit request, which are not part of the training state."""


class Slice:
    """This rank's part of a parameter that is divided among ranks (tensor parallelism written by hand).

    Args:
        shape: shape of the whole parameter, in elements.
        offsets: start of this rank's part in each dimension, in elements.
    """

    def __init__(self, shape: Shape, offsets: Shape) -> None:
        self.shape = tuple(shape)
        self.offsets = tuple(offsets)


class MindSporeCollected:
    """The state at one moment. Its arrays are read from the framework when they are requested."""

    def __init__(self, state: MindSporeState, copies: Mapping[str, Array], extras: Taken) -> None:
        self.values: dict[str, Plain] = {
            "optimizers": {},
            "schedulers": {},
            "state": extras.plain,
            "framework": "mindspore",
            "processors": processors(),
        }
        if both := sorted(state.metas.keys() & extras.arrays.keys()):
            raise StateError(f"two tensors are called {both[0]!r}", hint="rename the one in state={...}")
        self._state = state
        self._copies = copies
        self._extras = extras
        self._users = NumpyState.whole(extras.arrays)

    def view(self, fqn: str, box: Box) -> memoryview:
        """Return the bytes of one box that this rank holds. Raises: StateError: this rank does not hold the box."""
        if fqn in self._extras.arrays:
            return self._users.view(fqn, box)
        shard = self._state.shard(fqn, self._copies)
        return NumpyState([shard]).view(fqn, box)

    def layout(self, rank: int, world_size: int) -> RankLayout:
        """Return the boxes that ``rank`` holds, as a layout."""
        return RankLayout(rank, (*self._state.metas.values(), *self._extras.metas()), world_size)

    def writes(self) -> tuple[int, ...]:
        """Return digests of the tensors, because MindSpore has no counts of writes (``CountsWrites``)."""
        return digests(self, self.layout(0, 1))


class MindSporeRestore:
    """A load in progress. The arrays are filled first, then written to the parameters."""

    def __init__(self, state: MindSporeState, catalogue: Catalogue, values: Mapping[str, Plain]) -> None:
        self._state = state
        self._arrays = {fqn: np.empty_like(state.read(fqn)) for fqn in state.metas}
        self._users, self._put = state.extras.prepare(catalogue, values.get("state", {}))

    def buffers(self) -> list[tuple[TensorMeta, memoryview]]:
        """Return every box to fill, with the writable bytes for its values."""
        own = [self._state.placed(fqn, array) for fqn, array in self._arrays.items()]
        return metas_to_fill([*own, *NumpyState.whole(self._users).shards])

    def finish(self) -> None:
        """Write the filled arrays to the parameters, and the values of the user's own state to its objects."""
        for fqn, array in self._arrays.items():
            self._state.write(fqn, array)
        self._put()


class MindSporeState:
    """The state of a training cell: all its parameters, by the names that checkpoints use.

    Args:
        cell: the training cell (network and optimizer).
        optimizer: the cell's optimizer. The parameters that it adds are named ``optimizer.NAME``.
        extras: the user's own state.
        slices: this rank's slices of divided parameters, by name. An optimizer slot is cut like its parameter.
        copy_all: copy all parameters at the start of each step (PYNATIVE).

    Raises:
        StateError: a parameter of a type that cannot be saved, or a slice that does not fit; the error names it.
    """

    def __init__(
        self,
        cell: Any,
        optimizer: Any,
        extras: dict[str, Any],
        slices: Mapping[str, Slice],
        *,
        copy_all: bool,
    ) -> None:
        self.extras = UserState(extras, MindSporeTensors())
        self.buffers: list[Any] = []
        self.trained = tuple(parameter.name for parameter in optimizer.parameters)
        self._parameters: dict[str, Any] = {}
        self._copied: dict[str, Array] = {}
        self._taken = NOTHING_TAKEN
        slots = {id(p) for p in optimizer.get_parameters()} - {id(p) for p in optimizer.parameters}
        trained = {id(p) for p in optimizer.parameters}
        early: list[str] = []
        single: list[str] = []
        for parameter in cell.get_parameters():
            if parameter.name in IGNORED:
                continue
            slot = id(parameter) in slots
            fqn = f"optimizer.{parameter.name}" if slot else parameter.name
            if fqn in self._parameters:
                raise StateError(
                    f"two parameters are called {fqn!r}", hint="give each Parameter a name of its own"
                )
            self._parameters[fqn] = parameter
            if not slot and id(parameter) not in trained and parameter.name not in slices:
                self.buffers.append(parameter)
            if copy_all or (id(parameter) not in trained and (not slot or parameter.size <= SMALL_NUMEL)):
                early.append(fqn)
            if slot and parameter.size == 1:
                single.append(fqn)
        self._early = tuple(early)
        self._single = tuple(single)
        self._before = NOTHING_BEFORE
        if strange := sorted(slices.keys() - {parameter.name for parameter in self._parameters.values()}):
            raise StateError(
                f"slices= names {strange[0]!r}, which is no parameter of the training cell",
                hint="the names are those of cell.parameters_dict()",
            )
        self.metas = {fqn: self._meta(fqn, slices) for fqn in self._parameters}

    def _meta(self, fqn: str, slices: Mapping[str, Slice]) -> TensorMeta:
        array = self.read(fqn)
        if array.dtype.name not in DTYPE_NAMES:
            raise StateError(f"parameter {fqn!r}: type {array.dtype} cannot be saved")
        part = next((s for name, s in slices.items() if _belongs(fqn, name)), None)
        if part is None or (fqn.startswith("optimizer.") and array.ndim != len(part.shape)):
            shape, box = array.shape, Box.whole(array.shape)
        else:
            shape, box = part.shape, Box(part.offsets, array.shape)
            if len(shape) != array.ndim or not Box.whole(shape).contains(box):
                raise StateError(
                    f"parameter {fqn!r}: its part {box} does not lie in a tensor of shape {list(shape)}"
                )
        return TensorMeta(fqn, DTYPE_NAMES[array.dtype.name], shape, box)

    def read(self, fqn: str) -> Array:
        """Return the parameter's present value. The array shares memory with the framework if possible."""
        try:
            return np.asarray(self._parameters[fqn].asnumpy(), order="C")
        except TypeError as error:  # bfloat16 has no NumPy type here
            raise StateError(
                f"parameter {fqn!r}: {self._parameters[fqn].dtype} cannot be saved: {error}"
            ) from error

    def write(self, fqn: str, array: Array) -> None:
        """Set the value of a parameter in a way that a compiled graph sees."""
        assign(self._parameters[fqn], array.reshape(self._parameters[fqn].shape))

    def owns(self, fqn: str) -> bool:
        """Return True if the tensor is a parameter of the training cell."""
        return fqn in self._parameters

    def trains(self, fqn: str) -> bool:
        """Return True if only updates change the tensor: a weight, or state of the optimizer."""
        return fqn in self.trained or (fqn in self._parameters and fqn.startswith("optimizer."))

    def put_bytes(self, arrays: Mapping[str, NDArray[np.uint8]]) -> None:
        """Overwrite parameters with these bytes, by parameter name."""
        for fqn, data in arrays.items():
            self.write(fqn, data.view(self.read(fqn).dtype))

    def placed(self, fqn: str, array: Array) -> Shard:
        """Return a shard with the data ``array`` for the box that this rank holds of the parameter."""
        meta = self.metas[fqn]
        return Shard(fqn, meta.shape, meta.box, array)

    def shard(self, fqn: str, copies: Mapping[str, Array]) -> Shard:
        """Return this rank's shard of a parameter, from ``copies`` if it is copied, otherwise from the framework.

        Raises:
            StateError: this rank does not hold the parameter.
        """
        if fqn not in self.metas:
            raise StateError(f"tensor {fqn!r} is not held here")
        return self.placed(fqn, copies[fqn] if fqn in copies else self.read(fqn))

    def take(self) -> None:
        """Copy the values that the coming step, or the script in it, may change before the vote."""
        self._copied = self._copies_of(self._early)
        self._taken = self.extras.take()

    def put_back(self) -> None:
        """Restore the values that :meth:`take` has copied."""
        for fqn, array in self._copied.items():
            self.write(fqn, array)
        self.extras.put(self._taken)

    def take_before(self, step: int) -> None:
        """Copy the values that the script may change before it enters the block of ``step``."""
        self._before = UserStateBefore(step, self._copies_of(self._single), self.extras.take())

    def _copies_of(self, names: tuple[str, ...]) -> dict[str, Array]:
        return {fqn: self.read(fqn).copy() for fqn in names}

    def collect(self, *, frozen: bool, before: int = -1) -> MindSporeCollected:
        """Return the present state, or, if ``frozen``, the state at the start of the current step.

        Values that :meth:`take_before` has copied for the step ``before`` replace the values of that state.
        """
        copies = self._copied if frozen else {}
        if self._before.step == before:
            return MindSporeCollected(self, {**copies, **self._before.arrays}, self._before.extras)
        return MindSporeCollected(self, copies, self._taken if frozen else self.extras.take())

    def restore(self, catalogue: Catalogue, values: Mapping[str, Plain]) -> MindSporeRestore:
        """Return the object that loads a checkpoint into this state.

        Raises:
            CheckpointMismatch: the checkpoint is of another framework.
        """
        if values.get("framework") != "mindspore":
            raise CheckpointMismatch(
                "the checkpoint was not written by a MindSpore training",
                hint="holdfast.mindspore.import_checkpoint(...) takes MindSpore's own files",
            )
        written_on = values.get("processors", processors())
        if written_on != processors():
            log.warning(
                "holdfast: this rank may use %s, and the rank that wrote the state %s; MindSpore's CPU kernels divide "
                "their sums by that number, so results differ by rounding. Give all starts the same processors "
                "(mpirun --bind-to none)",
                plural(processors(), "processor"), written_on,
            )  # fmt: skip
        return MindSporeRestore(self, catalogue, values)


@cache
def processors() -> int:
    """Return the number of processors that this process was allowed to use when it made its first session."""
    return len(os.sched_getaffinity(0))


class MindSporeTensors:
    """The operations on MindSpore tensors in the user's own state (``frameworks.common.user_state.UserTensors``)."""

    def owns(self, item: Any) -> bool:
        """Return True for a tensor or parameter of MindSpore."""
        return isinstance(item, ms.Tensor)

    def read(self, item: Any) -> Array:
        """Return the values of a MindSpore tensor as an array."""
        return np.asarray(item.asnumpy())

    def make(self, array: Array) -> Any:
        """Return a new MindSpore tensor with these values."""
        return ms.Tensor(array)

    def fill(self, current: Any, value: Any) -> bool:
        """Copy ``value`` into the parameter ``current``.

        Return False if ``current`` is not a parameter of the same form.
        """
        if not isinstance(current, ms.Parameter) or not isinstance(value, ms.Tensor):
            return False
        if current.shape != value.shape or current.dtype != value.dtype:
            return False
        assign(current, value.asnumpy())
        return True


def assign(parameter: Any, array: Array) -> None:
    """Set the value of a parameter in a way that a compiled graph sees."""
    ops.assign(parameter, ms.Tensor(array, dtype=parameter.dtype))


def _belongs(fqn: str, name: str) -> bool:
    """Return True if ``fqn`` is the weight ``name`` or one of its slots, which MindSpore names KIND.WEIGHT."""
    return fqn == name or (fqn.startswith("optimizer.") and fqn.endswith(f".{name}"))
