"""The adapter that lets the framework ``tiny`` train under Holdfast, and ``session``. See docs/new-framework.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tiny import Array, Momentum, Table

from holdfast.core.ids import Generation
from holdfast.errors import CheckpointMismatch, UnsupportedError, UsageError
from holdfast.frameworks.common.adapter import DataIdentity, Hooks, OnCollective
from holdfast.frameworks.common.numpy_state import NumpyState, metas_to_fill
from holdfast.frameworks.common.state_tree import Plain
from holdfast.frameworks.common.tcp_group_adapter import TcpGroupAdapter
from holdfast.runtime.worker.process_place import place_here
from holdfast.runtime.worker.worker_client import WorkerClient
from holdfast.session.session import Session
from holdfast.session.settings import SessionSettings
from holdfast.store.layouts.layout import Box, Catalogue, RankLayout, TensorMeta

OPTIMIZER = "optimizer."


def session(optimizer: Momentum, *, checkpoint: str | None = None, seed: int = 0) -> Session:
    """Open and return a session, as ``holdfast.session`` does for torch."""
    settings = SessionSettings(
        checkpoint=checkpoint, resume="auto", seed=seed, save_every_steps=None, save_every_s=None, keep=3,
        exit_file=None, grace_s=None,
    )  # fmt: skip
    return Session(lambda: TinyAdapter(optimizer, seed), {}, settings)


# ---------------------------------------------------------------- the state


class TinyCollected:
    """The state at one moment (``Collected``)."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self.values: dict[str, Plain] = {
            "optimizers": {},
            "schedulers": {},
            "state": {},
            "framework": "tiny",
        }
        self._state = NumpyState.whole(arrays)

    def view(self, fqn: str, box: Box) -> memoryview:
        """Return the bytes of one tensor."""
        return self._state.view(fqn, box)

    def layout(self, rank: int, world_size: int) -> RankLayout:
        """Return the layout of this rank, which holds every tensor as a whole."""
        return self._state.layout(rank, world_size)


class TinyRestore:
    """A load of the state in progress (``Restore``)."""

    def __init__(self, state: TinyState) -> None:
        self._state = state
        self._arrays = {fqn: np.empty_like(array) for fqn, array in state.arrays().items()}

    def buffers(self) -> list[tuple[TensorMeta, memoryview]]:
        """Return the arrays to fill."""
        return metas_to_fill(NumpyState.whole(self._arrays).shards)

    def finish(self) -> None:
        """Put the filled arrays into the model and the optimizer."""
        self._state.write(self._arrays)


class TinyState:
    """The weights and velocities by name. ``copies`` are their values at the start of the step."""

    def __init__(self, optimizer: Momentum) -> None:
        self._optimizer = optimizer
        self.copies: dict[str, Array] = {}
        self.take()

    def arrays(self) -> dict[str, Array]:
        """Return the arrays that a step changes."""
        velocity = {OPTIMIZER + name: array for name, array in self._optimizer.velocity.items()}
        return {**self._optimizer.model.weights, **velocity}

    def take(self) -> None:
        """Copy all arrays, because a step begins."""
        self.copies = {fqn: array.copy() for fqn, array in self.arrays().items()}

    def write(self, arrays: Mapping[str, Array]) -> None:
        """Set every array in place."""
        for fqn, array in self.arrays().items():
            array[:] = arrays[fqn]

    def collect(self, *, frozen: bool) -> TinyCollected:
        """Return the present state, or with ``frozen`` the state at the start of the step."""
        return TinyCollected(self.copies if frozen else {k: v.copy() for k, v in self.arrays().items()})

    def take_before(self, step: int) -> None:
        """Do nothing, because a script of this framework changes no state between two steps."""

    def trains(self, fqn: str) -> bool:
        """Return True, because all replicas hold equal bits of every tensor."""
        return True

    def owns(self, fqn: str) -> bool:
        """Return True, because the framework owns every tensor: the user adds no state."""
        return True

    def put_bytes(self, arrays: Mapping[str, NDArray[np.uint8]]) -> None:
        """Set some arrays from their bytes."""
        self.write({**self.arrays(), **{fqn: data.view(np.float64) for fqn, data in arrays.items()}})


