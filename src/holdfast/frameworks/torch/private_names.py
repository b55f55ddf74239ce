"""The table of torch's private names that Holdfast uses: purpose, versions and dependent feature of each.

Only the functions of ``private_api.py`` use these names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast.frameworks.torch.probing import Feature, Use

_C10D = "torch.distributed.distributed_c10d"
_C = "torch._C._distributed_c10d"
SHARD = "torch.distributed.fsdp._fully_shard"
SCHEDULES = "torch.distributed.pipelining.schedules"
STAGE = "torch.distributed.pipelining.stage"
_DDP = "torch.nn.parallel:DistributedDataParallel"


_NEWEST = (2, 15)


def _of_groups() -> Iterator[Use]:
    groups, nccl = Feature.GROUPS, Feature.NCCL
    helper = ("backend", "backend_options", "device_id", "timeout", "store", "group_rank", "group_size")
    yield Use(
        f"{_C10D}:_new_process_group_helper",
        "groups that can be rebuilt behind gloo and nccl",
        groups,
        takes=helper,
    )
    yield from _each(
        f"{_C10D}:", ("_world", "_World.pg_map", "_World.pg_backend_config"), "dist.get_backend()", groups
    )
    recorder = f"{_C10D}:_maybe_attach_flight_recorder"
    yield Use(recorder, "not on a group without C++ backends", groups, _NEWEST)
    yield Use("torch.distributed.rendezvous:_rendezvous_handlers", "env:// gives the control store", groups)
    built = ("_register_backend", "_set_default_backend", "_set_group_name", "_set_group_desc")
    yield from _each(f"{_C}:ProcessGroup.", built, "build an inner group", groups)
    answered = ("_get_backend", "_device_types", "_start_coalescing", "_end_coalescing")
    yield from _each(f"{_C}:ProcessGroup.", answered, "answered by the group that user code holds", groups)
    yield Use(f"{_C}:Backend._set_sequence_number_for_group", "build an inner group", groups, until=(2, 13))
    yield Use(f"{_C}:ProcessGroupGloo._set_default_timeout", "one bound to connect, another to work", groups)
    yield Use(f"{_C}:FakeProcessGroup._create_internal", "a backend for a rehearsal without peers", groups)
    yield Use(f"{_C}:_set_global_rank", "the rank of a spare that was called", groups)
    yield Use("torch._C:_current_graph_task_id", "find an optimizer that steps during backward", groups)
    yield Use("torch._dynamo.callback:callback_handler", "a compilation is no hang", groups)
    yield Use(f"{_C10D}:_coalescing_manager", "batched sends and receives in one launch", nccl)
    yield Use(f"{_C10D}:ProcessGroupNCCL.abort", "leave a collective of NCCL", nccl)
    yield Use(f"{_C10D}:ProcessGroupNCCL._group_start", "abort several communicators together", nccl)
    yield Use(f"{_C10D}:ProcessGroupNCCL._group_end", "as _group_start", nccl)
    yield Use(f"{_C10D}:ProcessGroupNCCL._is_initialized", "connect those again that were connected", nccl)
    yield Use(f"{_C10D}:ProcessGroupNCCL2", "the implementation behind the name nccl", nccl, (2, 14))
    yield Use(f"{_C}:FlightRecorderHook.attach", "record the collectives of NCCL2", nccl, (2, 14))
    yield Use(f"{_C}:_dump_nccl_trace_json", "where the devices of a rank that hangs are", nccl)
    yield Use(f"{_C}:_dump_fr_trace_json", "evidence of a hang", groups)


def _of_models() -> Iterator[Use]:
    ddp = Feature.DDP
    yield Use(f"{_DDP}._comm_hooks", "refuse a hook with a state", ddp)
    yield Use(f"{_DDP}._has_rebuilt_buckets", "the order of the sums in a replacement", ddp)
    yield Use(f"{_DDP}._register_builtin_comm_hook", "refuse a hook that runs in C++", ddp)
    yield Use("torch.distributed:Reducer._reset_state", "forget an aborted backward", ddp)
    yield Use("torch.distributed:Reducer._rebuild_buckets", "as _has_rebuilt_buckets", ddp)
    yield Use("torch.distributed:Reducer._push_all_rebuilt_params", "take over the buckets of a peer", ddp)
    yield Use("torch.distributed:Reducer._update_process_group", "set buckets without peers", ddp)
    yield Use(f"{_DDP}._get_ddp_logging_data", "read the final buckets", ddp)
    yield Use("torch.distributed:Reducer._get_local_used_map", "pass the used parameters on", ddp)
    yield Use(f"{_DDP}._static_graph_delay_allreduce_enqueued", "know the first pass", ddp)

    fsdp, forget = Feature.FSDP2, "forget an aborted pass"
    yield Use("torch.distributed.fsdp:FSDPModule._get_fsdp_state", "find what one module holds", fsdp)
    state = ("_training_state", "_modules_to_run_forward", "_fsdp_param_groups", "_is_root")
    yield from _each(f"{SHARD}._fsdp_state:FSDPState.", (*state, "_comm_ctx", "_state_ctx"), forget, fsdp)
    yield Use(f"{SHARD}._fsdp_common:TrainingState.IDLE", forget, fsdp)
    group = ("_training_state", "_all_gather_result", "_post_forward_indices", "_partial_reduce_output")
    events = ("_post_reduce_event", "_reshard_after_forward_event", "_all_reduce_state")
    yield from _each(f"{SHARD}._fsdp_param_group:FSDPParamGroup.", (*group, *events), forget, fsdp)
    yield Use(f"{SHARD}._fsdp_param:FSDPParam._unsharded_param", "drop gradients of an aborted pass", fsdp)

    composable = "torch.distributed._composable.replicate_with_fsdp"
    yield Use(f"{composable}:replicate", "the drill's data parallelism in a mesh", fsdp)

    pipelines, forget = Feature.PIPELINES, "forget an aborted step"
    yield Use(f"{SCHEDULES}:_PipelineSchedule._internal_losses", forget, pipelines)
    for kind, word in (("PipelineScheduleSingle", "_stage"), ("PipelineScheduleMulti", "_stages")):
        flags = (word, f"{word}_forward_initialized", f"{word}_backward_initialized")
        yield from _each(f"{SCHEDULES}:{kind}.", flags, "greet the neighbours again", pipelines)
    held = ("bwd_cache", "backward_state", "dw_runner", "args_recv_info", "grad_recv_info")
    yield from _each(f"{STAGE}:_PipelineStageBase.", held, forget, pipelines)
    yield Use(f"{STAGE}:_PipelineStageBase._gradient_reduction_handle", forget, pipelines, _NEWEST)


def _of_state() -> Iterator[Use]:
    state_of = Feature.STATE
    yield Use("torch.distributed.tensor:DTensor._local_tensor", "the memory of this rank", state_of)
    yield Use("torch.distributed.tensor:Shard._split_tensor", "which region a rank holds", state_of)
    yield Use("torch.nn:Module._non_persistent_buffers_set", "what state_dict() leaves out", state_of)
    yield Use("torch.nn:Module._buffers", "the tensor that is in a buffer's place now", state_of)
    yield Use("torch:_foreach_copy_", "copy many small tensors in one call", state_of)
    yield from _each("torch:Tensor.", ("_indices", "_values"), "gradients of sparse embeddings", state_of)
    yield Use("torch:_foreach_norm", "find gradients that a step has left", state_of)
    yield Use("torch:Tensor._version", "whether a step adds to gradients that a step has left", state_of)
    yield Use("torch._C:_jit_set_profiling_mode", "the same bits from TorchScript at each call", state_of)
    check = "_amp_foreach_non_finite_check_and_unscale_"
    yield Use(f"torch:{check}", "find inf and nan in few kernels", state_of)
    yield Use("torch.autograd:_unsafe_preserve_version_counter", f"as {check}", state_of)
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    yield from _each(
        "torch.optim:Optimizer.", hooks, "hooks that change what a log of updates holds", state_of
    )
    hooks = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    yield from _each("torch.optim.optimizer:", hooks, "as _optimizer_step_pre_hooks", state_of)
    yield Use("torch.cuda:_lazy_init", "a spare waits before it uses a GPU", state_of)
    yield Use("torch.amp:GradScaler._per_optimizer_states", "forget that gradients were unscaled", state_of)
    yield from _each("torch.amp:GradScaler.", SCALER_TENSORS, "its state, without a wait", state_of)

    data = "torch.utils.data.dataloader"
    yield Use(f"{data}:_get_distributed_settings", "a spare is not asked for its rank", Feature.DATA)
    yield Use(f"{data}:_MultiProcessingDataLoaderIter._shutdown_workers", "end them at once", Feature.DATA)
    drawn = "batches that an iterator of the script has yielded"
    yield Use(f"{data}:_BaseDataLoaderIter._num_yielded", drawn, Feature.DATA)
    yield Use(f"{data}:DataLoader._iterator", "end the workers that it keeps", Feature.DATA)
    yield Use(f"{data}:DataLoader._get_iterator", "loaders that change their batches", Feature.DATA)
    yield Use("torch.utils._pytree:tree_map_only", "tensors of a batch of any shape", Feature.DATA)


def _each(owner: str, names: Sequence[str], purpose: str, feature: Feature) -> Iterator[Use]:
    return (Use(f"{owner}{name}", purpose, feature) for name in names)


SCALER_TENSORS = ("_scale", "_growth_tracker")
"""Attributes of a ``GradScaler`` that hold its tensors on the device."""

USES: tuple[Use, ...] = (*_of_groups(), *_of_models(), *_of_state())
