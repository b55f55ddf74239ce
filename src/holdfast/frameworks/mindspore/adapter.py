"""MindSpore's implementation of the interface in ``frameworks/common/adapter.py``.

Gradients are summed in one of two ways. In stand-alone mode the gate (``gradient_gate.py``) sums them over Holdfast's
own connections (``frameworks/common/tcp_group.py``), which can be rebuilt in the running process. In data parallel mode
MindSpore's own AllReduce sums them, and the gate only votes. After a fault MindSpore's group silently returns wrong
sums. So it is never used again: in data parallel mode every fault restarts the workers.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mindspore as ms
from mindspore import nn
from mindspore.communication import GlobalComm, get_group_size, get_rank
from numpy.typing import NDArray

from holdfast.core.ids import Generation
from holdfast.errors import GroupError, PeerLost, StepError, UnsupportedError, UsageError
from holdfast.frameworks.common.adapter import Aborted, Feed, Hooks, OnCollective
from holdfast.frameworks.common.state_tree import Plain
from holdfast.frameworks.common.tcp_group_adapter import TcpGroupAdapter
from holdfast.frameworks.mindspore.data_position import DataFeed
from holdfast.frameworks.mindspore.denormals import flush_denormals
from holdfast.frameworks.mindspore.gradient_gate import Gate, Relay
from holdfast.frameworks.mindspore.gradient_reduction import Reduction
from holdfast.frameworks.mindspore.gradients_mean import mean_of_gradients
from holdfast.frameworks.mindspore.state import (
    MindSporeCollected,
    MindSporeRestore,
    MindSporeState,
    Slice,
    assign,
)
from holdfast.runtime.worker.process_place import place_here
from holdfast.runtime.worker.worker_client import WorkerClient
from holdfast.store.layouts.layout import Catalogue

log = logging.getLogger("holdfast")

VERSIONS = ("2.10.",)
DEVICES = ("CPU",)
MODES = ("stand_alone", "data_parallel")
OPTIMIZER = "optimizer"


class MindSporeAdapter(TcpGroupAdapter[MindSporeState]):
    """The adapter of MindSpore; see :class:`holdfast.frameworks.common.adapter.Adapter`.

    Args:
        cell: the training cell, for instance ``nn.TrainOneStepCell``: it has ``grad_reducer`` and ``optimizer``.
        extras: the user's own state.
        seed: base of the seeds of Python's, NumPy's and MindSpore's default generators at each step.
        slices: this rank's slices of the parameters that are divided among ranks.
        redo: aborts the current step and begins it again; the gate calls it inside the graph after a fault.

    Raises:
        UnsupportedError: the framework version, the parallel mode or the training cell is not supported.
        StateError: a parameter cannot be saved, or a slice does not fit its parameter.
    """

    def __init__(
        self,
        cell: Any,
        extras: dict[str, Any],
        seed: int,
        slices: Mapping[str, Slice],
        redo: Callable[[], None],
    ) -> None:
        check_supported()
        super().__init__(*place(), seed)
        self._cell = cell
        self._host = _gate_place(cell)
        self._before = self._host.grad_reducer
        self._redo = redo
        self._native = parallel_mode() == "data_parallel" and self.world_size > 1
        self.live = self.world_size > 1 and not self._native
        graph = ms.get_context("mode") == ms.GRAPH_MODE
        self.state = MindSporeState(cell, cell.optimizer, extras, slices, copy_all=not graph)
        if self.rank == 0 and any(isinstance(each, nn.Dropout) for _, each in cell.cells_and_names()):
            log.warning(
                "holdfast: nn.Dropout keeps its random numbers to itself: a process that begins again draws other ones"
            )
        if self.world_size > 1:
            _check_slices(cell, slices, native=self._native)
        self._reduction = Reduction(
            self.rank,
            self.world_size,
            [self.state.metas[fqn] for fqn in self.state.trained],
            mean=mean_of_gradients(native=self._native),
            native=self._native,
        )
        self._alone = False  # True in a newcomer that has not joined yet
        self._rehearsed = False
        self._passed = False
        self._voting = False  # the gradients are at the gate
        self._in_gate = False  # a block begins again while the graph runs and waits for the gate
        self._buffers: NDArray[Any] | None = None
        self._flushed = False  # whether this thread flushed denormals before the session

    # ------------------------------------------------------------------ hooks

    def attach(self, hooks: Hooks, on_fault: Callable[[str], None], on_collective: OnCollective) -> None:
        """Put the gate between the gradients and the optimizer. The graph must not have been compiled yet."""
        super().attach(hooks, on_fault, on_collective)
        self._host.grad_reducer = Gate(self._through, self.state.buffers, self._before)
        # begin_equal() broadcasts: MindSpore has no broadcast without a parallel mode or on CPU.
        if self._broadcasts():
            ms.set_auto_parallel_context(parameter_broadcast=False)
        self._announce_compiling()
        self._flushed = flush_denormals(True)

    def detach(self) -> None:
        """Close the connections. A compiled graph keeps its gate, which raises at the next gradients."""
        super().detach()
        flush_denormals(self._flushed)
        self._host.grad_reducer = self._before
        self._cell.__dict__.pop("compile", None)

    def _announce_compiling(self) -> None:
        """Report to the session when MindSpore compiles, so that the session does not take this time for a hang.

        MindSpore compiles at the first call and for each new shape.
        """
        compile_cell, hooks = self._cell.compile, self._hooks
        assert hooks is not None

        def announced(*arguments: Any, **options: Any) -> Any:
            hooks.compiling(True)
            try:
                return compile_cell(*arguments, **options)
            finally:
                hooks.compiling(False)

        self._cell.__dict__["compile"] = announced

    def is_fault(self, error: BaseException) -> bool:
        """Return True, and report the fault, if ``error`` means that MindSpore's own AllReduce broke.

        A broken sum over Holdfast's connections has already poisoned the process.
        """
        broken = self._native and isinstance(error, RuntimeError) and "Launch kernel failed" in str(error)
        if broken:
            self._broke("MindSpore's AllReduce failed")
        return broken

    def _through(self, vector: NDArray[Any]) -> NDArray[Any]:
        """Pass the gradients through the gate: sum them and vote.

        After a fault, sum and vote again with the same gradients.
        """
        if self._hooks is None:
            raise StepError(
                "a guarded optimizer steps outside of a step",
                hint="train through holdfast.mindspore: its callback opens the steps",
            )
        self._voting = True
        try:
            total = self._voted(vector, self._hooks)
        finally:
            self._voting = False
        self._passed = True
        if riding := sum(int(p.size) for p in self.state.buffers):
            self._buffers = total[len(total) - riding :].copy()
        return total

    def _voted(self, vector: NDArray[Any], hooks: Hooks) -> NDArray[Any]:
        while True:
            try:
                total = vector if self._alone else self._summed(vector)
                hooks.update(OPTIMIZER)
            except (PeerLost, Aborted):
                self._again()
            else:
                return total

    def _again(self) -> None:
        """Begin the current block again inside the gate, with the gradients that it has already computed."""
        self._in_gate = True
        try:
            self._redo()
        finally:
            self._in_gate = False

    def _summed(self, vector: NDArray[Any]) -> NDArray[Any]:
        """Return the sum of the gradients over all ranks, followed by rank 0's buffers, as one vector."""
        return vector if self.world_size == 1 else self._reduction.reduced(vector, self._sum)

    def _sum(self, vector: NDArray[Any], among: Sequence[int] | None) -> NDArray[Any]:
        """Return the sum of ``vector`` over the ranks ``among``; None means all. Raises: PeerLost."""
        since_ns = time.monotonic_ns()
        total = self.mesh.sum(vector, among)
        if self._hooks is not None:
            self._hooks.waited(since_ns, time.monotonic_ns())
        return total

    # ------------------------------------------------------------------ state

    def collect(self, *, frozen: bool = False, before: int = -1) -> MindSporeCollected:
        """Return the present state, or, if ``frozen``, the state at the start of the current step."""
        return self.state.collect(frozen=frozen, before=before)

    def state_size(self) -> int:
        """Return a number that changes with the layout of the user's own state.

        The layout of the optimizer does not change, because MindSpore's optimizers have all their state from the start.
        """
        return self.state.extras.size()

    def restore(self, catalogue: Catalogue, values: Mapping[str, Plain]) -> MindSporeRestore:
        """Return the object that loads a checkpoint into this state.

        The caller fills the buffers of the returned object, then calls ``finish`` of that object.

        Raises:
            CheckpointMismatch: the checkpoint does not fit this state.
        """
        return self.state.restore(catalogue, values)

    def feed(self, loader: Any) -> Feed:
        """Return the feed that draws batches of a MindSpore pipeline. Raises: UsageError, UnsupportedError."""
        return DataFeed(loader, self._seed, self.world_size, self._drawing)

    def _drawing(self, busy: bool) -> None:
        """Report to the session that drawn batches are drawn again, so that this is not taken for a hang."""
        if self._hooks is not None:
            self._hooks.compiling(busy)

    # ------------------------------------------------------------------ step

    def begin(self, step: int) -> None:
        """Seed the generators and copy the state that the step may change.

        If the same step begins again inside the graph, after the forward pass, do nothing.
        """
        if self._in_gate:
            return
        self._passed = False
        self.state.take()
        ms.manual_seed(self._reseed(step) % 2**31)

    def _framework_seed(self) -> object:
        return ms.get_seed()

    def shield(self) -> None:
        """Do nothing: a broken sum raises in the gate, which handles it."""

    def record(self, name: str) -> None:
        """Raise UnsupportedError, because MindSpore's updates cannot be made before the vote."""
        raise UnsupportedError(
            "step.update(name) is not supported with MindSpore", hint="one optimizer per step"
        )

    def prepare_vote(self) -> None:
        """Do nothing: the gradients are complete, because the gate has already read them from the device."""

    def end(self) -> None:
        """Set this rank's buffers (moving statistics) to rank 0's, after the graph has run.

        Raises:
            StepError: the gradients did not pass the gate, so weights changed without a vote.
        """
        if not self._passed:
            raise StepError(
                "the gradients of this step did not pass the gate",
                hint="wrap the optimizer: holdfast.mindspore.guard(optimizer), before nn.TrainOneStepCell or Model",
            )
        if self._buffers is None:
            return
        start = 0
        for parameter in self.state.buffers:
            piece = self._buffers[start : start + parameter.size]
            start += parameter.size
            if self.rank != 0:
                assign(parameter, piece.reshape(parameter.shape))

    def release(self) -> None:
        """Do nothing: :meth:`shield` did nothing either."""

    def abort(self) -> None:
        """Restore the copied values, which do not include the weights.

        Nothing is restored in two cases. In the gate the gradients are kept, and no weight has changed. After
        MindSpore's own group broke, operators may hang, and this process will be replaced.
        """
        if not self._in_gate and not (self._native and self.poisoned):
            self.state.put_back()

    # ------------------------------------------------------------------ copies

    def _of_vote(self) -> MindSporeCollected | None:
        """Return the state of the vote in progress; None if no vote is in progress.

        This state has the present weights, and the copies of values that the graph may have changed.
        """
        return self.state.collect(frozen=True) if self._voting else None

    def _broadcasts(self) -> bool:
        return bool(ms.get_auto_parallel_context("parameter_broadcast"))

    def _remedy(self) -> str:
        return (
            "mindspore.set_seed(1) before the network is made; or "
            "mindspore.set_auto_parallel_context(parameter_broadcast=True), then all ranks begin with rank 0's"
        )

    # ------------------------------------------------------------------ groups

    def reconfigure(self, generation: Generation) -> None:
        """Connect to the other ranks again under ``generation``.

        Raises:
            GroupError: a rank did not connect, or gradients are summed by MindSpore's own group, which cannot be
                rebuilt.
        """
        if self._native:
            raise GroupError("MindSpore's own group gives wrong sums after a fault: the workers must restart")
        self._alone = False
        self._rehearsed = True  # a block of a connected process has peers
        self._reduction.forget()
        self._lines().reconfigure(generation)

    def rehearse(self) -> bool:
        """Return True at the first call in a newcomer, which rehearses its block before it connects to the other ranks.

        In the rehearsal the newcomer compiles its graph and computes gradients.
        """
        client = WorkerClient.current()
        if client is None or not client.joining or self._rehearsed:
            return False
        self._rehearsed = self._alone = True
        return True


