"""The broadcast that makes buffers equal on all ranks before each vote, so that the loss of a rank changes no buffer.

DDP broadcasts its buffers at the start of each forward pass. That broadcast is switched off. Instead, the buffers are
broadcast at the end of the block, before its vote: with the same number of bytes and the same result.
Persistent buffers of models without DDP are broadcast in the same way: those under ``fully_shard`` or ``replicate``
from the first rank of their mesh, all others from rank 0. For a pipeline stage without any of these wrappers, no rank
is known to hold the same stage, so its buffers are not changed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from holdfast.errors import StateError
from holdfast.frameworks.torch import private_api
from holdfast.frameworks.torch.comm.comm_state import fabric
from holdfast.frameworks.torch.state.boxes import flat_bytes, overwrite
from holdfast.frameworks.torch.state.parameter_names import BufferSlot, Names
from holdfast.frameworks.torch.state.wrapper_reset import instances
from holdfast.runtime.node.shm_allreduce import NOTE_SIZE_BYTES_MAX


class BufferSync:
    """The broadcasts of a model's buffers: one per process group, with all buffers of the group packed into one tensor.

    Args:
        names: names of the tensors of the model.
        wrappers: DDP wrappers of the model.
        mesh: mesh of the model's data-parallel copies, if ``fully_shard`` or ``replicate`` made them.
        world_size: number of ranks.
    """

    def __init__(
        self, names: Names, wrappers: list[DistributedDataParallel], mesh: DeviceMesh | None, world_size: int
    ) -> None:
        self._names = names
        self._off: list[DistributedDataParallel] = []
        # One broadcast for each set of member ranks.
        self._plans: dict[tuple[int, ...], tuple[Any, list[BufferSlot]]] = {}
        if world_size == 1:
            return
        taken: set[int] = set()
        for wrapper in wrappers:
            inside = {id(module) for module in wrapper.modules()}
            if wrapper.broadcast_buffers:
                ignored = {
                    id(b) for n, b in wrapper.module.named_buffers() if n in wrapper.parameters_to_ignore
                }
                slots = [s for s in names.buffers if id(s.module) in inside and id(s.get()) not in ignored]
                self._add(wrapper.process_group, slots)
                wrapper.broadcast_buffers = False
                self._off.append(wrapper)
            taken |= inside
        rest = [slot for slot in names.buffers if id(slot.module) not in taken and slot.persistent]
        if mesh is None or mesh.size() == world_size:
            if not instances(*private_api.PIPELINE_STAGE):
                self._add(dist.group.WORLD, rest)
        else:
            # There is one group per dimension; their broadcasts together reach every rank.
            for group in mesh.get_all_groups():
                self._add(group, rest)

    def _add(self, group: Any, slots: list[BufferSlot]) -> None:
        if slots:
            known = self._plans.setdefault(tuple(dist.get_process_group_ranks(group)), (group, []))
            known[1].extend(slots)

    def run(self) -> None:
        """Broadcast the buffers; all ranks call it.

        If a broadcast breaks, this rank keeps its local values, and the vote rejects the step.
        """
        with torch.no_grad():
            for group, slots in self._plans.values():
                found = ((slot, slot.get()) for slot in slots)
                live = [
                    self._names.state_of(slot, buffer)
                    for slot, buffer in found
                    if buffer is not None and not isinstance(buffer, DTensor)
                ]
                if live:
                    _broadcast(group, live)

    def close(self) -> None:
        """Switch DDP's own broadcast on again."""
        for wrapper in self._off:
            wrapper.broadcast_buffers = True
        self._off = []


def _broadcast(group: Any, tensors: list[torch.Tensor]) -> None:
    packed = torch.cat([flat_bytes(t) for t in tensors])
    source = dist.get_global_rank(group, 0)
    if packed.device.type == "cpu" and packed.numel() <= NOTE_SIZE_BYTES_MAX and fabric().board() is not None:
        packed = _shared(source, packed)
    else:
        dist.broadcast(packed, source, group=group)
    if dist.get_rank() == source:
        return
    overwrite(tensors, packed)


def _shared(source: int, packed: torch.Tensor) -> torch.Tensor:
    """Return the bytes of rank ``source``, sent over the board, the shared memory of the node."""
    data = fabric().share(source, packed.numpy().tobytes())
    if len(data) != packed.numel():
        raise StateError(
            f"the buffers of rank {source} take {len(data)} bytes, those of rank {dist.get_rank()} {packed.numel()}",
            hint="build the same model on every rank; a table (a buffer) that grows with the longest batch must have "
            "its largest size before the training",
        )
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
