"""The division of the ranks into data-parallel copies of the model; several ranks may share one copy.

Ranks that hold parts of one copy (tensor parallel, pipeline stages) must draw the same batches. Where they compute the
same thing, they must also draw the same random numbers. Ranks of different copies draw different batches and numbers.
The wrappers define the copies: DDP by its process group, ``fully_shard`` and ``replicate`` by their mesh. Without such
a wrapper, the ranks of a pipeline form one copy, and so do the ranks of a mesh of DTensor parameters; the number of
that copy is its lowest rank. A rank without wrapper, pipeline and mesh is a separate copy.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from holdfast.frameworks.common.optional_abilities import Copy
from holdfast.frameworks.torch import private_api
from holdfast.frameworks.torch.state.parameter_names import Models, data_parallel, modules_of
from holdfast.frameworks.torch.state.wrapper_reset import instances


def sharded_mesh(model: Models) -> DeviceMesh | None:
    """Return the data-parallel mesh of the first ``fully_shard`` or ``replicate`` in the model, or None."""
    for _, top in modules_of(model):
        for module in top.modules():
            if isinstance(module, FSDPModule):
                for group in private_api.sharded_groups(module):
                    mesh: DeviceMesh = group.mesh_info.mesh
                    return mesh
    return None


def copy_of(model: Models, rank: int, world_size: int) -> Copy:
    """Return the data-parallel copy of the model that this rank holds, or of which it holds a part.

    Without wrappers, pipelines and meshes, each rank is a separate copy.
    """
    if world_size == 1:
        return Copy(0, 1)
    mesh = sharded_mesh(model)
    if mesh is not None and (coordinate := mesh.get_coordinate()) is not None:
        index = 0
        for at, size in zip(coordinate, mesh.shape, strict=True):
            index = index * size + at
        return Copy(index, mesh.size())
    wrappers = data_parallel(model)
    if wrappers:
        group = wrappers[0].process_group
        return Copy(dist.get_rank(group), dist.get_world_size(group))
    first = rank
    for stage in instances(*private_api.PIPELINE_STAGE):
        first = min(dist.get_process_group_ranks(stage.group or dist.group.WORLD))
    # In every pipeline stage, a rank has the same position among the ranks that split its tensors.
    return Copy(first - _place_in_split(model, rank), world_size)


def holds_part(model: Models, copy: Copy, world_size: int) -> bool:
    """Return True if this rank computes only a part of ``copy``: of its layers, or of its tensors.

    Fewer copies than ranks show that ranks share a copy. But without a wrapper, :func:`copy_of` counts as many copies
    as ranks, so pipelines and DTensor meshes are looked for as well.
    """
    if copy.numbers != world_size:
        return True
    if sharded_mesh(model) is not None or data_parallel(model):
        return False
    stages = instances(*private_api.PIPELINE_STAGE)
    if any(len(dist.get_process_group_ranks(stage.group or dist.group.WORLD)) > 1 for stage in stages):
        return True
    parameters = [parameter for _, top in modules_of(model) for parameter in top.parameters()]
    return any(
        isinstance(parameter, DTensor) and parameter.device_mesh.size() > 1 for parameter in parameters
    )


def _place_in_split(model: Models, rank: int) -> int:
    """Return the distance of this rank from the lowest rank of its DTensor mesh; 0 without a mesh."""
    for _, top in modules_of(model):
        for parameter in top.parameters():
            if isinstance(parameter, DTensor):
                return rank - int(parameter.device_mesh.mesh.min())
    return 0
