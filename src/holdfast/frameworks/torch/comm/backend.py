"""The installation of Holdfast's process groups under the names gloo and nccl.

:func:`install` replaces the one function of torch that makes groups. From then on ``init_process_group``,
``new_group``, ``init_device_mesh`` and all code that uses them (DDP, FSDP2, DTensor, pipelines) get a
:class:`~holdfast.frameworks.torch.comm.reconfigurable_group.ReconfigurableGroup` if the requested backend consists of
gloo and nccl. Other backends are not changed. ``dist.get_backend()`` still returns the name that the user asked for.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import inspect
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.fsdp import FSDPModule

from holdfast.core.ids import NO_GENERATION
from holdfast.errors import UnsupportedError
from holdfast.frameworks.torch import private_api
from holdfast.frameworks.torch.comm.comm_state import GroupAborted, fabric
from holdfast.frameworks.torch.comm.control_store import control_client, install_rendezvous
from holdfast.frameworks.torch.comm.deferred_rank import install as install_stand_in
from holdfast.frameworks.torch.comm.group_builder import GLOO, NCCL, GroupSpec
from holdfast.frameworks.torch.comm.nccl_abort import outlive_peers
from holdfast.frameworks.torch.comm.reconfigurable_group import ReconfigurableGroup
from holdfast.frameworks.torch.comm.setup_record import begin_setup, setup_record
from holdfast.frameworks.torch.probing import Feature
from holdfast.runtime.node import deferred_rank
from holdfast.runtime.node.torch_build import VARIABLE, all_restart, why_untouched
from holdfast.runtime.worker.process_place import refuse_started_by_script
from holdfast.runtime.worker.script_frames import OURS, frames_outside, place_of

__all__ = ["GroupAborted", "fabric", "install", "installed", "untouched"]

BACKEND = "holdfast"
_NAME_SIZE_MAX = 64
_TORCH = os.path.dirname(torch.__file__) + os.sep

_untouched: list[str] = []  # empty, or one reason
log = logging.getLogger("holdfast")


@dataclass(frozen=True)
class _GroupRequest:
    """The user's arguments for a new process group; torch passes them to :func:`_create` as the backend's options."""

    backends: tuple[tuple[str, str], ...]
    options: Any
    device: torch.device | None


def installed() -> bool:
    """Return True if :func:`install` has replaced torch's own process groups."""
    return bool(getattr(private_api.helper(), "holdfast", False))


def untouched() -> str:
    """Return the reason why :func:`install` has kept torch's own process groups; empty if it has replaced them."""
    return _untouched[0] if _untouched else ""


def install() -> None:
    """Make torch create reconfigurable groups for the backends gloo and nccl. Idempotent.

    It opens no connection and starts no thread, so a zygote may call it. torch's own groups stay if the self-test of
    this torch version has failed, or if this version makes groups in an unknown way. In the replacement of a lost rank,
    collectives complete on local data (loopback) until the job resumes.

    Raises:
        ScriptError: this version of torch cannot work with Holdfast.
        UsageError: the script of rank 0 has started this process, as Fabric does without a launcher.
    """
    refuse_started_by_script()
    if not installed() and not _untouched:
        _untouched.extend(_why_untouched())
    if _untouched:
        return
    client = control_client()
    if client is not None:
        if client.directory is not None:
            begin_setup(client.directory, client if client.several_nodes else None)
        if client.joining:
            fabric().loopback()
    stand_in = deferred_rank.current()
    if stand_in is not None:
        install_stand_in(stand_in)
    if installed():
        return
    atexit.register(fabric().leave)
    outlive_peers()
    install_rendezvous()
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    private_api.replace_helper(_wrap_helper(private_api.helper()), ReconfigurableGroup)
    private_api.coalesce_batches(ReconfigurableGroup)
    private_api.refuse_builtin_hooks(ReconfigurableGroup, _builtin_hook)
    _refuse_buffers_of_groups()
    for name, alone in _OBJECT_CALLS.items():
        _guard_objects(name, alone)


def _why_untouched() -> list[str]:
    """Return a list with the reason to keep torch's own groups, or an empty list.

    Rank 0 logs the reason as a warning, unless the launcher has already done so.
    """
    told = VARIABLE in os.environ
    if not (reason := why_untouched()):
        reason, told = next(iter(private_api.failures(Feature.GROUPS)), ""), False
    if reason and not told and os.environ.get("RANK", "0") == "0":
        log.warning("holdfast: %s", all_restart(torch.__version__, reason))
    return [reason] if reason else []


# ---------------------------------------------------------------- making groups


