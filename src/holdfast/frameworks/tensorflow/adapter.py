"""TensorFlow 2's implementation of the interface in ``frameworks/common/adapter.py``, with recovery by restart.

A step is the whole ``train_step``. A rank votes after its ``train_step`` has ended. A step is committed when
``train_step`` has ended on all workers. A broken strategy cannot be repaired in a running process. So every fault
restarts the workers from the state of the last committed step. If the next step had begun, the copies on the host have
that state.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from holdfast.core.ids import Generation
from holdfast.core.launch_environment import TF_RANKS
from holdfast.errors import GroupError, UnsupportedError, UsageError
from holdfast.frameworks.common.adapter import Feed
from holdfast.frameworks.common.state_tree import Plain
from holdfast.frameworks.common.tcp_group_adapter import TcpGroupAdapter
from holdfast.frameworks.tensorflow.data_position import DatasetFeed
from holdfast.frameworks.tensorflow.state import Live, TensorFlowCollected, TensorFlowRestore, TensorFlowState
from holdfast.runtime.worker.process_place import place_here
from holdfast.store.layouts.layout import Catalogue

log = logging.getLogger("holdfast")

VERSION_MIN = (2, 16)
STRATEGIES = ("MultiWorkerMirroredStrategy", "CollectiveAllReduceStrategy")


class TensorFlowAdapter(TcpGroupAdapter[TensorFlowState]):
    """The adapter of TensorFlow; see :class:`holdfast.frameworks.common.adapter.Adapter`.

    This adapter installs no hooks in TensorFlow, because a step votes only at its end.

    Args:
        model: a built Keras model (Keras 3 or tf_keras).
        optimizer: its optimizer.
        strategy: the strategy in whose scope both were made; None for one process.
        extras: the user's own state.
        seed: base of the seeds of Python's and NumPy's generators at each step.

    Raises:
        UnsupportedError: the version of TensorFlow or the strategy is not supported.
        UsageError: the model is not built, or the strategy has another number of workers than were started.
    """

    live = False  # a broken strategy cannot be used again

    def __init__(self, model: Any, optimizer: Any, strategy: Any, extras: dict[str, Any], seed: int) -> None:
        super().__init__(*place(), seed)
        check_supported(strategy, self.world_size)
        if not model.built:
            raise UsageError(
                "the model has no variables yet", hint="model.build(input_shape), or an Input layer"
            )
        self._strategy = strategy
        with scope(strategy):
            optimizer.build(model.trainable_variables)
        self.state = TensorFlowState(model, optimizer, extras)
        self._shared: dict[str, NDArray[Any]] = {}
        self._voting = False  # the block has ended, and its vote follows

    # ------------------------------------------------------------------ hooks

    def is_fault(self, error: BaseException) -> bool:
        """Return True, and report the fault, if ``error`` means that a collective of TensorFlow broke."""
        kinds = (
            tf.errors.UnavailableError,
            tf.errors.AbortedError,
            tf.errors.CancelledError,
            tf.errors.InternalError,
            tf.errors.DeadlineExceededError,
        )
        if self.world_size == 1 or not isinstance(error, kinds):
            return False
        self._broke(" ".join(str(error).split())[:300])
        return True

    # ------------------------------------------------------------------ state

    def collect(self, *, frozen: bool = False, before: int = -1) -> TensorFlowCollected:
        """Return the present state, or, if ``frozen``, the state at the start of the current step."""
        return self.state.collect(frozen=frozen, before=before)

    def state_size(self) -> int:
        """Return a number that changes with the layout of the user's own state.

        The optimizer is built from the start, so its layout does not change.
        """
        return self.state.extras.size()

    def restore(self, catalogue: Catalogue, values: Mapping[str, Plain]) -> TensorFlowRestore:
        """Return the object that loads a checkpoint into this state.

        The caller fills the buffers of the returned object, then calls ``finish`` of that object.

        Raises:
            CheckpointMismatch: the checkpoint does not fit this state.
        """
        return self.state.restore(catalogue, values)

    def feed(self, loader: Any) -> Feed:
        """Return the feed that draws batches of a ``tf.data.Dataset``, which the script has not distributed.

        Raises:
            UsageError: ``loader`` is not a dataset.
        """
        if self._strategy is None:
            return DatasetFeed(loader, lambda dataset: dataset, self._traces)
        return DatasetFeed(loader, self._strategy.experimental_distribute_dataset, self._traces)

    def _traces(self) -> None:
        """Report to the session that the coming step is slow, because ``tf.function`` traces new shapes."""
        if self._hooks is not None:
            self._hooks.compiling(True)

    # ------------------------------------------------------------------ step

    def begin(self, step: int) -> None:
        """Seed the generators, and copy all variables and the user's own state."""
        self._voting = False
        self.state.take()
        self._reseed(step)

    def shield(self) -> None:
        """Do nothing: TensorFlow's collectives raise."""

    def record(self, name: str) -> None:
        """Raise UnsupportedError, because TensorFlow's updates cannot be made before the vote."""
        raise UnsupportedError(
            "step.update(name) is not supported with TensorFlow", hint="one train_step per step"
        )

    def prepare_vote(self) -> None:
        """Fetch rank 0's values of the variables that each worker updates separately.

        :meth:`end` writes them into this rank's variables. Raises: PeerLost.
        """
        if self._hooks is not None:
            self._hooks.compiling(False)
        self._voting = True
        self._shared = {}
        for fqn, array in self.state.read(self.state.local).items():
            mine = array.reshape(-1) if self.rank == 0 else np.zeros(array.size, array.dtype)
            self._shared[fqn] = self.mesh.sum(mine).reshape(array.shape)

    def end(self) -> None:
        """End the committed step: write rank 0's values into the variables that each worker updates separately."""
        self._voting = False
        if self.rank != 0:
            self.state.write(self._shared)

    def release(self) -> None:
        """Record that no vote follows, because the block was left early."""
        self._voting = False

    def _of_vote(self) -> Live | None:
        """Return the present variables, which the vote compares between ranks; None if no vote is in progress."""
        return self.state.collect_live() if self._voting else None

    def _remedy(self) -> str:
        return "make model and optimizer in the strategy's scope, and change no variable on one worker alone"

    def abort(self) -> None:
        """Restore the state from the copies of the step's start.

        After a fault nothing is restored, because this process will be replaced.
        """
        self._voting = False
        if not self.poisoned:
            self.state.put_back()

    # ------------------------------------------------------------------ groups

    def reconfigure(self, generation: Generation) -> None:
        """Raise GroupError: a broken strategy cannot be used again."""
        raise GroupError(
            "a broken MultiWorkerMirroredStrategy cannot be used again: the workers must restart"
        )

    def rehearse(self) -> bool:
        """Return False: no step needs a rehearsal."""
        return False


