"""All uses of torch's private names: no other module uses them.

torch may change a name that begins with an underscore at any time. Recovery in place needs some of these names: the
function that makes process groups, and the states of DDP's reducer, of FSDP2 and of pipeline schedules. :data:`USES`
lists each name with its purpose, the versions that have it and the feature that needs it. :func:`failures` looks every
name up in the installed torch. ``holdfast doctor`` prints the result, and a test reports names that are missing in a
tested version.

Each function below is one small step that uses private names. The purpose of the step is explained where it is called.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import islice
from typing import Any, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Backend, PrefixStore, Store, Work
from torch._dynamo.callback import callback_handler
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim import optimizer as optim
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, dataloader

from holdfast.errors import UnsupportedError
from holdfast.frameworks.torch.private_names import SCALER_TENSORS, SCHEDULES, SHARD, STAGE, USES
from holdfast.frameworks.torch.probing import Feature, Use, probe
from holdfast.runtime.node.torch_build import Version, version_of

Function = TypeVar("Function", bound=Callable[..., Any])
Buckets: TypeAlias = list[list[int]]
"""The layout of DDP's buckets: for each bucket, the numbers of its parameters. DDP counts its parameters from 0."""

__all__ = [
    "SCALER_TENSORS",
    "USES",
    "Backend",
    "PrefixStore",
    "Store",
    "Work",
    "callback_handler",
    "tree_map_only",
]

c10d: Any = distributed_c10d
_HELPER = "_new_process_group_helper"
_RECORDER = "_maybe_attach_flight_recorder"
_BATCHED = "batch_isend_irecv"
_SCHEME = "env"


def uses_of(version: Version, feature: Feature | None = None) -> list[Use]:
    """Return the private names that this version of torch should have; with ``feature``, only the names for it."""
    return [use for use in USES if use.in_version(version) and feature in (None, use.feature)]


def failures(feature: Feature) -> list[str]:
    """Check the private names of torch that ``feature`` needs. Return one text for each name that fails the check."""
    return [wrong for use in uses_of(version_of(torch.__version__), feature) if (wrong := probe(use))]


def probed() -> tuple[int, list[tuple[str, str]]]:
    """Return the number of private names that pass their check on the installed torch, and the failures.

    Each failure is a pair: a text with the name, and the feature that needs the name. Names of NCCL count only if this
    build of torch has NCCL.
    """
    uses = [
        use
        for use in uses_of(version_of(torch.__version__))
        if use.feature is not Feature.NCCL or dist.is_nccl_available()
    ]
    failed = [(wrong, use.feature.value) for use in uses if (wrong := probe(use))]
    return len(uses) - len(failed), failed


# ---------------------------------------------------------------- making groups


def helper() -> Any:
    """Return the function of torch that makes every process group; None if this torch has no such function."""
    return getattr(c10d, _HELPER, None)


def replace_helper(make: Callable[..., Any], outer: type[dist.ProcessGroup]) -> None:
    """Replace torch's function that makes groups by ``make``, and keep torch's flight recorder off ``outer`` groups.

    The recorder's hook reads the C++ backend of the group that user code holds. A group of type ``outer`` has none.
    """
    setattr(c10d, _HELPER, make)
    recorder = getattr(c10d, _RECORDER, None)
    if recorder is None:
        return

    @functools.wraps(recorder)
    def attach(pg: dist.ProcessGroup, *args: Any, **kwargs: Any) -> None:
        if not isinstance(pg, outer):
            recorder(pg, *args, **kwargs)

    setattr(c10d, _RECORDER, attach)


def note_backend(group: dist.ProcessGroup, asked: str, store: Any, config: str) -> None:
    """Make ``dist.get_backend(group)`` return ``asked``."""
    c10d._world.pg_map[group] = (asked, store)
    c10d._world.pg_backend_config[group] = config