def check_supported() -> None:
    """Refuse an unsupported version or parallel mode, and warn about an untested device.

    Raises:
        UnsupportedError: the error names the supported versions or modes.
    """
    if not ms.__version__.startswith(VERSIONS):
        raise UnsupportedError(
            f"MindSpore {ms.__version__} is not supported; supported are {', '.join(v + 'x' for v in VERSIONS)}",
            hint="pip install 'mindspore==2.10.0'",
        )
    device = str(ms.get_context("device_target"))
    if device not in DEVICES:
        log.warning("holdfast: MindSpore on %s is untried: tests ran on %s only", device, ", ".join(DEVICES))
    mode = parallel_mode()
    if mode not in MODES:
        raise UnsupportedError(
            f"parallel mode {mode} is not supported (nor is it by MindSpore on CPU); supported are {', '.join(MODES)}",
            hint='mindspore.set_auto_parallel_context(parallel_mode="data_parallel"), or none',
        )


def _check_slices(cell: Any, slices: Mapping[str, Slice], *, native: bool) -> None:
    """Check that the gradient of every slice is added only on the ranks that hold this slice.

    Raises:
        UsageError: a ``layerwise_parallel`` parameter is not declared; the error names it.
        UnsupportedError: MindSpore's own AllReduce would add a slice to other slices; the error names it.
    """
    for parameter in cell.get_parameters():
        name = str(parameter.name)
        # The parameter is a declared slice, or an optimizer slot of a declared slice.
        declared = name in slices or any(name.endswith(f".{each}") for each in slices)
        if parameter.layerwise_parallel and not declared:
            raise UsageError(
                f"parameter {name!r} is layerwise_parallel, and nothing says which part of it this rank holds",
                hint=f"slices={{{name!r}: holdfast.mindspore.Slice(shape_of_all, offsets_of_this_rank)}}",
            )
        if native and name in slices and not parameter.layerwise_parallel:
            raise UnsupportedError(
                f"parameter {name!r} is in slices=, and MindSpore's AllReduce would add up gradients of different "
                "slices",
                hint="Parameter(..., layerwise_parallel=True), or no parallel mode",
            )


