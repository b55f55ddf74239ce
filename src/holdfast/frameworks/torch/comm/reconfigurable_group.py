"""The process group that user code holds: a Python ``ProcessGroup`` whose inner group can be replaced.

DDP, FSDP2, DeviceMesh and user code keep their references to a group, so the group stays and a new generation replaces
its inner group. The methods are those of torch 2.13, old names included. Python callers reach all of them; C++ callers
reach those that torch forwards to Python subclasses.

Invariants:
1. Every collective goes through :meth:`ReconfigurableGroup._run`. That method counts the collective, checks the modes
   of the process (``comm_state.py``), and returns a work whose waits end when the process is poisoned. An exception
   that shows a wrong call is passed on unchanged.
2. ``inner`` was built in the current generation of the process. It is None in a process that began in loopback, until
   its loopback ends.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.core.ids import Generation
from holdfast.errors import GroupError, UnsupportedError
from holdfast.frameworks.common.adapter import GroupsDiffer
from holdfast.frameworks.torch import private_api
from holdfast.frameworks.torch.comm import control_store, loopback_ops
from holdfast.frameworks.torch.comm.comm_state import REBUILD_TIMEOUT_S, CommState
from holdfast.frameworks.torch.comm.communicator import FreshGroups
from holdfast.frameworks.torch.comm.group_builder import GLOO, BuiltGroup, GroupSpec, build
from holdfast.frameworks.torch.comm.group_numbers import GroupChange, GroupKey
from holdfast.frameworks.torch.comm.lasting_results import lasting_results
from holdfast.frameworks.torch.comm.outer_group import OuterGroup
from holdfast.frameworks.torch.comm.setup_record import SetupCall, setup_record
from holdfast.frameworks.torch.comm.work import GuardedWork, InnerWork, LocalWork, Several, Wait, is_bug
from holdfast.frameworks.torch.private_api import Backend, PrefixStore, Store, Work
from holdfast.runtime.node import deferred_rank
from holdfast.runtime.node.deferred_rank import DeferredRank
from holdfast.runtime.node.flight_recorder import Flight, text_of
from holdfast.runtime.node.shm_allreduce import SharedMemoryAllReduce
from holdfast.text import plural

Fill = Callable[[], None]
VOTE = "vote"
PLACES_MAX = 3  # in an error
RANKS_MAX = 8
_WITHOUT_DATA = frozenset({"send", "barrier"})
_SAME_SIZE = frozenset({"all_reduce", "broadcast", "reduce", "all_gather_into_tensor"})


class ReconfigurableGroup(OuterGroup):
    """One process group of the job, with connections that each generation replaces.

    Args:
        fabric: the state shared by all groups of the process.
        spec: the parameters from which the inner group is built, now and after a fault.
        store: the store that torch gave for the group; used if this process has no control client.
    """

    def __init__(self, fabric: CommState, spec: GroupSpec, store: Store) -> None:
        super().__init__(spec)
        self._fabric = fabric
        self._store = store
        self._ways = {
            device: Wait.SLICES if backend == GLOO else Wait.STREAM for device, backend in spec.backends
        }
        # For operations without a tensor (barrier): C++ passes them to NCCL if the group has an NCCL backend.
        self._default_way = Wait.STREAM if Wait.STREAM in self._ways.values() else Wait.SLICES
        self._coalescing: dict[int, dist.ProcessGroup] = {}  # by thread: the group in which coalescing began
        self._begun = 0  # collectives begun in this generation
        client = control_store.control_client()
        self._of_all = client is not None and client.world_size == spec.world_size
        self._texts: dict[tuple[str, int, torch.dtype | None], bytes] = {}
        self.communicator = FreshGroups(fabric, spec, self._store_in)
        self._built_in: Generation | None = None
        stand_in = deferred_rank.current()
        if stand_in is not None and not stand_in.called:
            self.rank = lambda: self._asked(stand_in)  # type: ignore[method-assign]
        fabric.add(self)
        if fabric.looped:
            return
        if not spec.order[0] and spec.world_size > 1 and self.replaceable():
            hello = PrefixStore("holdfast/", store)
            fabric.start = control_store.agree_on_start(hello, spec.rank, spec.world_size, spec.timeout)
        self._connect_new()

    # ------------------------------------------------------------------ generations

    def _connect_new(self) -> None:
        """Connect this new group, unless a peer is lost in a block: the recovery then connects it.

        The block continues on local data, so that all ranks that run it hold the group.

        Raises: GroupError: the members did not find each other; this process does not hold the group then.
        """
        fabric, late = self._fabric, bool(self.spec.order[0])
        if late and fabric.cut_off:
            return
        try:
            self.connect()
        except GroupError:
            if late and fabric.cut_off:
                return
            if late:
                fabric.drop(self)
            raise

    def connect(self) -> None:
        self._connect(self._fabric.generation, self.spec.timeout)

    def _asked(self, stand_in: DeferredRank) -> int:
        """Return the rank of this process in the group.

        In a spare, wait until the rank is known, unless a placeholder is enough for the caller.
        """
        stand_in.ask()
        return self.spec.rank

    def become(self, rank: int) -> None:
        """Take over ``rank`` in this process, which was a spare until now.

        A spare has only groups of all ranks until then, because making any other group asks for the rank.
        """
        self.spec = self.communicator.spec = dataclasses.replace(self.spec, rank=rank)

    @property
    def inner(self) -> BuiltGroup | None:
        return self.communicator.built

    @property
    def built_in(self) -> Generation | None:
        return self._built_in

    @property
    def order(self) -> tuple[tuple[int, ...], int]:
        return self.spec.order

    @property
    def key(self) -> GroupKey:
        return GroupKey(*self.spec.order, self.spec.place)

    def replaceable(self) -> str:
        client = control_store.control_client()
        if client is None:
            return "this process has no control plane (start the job with `holdfast run`)"
        if not self.spec.order[0] and client.world_size != self.spec.world_size:
            return (
                f"the default group has {plural(self.spec.world_size, 'rank')}, the job {client.world_size}"
            )
        return ""

    def meet(self, generation: Generation, changes: Sequence[GroupChange]) -> None:
        """Wait until every rank is about to rebuild its groups, and compare ``changes`` with the ranks they concern.

        A rank may arrive late, from code between two steps. Without this wait, a peer that dials the late rank would
        give up at gloo's time-out.
        """
        store = self._store_in(str(generation), self.spec.timeout)
        for change in changes:
            store.set(f"changed/{change.digest}/{self.spec.rank}", "")
        store.set(f"here/{self.spec.rank}", "")
        try:
            if self.spec.rank == 0:
                store.wait([f"here/{rank}" for rank in range(self.spec.world_size)])
                store.set("here", "")
            store.wait(["here"])
        except dist.DistStoreError as error:
            raise GroupError(f"not every rank came to the groups {generation}: {error}") from error
        for change in changes:
            if not store.check([f"changed/{change.digest}/{rank}" for rank in change.ranks]):
                raise _groups_differ(change)

    def rebuild(self, generation: Generation) -> None:
        self._connect(generation, min(self.spec.timeout, timedelta(seconds=REBUILD_TIMEOUT_S)))
        self._begun = 0

    def _connect(self, generation: Generation, limit: timedelta) -> None:
        handles = self.communicator.all_handles()
        self.communicator.reconfigure(str(generation), handles, limit)
        self._built_in = generation

    def build_vote(self, generation: Generation) -> BuiltGroup:
        ordinal = self.spec.order[1]
        spec = GroupSpec(
            name=f"{VOTE}.{ordinal}",
            order=((), ordinal),
            rank=self.spec.rank,
            world_size=self.spec.world_size,
            backends=(("cpu", GLOO),),
            timeout=self.spec.timeout,
        )
        store = self._store_of(str(generation), spec.name, spec.timeout)
        return build(spec, store, spec.timeout, self._fabric.stopped())

    def open_board(self, generation: Generation) -> SharedMemoryAllReduce | None:
        client = control_store.control_client()
        if client is None or client.shared is None or client.world_size != self.spec.world_size:
            return None
        path = client.shared / f"board-{generation}-{self.spec.order[1]}"
        return SharedMemoryAllReduce(path, self.spec.rank, self.spec.world_size).start()

    def _store_in(self, generation: str, limit: timedelta) -> Store:
        return self._store_of(generation, self.spec.name, limit)

    def _store_of(self, generation: str, name: str, limit: timedelta) -> Store:
        """Return the key-value store in which group ``name`` connects in ``generation``; waits end after ``limit``."""
        client = control_store.control_client()
        if client is None or self.replaceable():
            return PrefixStore(f"holdfast/{self._fabric.start}/{name}/", self._store)
        store = control_store.ControlStore(client, f"g{generation}/{name}/", self._fabric.stopped())
        store.set_timeout(limit)
        return store

    # ------------------------------------------------------------------ one way for all collectives

    def _run(
        self,
        what: str,
        issue: Callable[[dist.ProcessGroup], InnerWork | None],
        outputs: Sequence[Any],
        fill: Fill | None = None,
        *,
        on: Tensor | None = None,
        after: Fill | None = None,
        p2p: bool = False,
        joint: bool = True,
    ) -> Work:
        """Begin a collective and return its work.

        Args:
            what: name of the collective.
            issue: begins the collective on the inner group.
            outputs: value of the work's future.
            fill: completes the collective on local data.
            on: a tensor of the collective, whose device determines the backend.
            after: called once the collective has succeeded.
            p2p: True for a point-to-point call, whose work cannot be waited for in slices.
            joint: every rank of the group makes the call.
        """
        fabric = self._fabric
        results = list(outputs)
        setup = None if p2p or not results else setup_record()
        call = None if setup is None else setup.call(what, self.spec.name, self.spec.rank)
        local = fabric.begin(what, joint=self._of_all and joint and not p2p)
        count = fabric.collectives
        if fabric.flight is not None:
            self._record(fabric.flight, count, what, on, p2p)
        if local:
            fabric.ended(count)
            if setup is not None and fabric.looped and self._put_back(what, call, results):
                return LocalWork(results)
            return self._local(what, results, fill)
        if call is not None:
            after = partial(self._keep, call, results, after)
        way = self._default_way if on is None else self._ways.get(on.device.type, self._default_way)
        if p2p and way is Wait.SLICES:
            way = Wait.THREAD
        if way is Wait.STREAM and torch.cuda.is_current_stream_capturing():
            raise _captured(what)
        epoch = fabric.epoch
        try:
            work = issue(self.communicator.group)
        except Exception as error:
            if is_bug(error):
                raise
            fabric.ended(count, broken=True)
            fabric.broke(what, error, epoch)
            fabric.give_up(what)
            return self._local(what, results, fill)
        if work is None:  # while calls are coalesced, NCCL returns one work for all of them, at the end
            return LocalWork(results)
        return GuardedWork(fabric, what, work, results, way, fill, after, count)

    def _put_back(self, what: str, call: SetupCall | None, outputs: list[Any]) -> bool:
        """In a newcomer, return the kept result of a collective before the first step, as the lost process got it.

        A spare waits here until its rank is known.
        """
        setup, stand_in = setup_record(), deferred_rank.current()
        if call is not None and setup is not None:
            if stand_in is not None:
                stand_in.ask()
            if setup.put_back(call._replace(rank=self.spec.rank), outputs):
                return True
        self._fabric.refuse_own_data(what)
        return False

    def _keep(self, call: SetupCall, outputs: list[Any], after: Fill | None) -> None:
        if after is not None:
            after()
        if (setup := setup_record()) is not None:
            setup.keep(call, outputs)

    def _local(self, what: str, outputs: list[Any], fill: Fill | None) -> Work:
        """Complete a collective on local data."""
        if fill is not None:
            fill()
        if what in _WITHOUT_DATA or lasting_results().complete(outputs):
            return LocalWork(outputs)
        return LocalWork(outputs, self._fabric, what)

    def _record(self, flight: Flight, count: int, what: str, on: Tensor | None, p2p: bool) -> None:
        """Record the start of a collective in the flight recorder.

        The record has the number of elements only if all ranks must pass the same number to this collective.
        """
        key = (what, on.numel(), on.dtype) if on is not None and what in _SAME_SIZE else (what, 0, None)
        text = self._texts.get(key)
        if text is None:
            size = f" of {key[1]} {str(key[2]).removeprefix('torch.')}" if key[2] is not None else ""
            text = self._texts[key] = text_of(self.spec.name, f"{what}{size}")
        if not p2p:
            self._begun += 1
        flight.begin(count, 0 if p2p else self._begun, text)

    def _by_gloo(self, tensor: Tensor) -> bool:
        return self._ways.get(tensor.device.type, self._default_way) is Wait.SLICES

    # ------------------------------------------------------------------ reductions

    def allreduce(self, tensors: Any, *args: Any, **kwargs: Any) -> Work:  # type: ignore[override]
        outputs = _as_list(tensors)
        return self._run(
            "all_reduce", lambda g: g.allreduce(tensors, *args, **kwargs), outputs, on=outputs[0]
        )

    def allreduce_coalesced(self, tensors: list[Tensor], *args: Any) -> Work:
        return self._run(
            "all_reduce_coalesced", lambda g: g.allreduce_coalesced(tensors, *args), tensors, on=tensors[0]
        )

    def reduce(self, tensors: Any, *args: Any, **kwargs: Any) -> Work:  # type: ignore[override]
        outputs = _as_list(tensors)
        return self._run("reduce", lambda g: g.reduce(tensors, *args, **kwargs), outputs, on=outputs[0])

    def reduce_scatter(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Work:  # type: ignore[override]
        outs = _as_list(outputs)
        rows: list[list[Tensor]] = inputs if isinstance(inputs[0], list | tuple) else [inputs]

        def fill() -> None:
            loopback_ops.pick(outs, rows, self.spec.rank)

        if not self._by_gloo(outs[0]):
            return self._run(
                "reduce_scatter",
                lambda g: g.reduce_scatter(outputs, inputs, *args, **kwargs),
                outs,
                fill,
                on=outs[0],
            )
        opts = _reduction(args, kwargs)
        parts = [[part.detach().clone() for part in row] for row in rows]

        def issue(group: dist.ProcessGroup) -> InnerWork:
            works: list[InnerWork] = []
            for row in parts:
                for root, part in enumerate(row):
                    reduction = dist.ReduceOptions()
                    reduction.reduceOp, reduction.timeout, reduction.rootRank = (
                        opts.reduceOp,
                        opts.timeout,
                        root,
                    )
                    works.append(group.reduce([part], reduction))
            return Several(works)

        # One reduce for each part, as gloo does it, because gloo's own work cannot be waited for in slices.
        after = lambda: loopback_ops.pick(outs, parts, self.spec.rank)  # noqa: E731
        return self._run("reduce_scatter", issue, outs, fill, on=outs[0], after=after)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Work:
        return self._reduce_scatter_tensors("reduce_scatter_tensor", [output], [source], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], sources: list[Tensor], opts: Any = None
    ) -> Work:
        return self._reduce_scatter_tensors("reduce_scatter_tensor_coalesced", outputs, sources, opts)

    def _reduce_scatter_tensors(
        self, what: str, outputs: list[Tensor], sources: list[Tensor], opts: Any
    ) -> Work:
        rank, world_size = self.spec.rank, self.spec.world_size
        opts = opts if opts is not None else dist.ReduceScatterOptions()

        def fill() -> None:
            for output, source in zip(outputs, sources, strict=True):
                loopback_ops.chunk(output, source, rank, world_size)

        def issue(group: dist.ProcessGroup) -> Work:
            if len(outputs) == 1:
                return private_api.collective(group, "reduce_scatter_single")(outputs[0], sources[0], opts)
            return private_api.collective(group, "reduce_scatter_single_coalesced")(outputs, sources, opts)

        if not self._by_gloo(outputs[0]):
            return self._run(what, issue, outputs, fill, on=outputs[0])
        for output, source in zip(outputs, sources, strict=True):
            if output.numel() * world_size != source.numel():
                raise ValueError(
                    f"{what}: input must have {world_size} x {output.numel()} elements, not {source.numel()}"
                )
        buffers = [source.detach().reshape(-1).clone() for source in sources]
        return self._scatter_sums(what, outputs, buffers, opts, fill)

    def _scatter_sums(
        self, what: str, outputs: list[Tensor], buffers: list[Tensor], opts: Any, fill: Fill
    ) -> Work:
        """Run a reduce-scatter as gloo does it: an all-reduce, then a copy of this rank's part.

        gloo's own reduce-scatter is not used, because its work cannot be waited for in slices.
        """
        world_size, rank = self.spec.world_size, self.spec.rank
        reduction = dist.AllreduceOptions()
        reduction.reduceOp = opts.reduceOp
        reduction.timeout = opts.timeout

        def issue(group: dist.ProcessGroup) -> InnerWork:
            works: list[InnerWork] = [group.allreduce([buffer], reduction) for buffer in buffers]
            return works[0] if len(works) == 1 else Several(works)

        def after() -> None:
            for output, buffer in zip(outputs, buffers, strict=True):
                loopback_ops.chunk(output, buffer, rank, world_size)

        return self._run(what, issue, outputs, fill, on=outputs[0], after=after)

    # ------------------------------------------------------------------ copies

    def broadcast(self, tensors: Any, *args: Any, **kwargs: Any) -> Work:  # type: ignore[override]
        outputs = _as_list(tensors)
        return self._run("broadcast", lambda g: g.broadcast(tensors, *args, **kwargs), outputs, on=outputs[0])

    def allgather(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Work:  # type: ignore[override]
        rows: list[list[Tensor]] = outputs if isinstance(outputs[0], list | tuple) else [outputs]
        sources = _as_list(inputs)
        return self._run(
            "all_gather",
            lambda g: g.allgather(outputs, inputs, *args, **kwargs),
            outputs,
            lambda: loopback_ops.fill_lists(rows, sources),
            on=sources[0],
        )

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], *args: Any) -> Work:
        return self._run(
            "all_gather_coalesced",
            lambda g: g.allgather_coalesced(outputs, inputs, *args),
            outputs,
            lambda: loopback_ops.fill_by_rank(outputs, inputs),
            on=inputs[0],
        )

    def all_gather_single(self, output: Tensor, source: Tensor, *args: Any) -> Work:
        return self._run(
            "all_gather_into_tensor",
            lambda g: private_api.collective(g, "all_gather_single")(output, source, *args),
            [output],
            lambda: loopback_ops.repeat(output, source, self.spec.world_size),
            on=source,
        )

    def all_gather_single_coalesced(self, outputs: list[Tensor], sources: list[Tensor], *args: Any) -> Work:
        def fill() -> None:
            for output, source in zip(outputs, sources, strict=True):
                loopback_ops.repeat(output, source, self.spec.world_size)

        return self._run(
            "all_gather_into_tensor_coalesced",
            lambda g: private_api.collective(g, "all_gather_single_coalesced")(outputs, sources, *args),
            outputs,
            fill,
            on=sources[0],
        )

    def gather(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Work:  # type: ignore[override]
        rows: list[list[Tensor]] = (
            outputs if not outputs or isinstance(outputs[0], list | tuple) else [outputs]
        )
        sources = _as_list(inputs)
        return self._run(
            "gather",
            lambda g: g.gather(outputs, inputs, *args, **kwargs),
            outputs,
            lambda: loopback_ops.fill_lists(rows, sources),
            on=sources[0],
        )

    def gather_single(self, output: Tensor | None, source: Tensor, *args: Any) -> Work:
        outputs = [] if output is None else [output]

        def fill() -> None:
            if output is not None and output.numel() == source.numel() * self.spec.world_size:
                loopback_ops.repeat(output, source, self.spec.world_size)

        return self._run(
            "gather",
            lambda g: private_api.collective(g, "gather_single")(output, source, *args),
            outputs,
            fill,
            on=source,
        )

    gather_into_tensor = gather_single

    def scatter(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Work:  # type: ignore[override]
        outs = _as_list(outputs)
        rows: list[list[Tensor]] = inputs if not inputs or isinstance(inputs[0], list | tuple) else [inputs]
        return self._run(
            "scatter",
            lambda g: g.scatter(outputs, inputs, *args, **kwargs),
            outs,
            lambda: loopback_ops.pick(outs, rows, self.spec.rank),
            on=outs[0],
        )

    def all_to_all_single(
        self, output: Tensor, source: Tensor, output_sizes: list[int], input_sizes: list[int], *args: Any
    ) -> Work:
        return self._run(
            "all_to_all_single",
            lambda g: private_api.collective(g, "all_to_all_single")(
                output, source, output_sizes, input_sizes, *args
            ),
            [output],
            lambda: loopback_ops.copy(output, source),
            on=output,
        )

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], *args: Any) -> Work:
        return self._run(
            "all_to_all",
            lambda g: g.alltoall(outputs, inputs, *args),
            outputs,
            lambda: loopback_ops.zip_copy(outputs, inputs),
            on=outputs[0],
        )

    # ------------------------------------------------------------------ point to point, barriers

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Work:
        return self._run("send", lambda g: g.send(tensors, dst, tag), tensors, on=tensors[0], p2p=True)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Work:
        return self._run(
            "recv",
            lambda g: g.recv(tensors, src, tag),
            tensors,
            lambda: loopback_ops.one(tensors),
            on=tensors[0],
            p2p=True,
        )

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        return self._run(
            "recv",
            lambda g: g.recv_anysource(tensors, tag),
            tensors,
            lambda: loopback_ops.one(tensors),
            on=tensors[0],
            p2p=True,
        )

    def barrier(self, *args: Any, **kwargs: Any) -> Work:
        return self._run("barrier", lambda g: g.barrier(*args, **kwargs), [])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Run gloo's barrier that names a missing rank. Its error goes to the user and does not count as a fault."""
        if not self._fabric.begin("monitored_barrier", joint=self._of_all):
            group: Any = self.communicator.group
            group.monitored_barrier(timeout or self.spec.timeout, wait_all_ranks)

    def _start_coalescing(self, device: torch.device) -> None:
        if self._fabric.calm:
            group = self.communicator.group
            group._start_coalescing(device)
            self._coalescing[threading.get_ident()] = group

    def _end_coalescing(self, device: torch.device) -> Work:
        """End coalescing in the inner group in which this thread began it, even if that group was aborted since.

        NCCL counts the starts and ends per thread.
        """
        group = self._coalescing.pop(threading.get_ident(), None)
        if group is None:
            return self._local("end_coalescing", [], None)
        if not self._fabric.calm:
            with suppress(RuntimeError):  # the error of the abort
                group._end_coalescing(device)
        on = torch.empty(0, device=device)
        # The coalesced calls may be point-to-point.
        return self._run("end_coalescing", lambda _: group._end_coalescing(device), [], on=on, joint=False)

    # ------------------------------------------------------------------ what torch asks of the backend

    def _get_backend(self, device: torch.device) -> Backend:
        if self.inner is None and (self._fabric.looped or self._fabric.cut_off):
            return private_api.rehearsal_backend(self.spec.rank, self.spec.world_size)
        return self.communicator.group._get_backend(device)

    get_backend = _get_backend

    def _get_sequence_number_for_group(self) -> int:
        group: Any = self.communicator.group
        return int(group._get_sequence_number_for_group())

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        if self.inner is not None:  # a rehearsal has no peers to wait for
            group: Any = self.communicator.group
            group._add_ephemeral_timeout(timeout)

    # ------------------------------------------------------------------ life

    def set_timeout(self, timeout: timedelta) -> None:
        self.communicator.group.set_timeout(timeout)

    def abort(self) -> None:
        self.communicator.abort()

    def shutdown(self) -> None:
        self._fabric.drop(self)
        self.communicator.close()

    def leave(self) -> None:
        """Join gloo's threads, because the process is about to end.

        A group with NCCL is left as it is, because its end could wait for peers.
        """
        if all(backend == GLOO for _, backend in self.spec.backends):
            self.shutdown()


COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_single", "broadcast"),
    *("reduce_scatter_single_coalesced", "allgather", "allgather_coalesced", "all_gather_single", "gather"),
    *("all_gather_single_coalesced", "scatter", "all_to_all_single", "alltoall", "send", "recv", "barrier"),
    *("recv_anysource", "monitored_barrier", "_start_coalescing", "_end_coalescing"),
)
"""Methods that ``torch.compile`` must call without tracing into them."""


def _finish_methods() -> None:
    for name in COLLECTIVES:
        setattr(ReconfigurableGroup, name, private_api.untraced(getattr(ReconfigurableGroup, name)))
    private_api.give_old_names(ReconfigurableGroup)


_finish_methods()


def _groups_differ(change: GroupChange) -> GroupsDiffer:
    ranks, places = change.ranks, ", ".join(change.places[:PLACES_MAX])
    named = ", ".join(map(str, ranks[:RANKS_MAX])) + (", ..." if len(ranks) > RANKS_MAX else "")
    how = f"{places} makes groups" if places else "the script destroys groups"
    return GroupsDiffer(
        f"ranks {named} hold different process groups, because {how} after the session was opened",
        hint="make process groups before the session, so that a lost rank is replaced alone",
    )


def _captured(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} while a CUDA graph is captured: the graph would hold connections that a recovery replaces",
        hint="keep collectives out of the graph, and compile without mode='reduce-overhead' or 'max-autotune'",
    )


def _as_list(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else cast(list[Tensor], list(tensors))


def _reduction(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the options of a reduce-scatter call; the caller may have passed only a reduce operation."""
    given = args[0] if args else kwargs.get("opts", kwargs.get("op"))
    if isinstance(given, dist.ReduceScatterOptions):
        return given
    opts = dist.ReduceScatterOptions()
    if given is not None:
        opts.reduceOp = given
    return opts