def coalesce_batches(outer: type[dist.ProcessGroup]) -> None:
    """Make ``batch_isend_irecv`` coalesce its calls on groups of type ``outer``; torch 2.14 does so without help.

    Older versions coalesce only on groups of exactly torch's own type. Without coalescing, sends and receives are
    launched one by one on one stream of NCCL. Two ranks can then wait for each other: each for the other's first call.
    """
    original = getattr(c10d, _BATCHED)
    if version_of(torch.__version__) >= (2, 14):
        return

    @functools.wraps(original)
    def batched(operations: list[dist.P2POp]) -> list[Any]:
        group = (operations[0].group if operations else None) or dist.group.WORLD
        if not isinstance(group, outer):
            return cast(list[Any], original(operations))
        device = operations[0].tensor.device
        if not group._get_backend(device).supports_coalescing:
            return cast(list[Any], original(operations))
        c10d._check_p2p_op_list(operations)
        with c10d._coalescing_manager(group, device, async_ops=True) as manager:
            for each in operations:
                peer = "group_dst" if each.op is dist.isend else "group_src"
                each.op(each.tensor, group=each.group, tag=each.tag, **{peer: each.group_peer})
        return cast(list[Any], manager.works)

    setattr(c10d, _BATCHED, batched)
    setattr(dist, _BATCHED, batched)


def new_inner_group(store: Store, rank: int, world_size: int, name: str, nccl: bool) -> dist.ProcessGroup:
    """Return a plain C++ process group that has no backends yet."""
    group = dist.ProcessGroup(store, rank, world_size)
    kinds = dist.ProcessGroup.BackendType
    group._set_default_backend(kinds.NCCL if nccl else kinds.GLOO)
    group._set_group_name(c10d.GroupName(name))
    group._set_group_desc(name)
    return group


def give_backend(group: dist.ProcessGroup, device: str, backend: Backend, nccl: bool) -> None:
    """Make collectives of ``group`` on tensors of ``device`` use ``backend``."""
    kinds = dist.ProcessGroup.BackendType
    group._register_backend(torch.device(device), kinds.NCCL if nccl else kinds.GLOO, backend)


_OLD_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
"""The names of collectives since torch 2.13, with their names before; code inside torch still calls some old names."""


def collective(group: dist.ProcessGroup, name: str) -> Callable[..., Work]:
    """Return the method ``name`` of an inner group; before torch 2.13, the same method under its older name."""
    return cast(Callable[..., Work], getattr(group, name, None) or getattr(group, _OLD_NAMES[name]))


def give_old_names(outer: type[dist.ProcessGroup]) -> None:
    """Add the method names from before torch 2.13 to ``outer``, because torch's own code calls old and new names."""
    for name, old in _OLD_NAMES.items():
        setattr(outer, old, getattr(outer, name))


def number_collectives(backend: Backend) -> None:
    """Start the count of a backend's collectives; torch 2.14 and later start it on their own."""
    if version_of(torch.__version__) < (2, 14):
        backend._set_sequence_number_for_group()


def name_backend(backend: Any, ranks: Sequence[int], name: str) -> None:
    """Set the name and the ranks that the backend shows in its messages and records."""
    backend.options.global_ranks_in_group = list(ranks)
    backend.options.group_name = c10d.GroupName(name)


def bound_work(backend: Any, timeout: timedelta) -> None:
    """Set the time-out of all later collectives of ``backend``."""
    backend._set_default_timeout(timeout)


def rehearsal_backend(rank: int, world_size: int) -> Backend:
    """Return a backend for rehearsals, which communicates with no peer."""
    fake: Any = torch._C._distributed_c10d.FakeProcessGroup
    return cast(Backend, fake._create_internal(rank, world_size))


def set_global_rank(rank: int) -> None:
    """Set the rank that torch writes into its records."""
    torch._C._distributed_c10d._set_global_rank(rank)