def scope(strategy: Any) -> Any:
    """Return the scope of the strategy, or of TensorFlow's default strategy if it is None."""
    return (strategy or tf.distribute.get_strategy()).scope()


def check_supported(strategy: Any, world_size: int) -> None:
    """Refuse unsupported settings that would fail later.

    Raises:
        UnsupportedError: the error names the supported settings.
        UsageError: the strategy knows fewer or more workers than were started.
    """
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
    if world_size > 1 and (workers := _workers_of(strategy)) != world_size:
        raise UsageError(
            f"{world_size} processes were started, but the strategy knows {workers} worker(s): each would train alone",
            hint="set TF_CONFIG before the strategy is made, or start the script with `holdfast run --framework "
            "tensorflow`",
        )
    kinds = [kind for kind in ("GPU", "TPU") if tf.config.get_visible_devices(kind)]
    if kinds:
        log.warning("holdfast: TensorFlow on %s is untried: tests ran on CPU only", " and ".join(kinds))


def place() -> tuple[int, int]:
    """Return rank and world size, from ``TF_CONFIG`` or the launcher's variables.

    Raises:
        UsageError: the variables are incomplete, or contradict each other.
    """
    return place_here()


def _workers_of(strategy: Any) -> int:
    """Return the number of workers over which the strategy sums, from its cluster; 1 without a cluster."""
    resolver = strategy.cluster_resolver
    spec = {} if resolver is None else resolver.cluster_spec().as_dict()
    return sum(len(places) for kind, places in spec.items() if kind in TF_RANKS) or 1