def _wrap_helper(helper: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(helper)

    @functools.wraps(helper)
    def make(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        asked = call.arguments["backend"]
        config = c10d.BackendConfig(c10d.Backend(asked))
        backends = tuple((device, str(name)) for device, name in config.get_device_backend_map().items())
        if not {name for _, name in backends} <= {GLOO, NCCL}:
            return helper(*args, **kwargs)
        device = call.arguments.get("device_id")
        if device is not None and (device.index is None or device.type == "cpu"):
            raise ValueError(f"device_id={device}: a process group is bound to an accelerator with an index")
        call.arguments["backend_options"] = _GroupRequest(
            backends, call.arguments.get("backend_options"), device
        )
        call.arguments["device_id"] = (
            None  # torch would look for the backend in Holdfast's group; ``group_builder.build`` binds the device
        )
        call.arguments["backend"] = BACKEND
        group, store = helper(*call.args, **call.kwargs)
        if isinstance(group, ReconfigurableGroup):
            private_api.note_backend(group, asked, store, str(config))
        return group, store

    make.holdfast = True  # type: ignore[attr-defined]
    return make


def _create(asked: Any, request: _GroupRequest) -> ReconfigurableGroup:
    """Return a reconfigurable group; torch calls this function for every group of this process.

    :func:`install` registers it by ``dist.Backend.register_backend(..., extended_api=True)``.

    Args:
        asked: torch's options: ranks, size, timeout and store of the group.
        request: the user's arguments.
    """
    state = fabric()
    client = control_client()
    if client is not None and state.generation == NO_GENERATION:
        state.generation = client.generation
    if client is not None and state.flight is None:
        state.flight = client.flight
    ranks = tuple(asked.global_ranks_in_group)
    place = next(map(place_of, frames_outside((OURS, _TORCH))), "")
    ordinal = state.numbers.number(ranks, place)
    spec = GroupSpec(
        name=_name(ranks, ordinal),
        order=(ranks, ordinal),
        rank=asked.group_rank,
        world_size=asked.group_size,
        backends=request.backends,
        timeout=asked.timeout,
        options=request.options,
        device=request.device,
        place=place,
    )
    return ReconfigurableGroup(state, spec, asked.store)


def _name(ranks: tuple[int, ...], ordinal: int) -> str:
    """Return a group name that is equal on all members of the group.

    torch's own counter differs between ranks that have made different numbers of groups.

    Args:
        ranks: the global ranks of the members; empty for the default group.
        ordinal: number of earlier groups with the same ranks.
    """
    members = "-".join(map(str, ranks)) if ranks else "world"
    if len(members) > _NAME_SIZE_MAX:
        members = hashlib.blake2b(members.encode(), digest_size=16).hexdigest()
    return f"{members}.{ordinal}"


# ---------------------------------------------------------------- calls that cannot be carried as they are


def _builtin_hook(kind: Any) -> UnsupportedError:
    return UnsupportedError(
        f"DDP's builtin C++ communication hook {kind} cannot run on a Python process group",
        hint="use model.register_comm_hook(None, default_hooks.allreduce_hook) or "
        "default_hooks.fp16_compress_hook: the same numbers",
    )


def _refuse_buffers_of_groups() -> None:
    """Make FSDP2 refuse to allocate its buffers from the communicator's memory pool.

    Such buffers are lost when a recovery replaces the communicator.
    """
    name = "set_allocate_memory_from_process_group_for_comm"
    original: Callable[[FSDPModule, bool], None] = getattr(FSDPModule, name)

    @functools.wraps(original)
    def guarded(self: FSDPModule, enable: bool) -> None:
        if enable and isinstance(dist.group.WORLD, ReconfigurableGroup):
            raise UnsupportedError(
                f"FSDPModule.{name}(True): the buffers belong to connections that a recovery replaces",
                hint="leave it out: FSDP2 then takes its buffers from PyTorch's own allocator",
            )
        original(self, enable)

    setattr(FSDPModule, name, guarded)


def _alone_all_gather(object_list: list[Any], obj: Any, group: Any = None) -> None:
    object_list[:] = [obj] * len(object_list)


def _alone_gather(obj: Any, object_gather_list: list[Any] | None = None, *args: Any, **kwargs: Any) -> None:
    if object_gather_list is not None:
        object_gather_list[:] = [obj] * len(object_gather_list)


def _alone_scatter(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    if scatter_object_input_list:
        scatter_object_output_list[0] = scatter_object_input_list[0]


def _alone_nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, in place of a call that fills a list of objects: in loopback the list keeps this rank's objects."""


_OBJECT_CALLS: dict[str, Callable[..., None]] = {
    "all_gather_object": _alone_all_gather,
    "gather_object": _alone_gather,
    "scatter_object_list": _alone_scatter,
    "broadcast_object_list": _alone_nothing,
    "send_object_list": _alone_nothing,
    "recv_object_list": _alone_nothing,
}
"""Functions of ``torch.distributed`` that send Python objects, each with its replacement on local data.

They allocate memory of a size that a peer sent. In a poisoned process they therefore end at once, and the replacement
completes the call. So the block ends at its vote, like all its other runs. A block that ended in the middle would leave
what it had put into a list of the script, and its next run would use that as well.
"""


def _by_another(
    broadcast: Callable[..., None],
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: Any = None,
    group_src: int | None = None,
    **kwargs: Any,
) -> None:
    """Broadcast objects as if another rank sent them, in a replacement that gets what the lost process got.

    torch reads no objects on the rank that sends them. This rank may have drawn them (a seed, a name), and a
    replacement draws others.
    """
    size = dist.get_world_size(group)
    if size > 1:
        src, group_src = None, (dist.get_rank(group) + 1) % size
    broadcast(object_list, src, group, device, group_src, **kwargs)


def _guard_objects(name: str, alone: Callable[..., None]) -> None:
    original: Callable[..., Any] = getattr(c10d, name)

    @functools.wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        state = fabric()
        state.returning_data(True)
        replays = state.looped and setup_record()
        try:
            if not state.calm and state.check(name) and not replays:
                state.begin_alone(name)
                return alone(*args, **kwargs)
            if name == "broadcast_object_list" and replays:
                return _by_another(original, *args, **kwargs)
            return original(*args, **kwargs)
        except GroupAborted as error:
            if setup_record():
                log.warning("holdfast: %s; this process uses its own objects", error)
            return alone(*args, **kwargs)
        finally:
            state.returning_data(False)

    setattr(c10d, name, guarded)
    setattr(dist, name, guarded)