def rendezvous_handlers() -> tuple[dict[str, Any], str]:
    """Return torch's table of rendezvous handlers by URL scheme, and the scheme of ``env://``.

    Raises:
        UnsupportedError: this torch has no such table.
    """
    module = importlib.import_module(
        "torch.distributed.rendezvous"
    )  # the attribute of that name is a function
    handlers = getattr(module, "_rendezvous_handlers", None)
    if not isinstance(handlers, dict) or _SCHEME not in handlers:
        raise UnsupportedError(
            f"torch {torch.__version__} has no rendezvous handler table that Holdfast knows",
            hint="install a released version: pip install 'holdfast[torch]'",
        )
    return handlers, _SCHEME


# ---------------------------------------------------------------- NCCL


def new_nccl(store: Store, rank: int, world_size: int, options: Any, device: torch.device | None) -> Any:
    """Return a new backend of the class that torch uses for ``nccl``; its constructor may connect and block.

    Args:
        device: result of :func:`nccl_device`.
    """
    if device is None:
        return c10d.ProcessGroupNCCL(store, rank, world_size, options)
    return c10d.ProcessGroupNCCL2(store, rank, world_size, options, device)


def nccl_device(bound: torch.device | None) -> torch.device | None:
    """Return the device to bind a new NCCL backend to; None if the backend finds its device at each collective.

    From 2.14 on torch uses ``ProcessGroupNCCL2``, which is bound to a device. With TORCH_DIST_USE_NCCL2=0 it uses the
    older class.

    Args:
        bound: the device that the default group is bound to. None means the current device of this thread.
    """
    if not hasattr(c10d, "ProcessGroupNCCL2") or os.environ.get("TORCH_DIST_USE_NCCL2") == "0":
        return None
    return bound or torch.device("cuda", torch.cuda.current_device())


def nccl_options(options: Any, timeout: timedelta, ranks: Sequence[int], name: str) -> Any:
    """Return options for an NCCL backend: the user's or the defaults, with the given time-out, ranks and name."""
    if options is None:
        options = c10d.ProcessGroupNCCL.Options()
        options.is_high_priority_stream = False
    options._timeout = timeout
    options.global_ranks_in_group = list(ranks)
    options.group_name = name
    return options


def recorded_collectives() -> dict[str, bytes]:
    """Return the content of torch's flight recorders of this process: recorder name (``cpu``, ``nccl``) -> JSON."""
    native: Any = torch._C._distributed_c10d
    found = {"cpu": native._dump_fr_trace_json()}
    if hasattr(native, "_dump_nccl_trace_json"):  # only in a build with NCCL
        found["nccl"] = native._dump_nccl_trace_json()
        if version_of(torch.__version__) >= (2, 15):  # older versions write it into the first one
            found["nccl2"] = native._dump_fr_trace_json(backend="nccl2")
    return found


def begin_together(backend: Any) -> Callable[[], None]:
    """Begin an NCCL group call in this thread; the returned function ends it and launches all calls together.

    ``ProcessGroupNCCL2`` needs this for the communicators that it aborts.
    """
    if not hasattr(backend, "_group_start"):
        return lambda: None
    backend._group_start()
    return cast(Callable[[], None], backend._group_end)


def is_connected(backend: Any) -> bool:
    """Return True if an NCCL backend has a communicator; ``ProcessGroupNCCL2`` always has one."""
    return not hasattr(backend, "_is_initialized") or bool(backend._is_initialized())


def record_collectives(group: dist.ProcessGroup, nccl: Backend, ranks: Sequence[int]) -> Any:
    """Attach torch's flight recorder to an NCCL group that does not record on its own.

    Returns: the recorder's handle, which the caller keeps as long as the group; None if the group needs no recorder.
    """
    newer = getattr(c10d, "ProcessGroupNCCL2", None)
    if newer is None or not isinstance(nccl, newer) or _recorder_size() == 0:
        return None
    native: Any = torch._C._distributed_c10d
    return native.FlightRecorderHook.attach(group, list(ranks))


def _recorder_size() -> int:
    """Return the size of torch's flight recorder in entries; 0 if it is off.

    As in torch, ``TORCH_FR_BUFFER_SIZE`` is read, or ``TORCH_NCCL_TRACE_BUFFER_SIZE`` if the first is not set.
    """
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    return int(next((value for name in names if (value := os.environ.get(name))), "2000"))


