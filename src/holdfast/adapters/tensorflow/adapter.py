"""TensorFlow 2 behind the interface of ``adapters/base.py``: job level.

A step is ``train_step`` as a whole. It votes when it has ended here; committed means that all workers got through it. A
broken strategy cannot be repaired in a running process, so every fault restarts the workers, from host copies of the
last committed step.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from holdfast.adapters.base import Feed, Hooks
from holdfast.adapters.mesh import Mesh, host_of
from holdfast.adapters.tensorflow.data import DatasetFeed
from holdfast.adapters.tensorflow.state import Collected, Restore, TensorFlowState
from holdfast.adapters.values import Plain
from holdfast.core.ids import NO_GENERATION, Generation
from holdfast.errors import GroupError, UnsupportedError, UsageError
from holdfast.runtime.client import Client
from holdfast.store.layout import Catalogue

VERSION_MIN = (2, 16)
STRATEGIES = ("MultiWorkerMirroredStrategy", "CollectiveAllReduceStrategy")
SEED_PRIME = 1_000_003


class TensorFlowAdapter:
    """See :class:`holdfast.adapters.base.Adapter`.

    Args:
        model: a built Keras model (Keras 3 or tf_keras).
        optimizer: its optimizer.
        strategy: the strategy in whose scope both were made; None for one process.
        extras: plain values that travel in checkpoints.
        seed: of Python's, NumPy's and TensorFlow's generators at each step (eager operations).

    Raises:
        UnsupportedError: version, strategy or device.
        UsageError: a model that is not built.
    """

    live = False  # a broken strategy cannot be used again
    scaled = False

    def __init__(self, model: Any, optimizer: Any, strategy: Any, extras: dict[str, Any], seed: int) -> None:
        self.rank, self.world_size = place()
        check_supported(strategy, self.world_size)
        if not model.built:
            raise UsageError(
                "the model has no variables yet", hint="model.build(input_shape), or an Input layer"
            )
        self._strategy = strategy
        self._seed = seed
        with scope(strategy):
            optimizer.build(model.trainable_variables)
        self.state = TensorFlowState(model, optimizer, extras)
        self._mesh: Mesh | None = None
        self._hooks: Hooks | None = None
        self._shared: dict[str, NDArray[Any]] = {}

    # ------------------------------------------------------------------ hooks

    def _lines(self) -> Mesh:
        """Our connections, not met before they are used: the session finds its agent first."""
        if self._mesh is None:
            client = Client.current()
            self._mesh = Mesh(client, self.rank, self.world_size, host_of(client))
        return self._mesh

    @property
    def mesh(self) -> Mesh:
        """Our connections; meets the other ranks at first use. Raises: GroupError."""
        mesh = self._lines()
        if not mesh.connected:
            client = Client.current()
            mesh.connect(NO_GENERATION if client is None else client.generation)
        return mesh

    @property
    def poisoned(self) -> bool:
        """A collective of this process broke."""
        return self._mesh is not None and self._mesh.poisoned

    @property
    def reason(self) -> str:
        """Why."""
        return "" if self._mesh is None else self._mesh.reason

    def attach(
        self, hooks: Hooks, on_fault: Callable[[str], None], on_collective: Callable[[int], None]
    ) -> None:
        """Nothing of TensorFlow's is hooked: the step votes at its end."""
        self._hooks = hooks
        self._lines().on_fault = on_fault
        self._lines().on_collective = on_collective

    def detach(self) -> None:
        """Close the connections."""
        self._hooks = None
        if self._mesh is not None:
            self._mesh.close()

    def is_fault(self, error: BaseException) -> bool:
        """A collective of TensorFlow's broke: tell the others at once."""
        kinds = (
            tf.errors.UnavailableError,
            tf.errors.AbortedError,
            tf.errors.CancelledError,
            tf.errors.InternalError,
            tf.errors.DeadlineExceededError,
        )
        if self.world_size == 1 or not isinstance(error, kinds):
            return False
        if not self.poisoned:
            reason = " ".join(str(error).split())[:300]
            self._lines().poison(reason)
            self._lines().on_fault(reason)
        return True

    # ------------------------------------------------------------------ state

    def collect(self, *, frozen: bool = False) -> Collected:
        """The last committed step: from the host copies, whatever the variables hold now."""
        return Collected(self.state.copies, self.state.extras)

    def state_size(self) -> int:
        """The optimizer is built from the start."""
        return len(self.state.copies)

    def restore(self, catalogue: Catalogue, values: Mapping[str, Plain]) -> Restore:
        """Prepare a load. Raises: CheckpointMismatch."""
        return self.state.restore(catalogue, values)

    def feed(self, loader: Any) -> Feed:
        """Batches of a ``tf.data.Dataset`` that is not distributed yet. Raises: UsageError."""
        if self._strategy is None:
            return DatasetFeed(loader, lambda dataset: dataset, self._traces)
        return DatasetFeed(loader, self._strategy.experimental_distribute_dataset, self._traces)

    def _traces(self) -> None:
        """The coming step is slow: ``tf.function`` meets new shapes."""
        if self._hooks is not None:
            self._hooks.compiling(True)

    # ------------------------------------------------------------------ step

    def begin(self, step: int) -> None:
        """Seed the generators."""
        if step == 0 or not self.state.copies:
            self.state.take()
        mixed = (self._seed * SEED_PRIME + self.rank) * SEED_PRIME + step
        random.seed(mixed)
        np.random.seed(mixed % 2**32)

    def shield(self) -> None:
        """Nothing: TensorFlow's collectives raise."""

    def record(self, name: str) -> None:
        """Refuse. Raises: UnsupportedError."""
        raise UnsupportedError(
            "step.update(name) is not supported with TensorFlow", hint="one train_step per step"
        )

    def prepare_vote(self) -> None:
        """What each worker keeps for itself becomes rank 0's. Raises: PeerLost."""
        if self._hooks is not None:
            self._hooks.compiling(False)
        self._shared = {}
        for fqn, array in self.state.read(self.state.local).items():
            mine = array.reshape(-1) if self.rank == 0 else np.zeros(array.size, array.dtype)
            self._shared[fqn] = self.mesh.sum(mine).reshape(array.shape)

    def vote(self, vector: list[int]) -> list[int]:
        """Sum over all ranks. Raises: PeerLost."""
        return [int(n) for n in self.mesh.sum(np.array(vector, np.int64))]

    def enter_update(self) -> None:
        """Nothing."""

    def end(self) -> None:
        """All workers got through the step: its result counts."""
        if self.rank != 0:
            self.state.write(self._shared)
        self.state.take()

    def release(self) -> None:
        """Nothing."""

    def abort(self) -> None:
        """Nothing to undo: the copies hold the state before the step, and this process will be replaced."""

    # ------------------------------------------------------------------ groups

    def poison(self, reason: str) -> None:
        """Break the vote under way. TensorFlow's own collectives break by themselves, or end with the process."""
        if self._mesh is not None:
            self._mesh.poison(reason)

    def reconfigure(self, generation: Generation) -> None:
        """Refuse. Raises: GroupError."""
        raise GroupError(
            "a broken MultiWorkerMirroredStrategy cannot be used again: the workers must restart"
        )

    def rehearse(self) -> bool:
        """No step needs one."""
        return False

    def end_rehearsal(self) -> None:
        """Nothing."""