class TinyFeed:
    """The batches of a table, with a position (``Feed``). Each rank has every ``world_size``-th batch of an epoch."""

    repeatable = rewinds = True
    last_in_epoch = False

    def __init__(self, table: Table, rank: int, world_size: int) -> None:
        self.epoch = 0
        self._batch = 0  # drawn by this rank in the epoch
        self._table, self._rank, self._world_size = table, rank, world_size

    def place(self) -> Mapping[str, int]:
        """Return the position after the last batch drawn."""
        return {"epoch": self.epoch, "batch": self._batch}

    def seek(self, place: Mapping[str, int], local: Plain = None) -> None:
        """Go to a position."""
        self.epoch, self._batch = place["epoch"], place["batch"]

    def local_state(self) -> Plain:
        """Return None, because all ranks are at the same position."""

    def identity(self) -> DataIdentity | None:
        """Return the number of rows as the identity of the data. A resume with another number of rows is refused."""
        return DataIdentity(len(self._table.y), "", True)

    def draw(self, epochs: int | None = None) -> tuple[Array, Array]:
        """Return the next batch. Raises: StopIteration after ``epochs`` epochs."""
        while epochs is None or self.epoch < epochs:
            first = self._batch * self._world_size
            if self._table.batch(self.epoch, first + self._world_size - 1) is not None:
                batch = self._table.batch(self.epoch, first + self._rank)
                assert batch is not None
                self._batch += 1
                return batch
            if self._batch == 0:
                raise UsageError("the table has no batch for each rank", hint="give more rows")
            self.epoch, self._batch = self.epoch + 1, 0
        raise StopIteration

    def close(self) -> None:
        """Do nothing, because no process loads data."""


# ---------------------------------------------------------------- the adapter


class TinyAdapter(TcpGroupAdapter[TinyState]):
    """The adapter of tiny. ``TcpGroupAdapter`` provides the TCP connections, the vote and the comparison of copies."""

    def __init__(self, optimizer: Momentum, seed: int) -> None:
        super().__init__(*place_here(), seed)
        self.live = (
            self.world_size > 1
        )  # connections can be rebuilt, and a replacement can start without peers
        self.state = TinyState(optimizer)
        self._optimizer = optimizer
        self._alone = False  # this process is a replacement that has not joined
        self._rehearsed = False

    # ---- state (StateAdapter)

    def collect(self, *, frozen: bool = False, before: int = -1) -> TinyCollected:
        """Return the present state, or with ``frozen`` the state at the start of the step."""
        return self.state.collect(frozen=frozen)

    def state_size(self) -> int:
        """Return 0, because the layout never changes."""
        return 0

    def restore(self, catalogue: Catalogue, values: Mapping[str, Plain]) -> TinyRestore:
        """Prepare and return a load. Raises: CheckpointMismatch."""
        if values.get("framework") != "tiny":
            raise CheckpointMismatch("the checkpoint was not written by a training of tiny")
        return TinyRestore(self.state)

    def feed(self, loader: Any) -> TinyFeed:
        """Return the batches of a table. Raises: UsageError."""
        if not isinstance(loader, Table):
            raise UsageError(
                f"the loader is a {type(loader).__name__}, not a tiny.Table", hint="s.steps(table)"
            )
        return TinyFeed(loader, self.rank, self.world_size)

    # ---- step (StepAdapter)

    def begin(self, step: int) -> None:
        """Copy the state and seed the generators."""
        self.state.take()
        self._reseed(step)

    def shield(self) -> None:
        """Do nothing. A broken sum raises PeerLost, which the session handles."""

    def record(self, name: str) -> None:
        """Refuse a second update in a step. Raises: UnsupportedError."""
        raise UnsupportedError("step.update(name) is not supported", hint="one optimizer.step() per step")

    def prepare_vote(self) -> None:
        """Do nothing, because the gradients are already averaged."""

    def end(self) -> None:
        """Do nothing, because the weights are already changed."""

    def release(self) -> None:
        """Do nothing, because collectives raise outside of a step as well."""

    def abort(self) -> None:
        """Restore the state of the start of the step from the copies."""
        self.state.write(self.state.copies)

    # ---- groups (GroupAdapter)

    def attach(self, hooks: Hooks, on_fault: Callable[[str], None], on_collective: OnCollective) -> None:
        """Let the optimizer average over the job, and ask for the vote before it changes weights."""
        super().attach(hooks, on_fault, on_collective)
        optimizer = self._optimizer
        self._before = optimizer.average, optimizer.before, optimizer.after
        optimizer.average = self._average
        optimizer.before = lambda: hooks.update("momentum")
        optimizer.after = lambda: hooks.updated("momentum")

    def detach(self) -> None:
        """Restore the original hooks of the optimizer."""
        super().detach()
        optimizer = self._optimizer
        optimizer.average, optimizer.before, optimizer.after = self._before

    def is_fault(self, error: BaseException) -> bool:
        """Return False, because the session sees from the poisoned group that a sum broke."""
        return False

    def reconfigure(self, generation: Generation) -> None:
        """Connect to the ranks of a new generation. Raises: GroupError."""
        self._alone = False
        self._lines().reconfigure(generation)

    def rehearse(self) -> bool:
        """Return True once in a replacement, whose first block runs without peers before it joins."""
        client = WorkerClient.current()
        if client is None or not client.joining or self._rehearsed:
            return False
        self._rehearsed = self._alone = True
        return True

    def _average(self, gradient: Array) -> Array:
        if self._alone or self.world_size == 1:
            return gradient
        return self.mesh.sum(gradient) / self.world_size