# ---------------------------------------------------------------- devices


def before_first_use_of_cuda(wait: Callable[[], None]) -> None:
    """Call ``wait()`` before CUDA is initialised, from Python or from C++."""
    original = torch.cuda._lazy_init

    @functools.wraps(original)
    def initialise() -> None:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            wait()
        original()  # type: ignore[no-untyped-call]

    torch.cuda._lazy_init = initialise


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices and values of a sparse tensor, which may be uncoalesced.

    :meth:`torch.Tensor.indices` refuses an uncoalesced one.
    """
    return tensor._indices(), tensor._values()


def largest(values: list[torch.Tensor]) -> torch.Tensor:
    """Return the largest magnitude in each of several tensors of one device: shape ``(len(values),)``, float32."""
    return torch.stack([norm.float() for norm in torch._foreach_norm(values, float("inf"))])


def nonfinite_flag(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a scalar on the device of ``values``, dense tensors of one dtype: true if a number is inf or nan.

    For any number of tensors it takes a few kernels and no wait. It uses the check of ``GradScaler`` with a factor of
    one. (A norm would take one kernel per tensor.) That check writes each number back unchanged, so torch's write
    counts are restored.
    """
    real = [torch.view_as_real(v.resolve_conj()) if v.is_complex() else v for v in values]
    found, factor = (make((), device=real[0].device) for make in (torch.zeros, torch.ones))
    try:
        with torch.autograd._unsafe_preserve_version_counter(tuple(real)):  # type: ignore[attr-defined]
            torch._amp_foreach_non_finite_check_and_unscale_(real, found, factor)
    except RuntimeError:  # numbers that share their memory, or a dtype that this check does not know
        return ~torch.stack([torch.isfinite(each).all() for each in real]).all()
    return found


# ---------------------------------------------------------------- autograd and compilation


def untraced(function: Function) -> Function:
    """Return ``function`` in a form that ``torch.compile`` calls without tracing into it."""
    made: Function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return made


def in_backward() -> bool:
    """Return True if this thread is inside a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def specialize_torchscript(on: bool) -> bool:
    """Switch on or off the optimizations of TorchScript that depend on earlier calls; return the setting before."""
    return bool(torch._C._jit_set_profiling_mode(on))


# ---------------------------------------------------------------- DDP


def comm_hooks(ddp: DistributedDataParallel) -> list[tuple[Any, Any]]:
    """Return the communication hooks of a DDP module, each as a pair (hook, state)."""
    return list(ddp._comm_hooks)


def reset_reducer(ddp: DistributedDataParallel) -> None:
    """Make DDP's reducer forget the gradients that it has received so far, and keep its buckets."""
    ddp.reducer._reset_state()


def has_rebuilt_buckets(ddp: DistributedDataParallel) -> bool:
    """Return True if the layout of DDP's buckets is final."""
    return bool(ddp._has_rebuilt_buckets)


def has_made_first_pass(ddp: DistributedDataParallel) -> bool:
    """Return False before the end of the first backward pass of a DDP module with ``static_graph``.

    In that pass DDP makes one collective more than in later ones.
    """
    return not ddp.static_graph or bool(ddp._static_graph_delay_allreduce_enqueued)


def used_parameters(ddp: DistributedDataParallel) -> torch.Tensor:
    """Return the tensor in which DDP counts, for each parameter, the ranks with a gradient; shares DDP's memory."""
    return ddp.reducer._get_local_used_map()