def scope(strategy: Any) -> Any:
    """The strategy's scope, or the default one."""
    return (strategy or tf.distribute.get_strategy()).scope()


def check_supported(strategy: Any, world_size: int) -> None:
    """Raises: UnsupportedError: names what is supported."""
    version = tuple(int(part) for part in tf.__version__.split(".")[:2])
    if version < VERSION_MIN:
        least = ".".join(map(str, VERSION_MIN))
        raise UnsupportedError(
            f"TensorFlow {tf.__version__} is not supported; supported are {least} and newer",
            hint="pip install tensorflow-cpu",
        )
    if world_size > 1 and type(strategy).__name__ not in STRATEGIES:
        raise UnsupportedError(
            f"strategy {type(strategy).__name__} is not supported for {world_size} workers; "
            f"supported is {STRATEGIES[0]}",
            hint="make model and optimizer in the scope of tf.distribute.MultiWorkerMirroredStrategy()",
        )
    if tf.config.get_visible_devices("GPU") or tf.config.get_visible_devices("TPU"):
        raise UnsupportedError(
            "TensorFlow on an accelerator is not supported: this path was never run on one; supported is CPU",
            hint="tf.config.set_visible_devices([], 'GPU')",
        )


def place() -> tuple[int, int]:
    """Rank and world size, from ``TF_CONFIG`` or the launcher's variables."""
    config = json.loads(os.environ.get("TF_CONFIG") or "{}")
    workers = config.get("cluster", {}).get("worker", [])
    if len(workers) > 1:
        return int(config["task"]["index"]), len(workers)
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