def parallel_mode() -> str:
    """Return the name of MindSpore's parallel mode, for example ``stand_alone``."""
    return str(ms.get_auto_parallel_context("parallel_mode"))


def place() -> tuple[int, int]:
    """Return rank and world size, from MindSpore's group or the launcher's variables.

    Raises:
        UsageError: the variables are incomplete, or contradict each other or the group.
        SystemExit: this process is msrun's scheduler, which does not train and so must end.
    """
    if GlobalComm.INITED:
        return place_here((int(get_rank()), int(get_group_size())))
    if os.environ.get("MS_ROLE") == "MS_SCHED":
        raise SystemExit(0)  # msrun starts the script once more as its scheduler, which does not train
    return place_here()


def _gate_place(cell: Any) -> Any:
    """Return the cell whose ``grad_reducer`` the gate replaces.

    If Holdfast has wrapped the optimizer, the result is the :class:`Relay` inside. Otherwise it is the training cell.
    """
    optimizer = getattr(cell, "optimizer", None)
    if optimizer is None:
        raise UnsupportedError(
            f"a {type(cell).__name__} without `optimizer` is no training cell",
            hint="give the session nn.TrainOneStepCell(network, optimizer), or a cell with these two attributes",
        )
    relay = getattr(optimizer, "relay", None)
    if isinstance(relay, Relay):
        return relay
    if not hasattr(cell, "grad_reducer"):
        raise UnsupportedError(
            f"a {type(cell).__name__} without `grad_reducer` has no place for the vote",
            hint="wrap the optimizer: holdfast.mindspore.guard(optimizer)",
        )
    return cell