class _Ended(Work):
    """A collective that has ended."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


class _BucketSource(dist.ProcessGroup):
    """The stand-in for the process group of a DDP reducer while the reducer sets its buckets.

    The reducer makes two broadcasts from the first rank of its group. The first one has the indices of the parameters
    of all buckets, and the number of buckets. The second one has the sizes of the buckets. This object answers both
    with the assignment of parameters to buckets ``layout``. If ``layout`` is empty or None, the reducer gets back the
    assignment that it has sent.

    Attributes:
        received: the numbers of each broadcast, as the reducer has received them.
    """

    def __init__(self, layout: Buckets | None) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self.received: list[list[int]] = []
        self._sent: list[list[int]] = []
        if layout:
            self._sent = [[*(i for bucket in layout for i in bucket), len(layout)], [len(b) for b in layout]]

    def broadcast(self, tensors: Any, *_: Any) -> Work:
        if self._sent:
            tensors[0].copy_(torch.tensor(self._sent.pop(0), dtype=torch.int32))
        self.received.append(tensors[0].tolist())
        return _Ended()


def rebuild_buckets(ddp: DistributedDataParallel, layout: Buckets | None = None) -> Buckets | None:
    """Set the final layout of DDP's buckets now, without a collective.

    Args:
        layout: the new layout. If empty, DDP derives the layout from the order of its parameters. If None, DDP
            derives it from the order in which it has recorded the gradients.

    Returns:
        The layout that was set; None if DDP has recorded no order.

    Raises:
        RuntimeError: a pass has not ended; or ``layout`` does not fit the parameters, and the buckets are unchanged.
    """
    reducer, source = ddp.reducer, _BucketSource(layout)
    if layout is not None:
        reducer._reset_state()
        reducer._push_all_rebuilt_params()
    reducer._update_process_group(source)
    try:
        if not reducer._rebuild_buckets():
            return None
    except RuntimeError:
        if layout is not None:
            reducer._reset_state()
        raise
    finally:
        reducer._update_process_group(ddp.process_group)
    ddp._has_rebuilt_buckets = True
    (*order, _), sizes = source.received
    numbers = iter(order)
    return [list(islice(numbers, size)) for size in sizes]


def logged_buckets(ddp: DistributedDataParallel) -> Buckets | None:
    """Return the final layout of DDP's buckets from DDP's log; None if it is not there yet.

    The log is written in every pass at first, and later in one of 100 passes.
    """
    logged = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    text = str(logged.get("rebuilt_per_bucket_param_indices") or "")
    return [[int(number) for number in bucket.split()] for bucket in text.split(",")] if text else None


def bucket_limits(ddp: DistributedDataParallel) -> list[int]:
    """Return the limits of the sizes of DDP's buckets, which the script may set."""
    return [int(ddp.bucket_bytes_cap), *map(int, getattr(ddp, "bucket_bytes_cap_list", ()))]


def refuse_builtin_hooks(outer: type[dist.ProcessGroup], refusal: Callable[[Any], Exception]) -> None:
    """Make DDP raise ``refusal(hook type)`` if a C++ hook is registered on a group of type ``outer``."""
    original: Callable[..., Any] = DistributedDataParallel._register_builtin_comm_hook

    @functools.wraps(original)
    def refuse(self: DistributedDataParallel, comm_hook_type: Any) -> None:
        if isinstance(self.process_group, outer):
            raise refusal(comm_hook_type)
        original(self, comm_hook_type)

    DistributedDataParallel._register_builtin_comm_hook = refuse  # type: ignore[method-assign]


# ---------------------------------------------------------------- FSDP2


def sharded_groups(module: FSDPModule) -> list[Any]:
    """Return the parameter groups of one ``fully_shard`` module."""
    state: Any = module._get_fsdp_state()
    return list(state._fsdp_param_groups)


def reset_sharded(modules: Sequence[FSDPModule]) -> None:
    """Reset FSDP2 modules to their state after a finished backward pass, with sharded parameters.

    torch's own ``FSDPModule.reset_iter_state`` (2.13) runs first for each root. It waits for the events of side
    streams before it drops the memory to which these streams write. It resets neither the gradients of an aborted
    backward pass nor modules without a root. The state that the modules of one root share is reset last.

    Raises:
        AttributeError: this torch keeps FSDP2's state in an unknown way.
    """
    common = importlib.import_module(f"{SHARD}._fsdp_common")
    idle = common.TrainingState.IDLE
    states: list[Any] = [module._get_fsdp_state() for module in modules]
    for module, state in zip(modules, states, strict=True):
        if state._is_root and hasattr(module, "reset_iter_state"):
            module.reset_iter_state()
    for module, state in zip(modules, states, strict=True):
        state._training_state = idle
        state._modules_to_run_forward.clear()
        for group in state._fsdp_param_groups:
            _reset_param_group(group, idle)
        module.reshard()
    for state in states:
        if state._is_root is None:  # before its first forward it has nothing to reset
            continue
        shared = state._comm_ctx
        shared.post_forward_order.clear()
        shared.all_gather_state = None
        shared.reduce_scatter_states.clear()
        getattr(shared, "_last_post_reduce_events", {}).clear()
        state._state_ctx.post_backward_final_callback_queued = False
        state._state_ctx.iter_forward_root = None


def _reset_param_group(group: Any, idle: Any) -> None:
    for name in ("_all_gather_result", "_partial_reduce_output", "_post_reduce_event"):
        _clear(group, name)
    for name in ("_reshard_after_forward_event", "_all_reduce_state"):
        _clear(group, name)
    group._training_state = idle
    group._post_forward_indices.clear()
    for parameter in group.fsdp_params:
        if hasattr(parameter, "_unsharded_param"):  # set by the first unshard
            parameter._unsharded_param.grad = None
        if not isinstance(getattr(type(parameter), "unsharded_accumulated_grad", None), property):
            _clear(parameter, "unsharded_accumulated_grad")


def _clear(owner: Any, name: str) -> None:
    getattr(owner, name)  # fails for an unknown name, which setattr would create
    setattr(owner, name, None)


def replicate(model: nn.Module, mesh: Any) -> nn.Module:
    """Return the model with FSDP2's data parallelism (``replicate``), for a mesh that also has other dimensions."""
    module = importlib.import_module("torch.distributed._composable.replicate_with_fsdp")
    return cast(nn.Module, module.replicate(model, mesh=mesh))


# ---------------------------------------------------------------- pipelines

PIPELINE_SCHEDULE = (SCHEDULES, "_PipelineSchedule")
PIPELINE_STAGE = (STAGE, "_PipelineStageBase")
"""Module and class name of a pipeline's objects. They are searched by name, because the module is slow to import."""


def reset_schedule(schedule: Any) -> None:
    """Make a pipeline schedule forget the losses, receives and activations of an aborted step.

    Raises:
        AttributeError: this torch keeps a schedule's state in an unknown way.
    """
    schedule._internal_losses.clear()
    for name in ("fwd_recv_ops", "bwd_recv_ops", "unshard_ops", "unsharded_stages"):
        if hasattr(schedule, name):  # only schedules with several stages per rank have these
            getattr(schedule, name).clear()
    several = hasattr(schedule, "_stages")
    word = "stages" if several else "stage"
    for half in ("forward", "backward"):
        flag = f"_{word}_{half}_initialized"
        getattr(schedule, flag)
        setattr(schedule, flag, False)
    for stage in schedule._stages if several else [schedule._stage]:
        _forget_transfers(stage)
        stage.clear_runtime_states()
        for cache in (stage.bwd_cache, stage.backward_state, stage.dw_runner):
            cache.clear()


def _forget_transfers(stage: Any) -> None:
    """Drop the receive buffers and the gradient reduction that a pipeline stage owns during a step (torch 2.15)."""
    for received in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
        for info in received:
            if hasattr(info, "take_buffer"):  # in older versions the buffer is used again in the next step
                info.buffer = None
    if getattr(stage, "_gradient_reduction_handle", None) is not None:
        stage._gradient_reduction_handle = None
        if isinstance(stage.submod, FSDPModule):
            cast(Any, stage.submod).set_manual_backward_finalization(False)


# ---------------------------------------------------------------- state


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor; a plain tensor is returned itself.

    A DTensor and its local tensor have separate write counts.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def write_count(tensor: torch.Tensor) -> int:
    """Return torch's count of writes to a tensor.

    For a DTensor this is a sum: the DTensor counts writes made through it, and its local tensor counts the others.
    """
    return tensor._version + (tensor._local_tensor._version if isinstance(tensor, DTensor) else 0)


def write_counts(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return :func:`write_count` of many tensors. It runs at each step, so it makes no function call per tensor."""
    return [t._version + t._local_tensor._version if isinstance(t, DTensor) else t._version for t in tensors]


def split_tensor(placement: Any, tensor: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """Return ``tensor`` split into ``parts`` by the placement's own code, without padding."""
    cut, _ = placement._split_tensor(tensor, parts, with_padding=False)
    return cast(list[torch.Tensor], cut)


def copy_many(destinations: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source into its destination, in one call."""
    torch._foreach_copy_(destinations, sources)


def unlisted_buffers(module: nn.Module) -> set[str]:
    """Return the names of the buffers that the module's ``state_dict`` leaves out."""
    return module._non_persistent_buffers_set


def buffers_of(module: nn.Module) -> Mapping[str, torch.Tensor | None]:
    """Return the module's own buffers by name, without those of its children."""
    return module._buffers


WRAPPERS: Mapping[str, str] = {
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "_FabricModule": "_forward_module",
}
"""Class name of a wrapper -> attribute with the wrapped module; the classes are slow to import, so names are compared.

Fabric's public attribute ``module`` would skip a ``FullyShardedDataParallel`` around the user's own module.
"""

UPCAST_HOOK_STATE = "_AllreduceUpcastHookState"
"""Name of the state class of DDP's own hook for mixed precision. Between two steps this hook keeps no state."""


def forget_unscaled(scaler: torch.amp.GradScaler) -> None:
    """Make a GradScaler forget that it has unscaled gradients."""
    scaler._per_optimizer_states.clear()


def scales(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> bool:
    """Return True if the scaler has unscaled gradients of this optimizer since its last ``update()``."""
    return scaler.is_enabled() and id(optimizer) in scaler._per_optimizer_states


def step_hooks(optimizer: Optimizer) -> list[Any]:
    """Return all hooks that run before or after a step of this optimizer."""
    of_all = (optim._global_optimizer_pre_hooks, optim._global_optimizer_post_hooks)
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    return [hook for hooks in (*of_all, *own) for hook in hooks.values()]


def is_replaced(optimizer: Optimizer) -> bool:
    """Return True if user code has replaced this optimizer's ``step()``; the wrapper of a schedule does not count."""
    step = vars(optimizer).get("step")
    return step is not None and not hasattr(step, "_wrapped_by_lr_sched")


def steps_in_backward(parameter: torch.Tensor) -> bool:
    """Return True if ``_apply_optimizer_in_backward`` updates this parameter during the backward pass."""
    return bool(getattr(parameter, "_in_backward_optimizers", None))


# ---------------------------------------------------------------- data


def stop_workers(iterator: Any) -> None:
    """End the worker processes of a DataLoader's iterator, if it has any."""
    stop = getattr(iterator, "_shutdown_workers", None)
    if stop is not None:
        stop()


def batches_drawn(value: object) -> int | None:
    """Return the number of batches that the iterator of a DataLoader has yielded; None for other objects."""
    return value._num_yielded if isinstance(value, dataloader._BaseDataLoaderIter) else None


def forget_workers(loader: DataLoader[Any]) -> None:
    """End the worker processes that a DataLoader keeps for its next epoch (``persistent_workers``)."""
    stop_workers(loader._iterator)
    loader._iterator = None


def changes_iterator(loader: DataLoader[Any]) -> bool:
    """Return True if the loader's class overrides the method of ``DataLoader`` that makes its iterator.

    accelerate's classes are no subclasses of ``DataLoader``, although ``isinstance`` says so.
    """
    kept = DataLoader._get_iterator
    return getattr(type(loader), "_get_iterator", kept) is not kept


def wrap_distributed_settings(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the function that a loader's iterator calls to get the rank. The new function is ``wrap(function)``."""
    dataloader._get_distributed_settings = wrap(dataloader._get_distributed_settings)
