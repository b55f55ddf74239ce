"""The division of the ranks into data-parallel copies of the model; several ranks may share one copy.

If a script gives its ranks different random numbers, ranks that hold parts of one copy (tensor parallel, pipeline
stages) still draw the same numbers (``frameworks/common/random_streams.py``). The wrappers define the copies: DDP by
its process group, ``fully_shard`` and ``replicate`` by their mesh. Without such a wrapper, the ranks of a pipeline form
one copy, and so do the ranks of a mesh of DTensor parameters; the number of that copy is its lowest rank. A rank
without wrapper, pipeline and mesh is a separate copy.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from holdfast.frameworks.common.optional_abilities import Copy
from holdfast.frameworks.torch import private_api
from holdfast.frameworks.torch.state.boxes import region_of
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
    for ranks in _stage_ranks():
        first = min(ranks)
    # In every pipeline stage, a rank has the same position among the ranks that split its tensors.
    for mesh in _split_meshes(model):
        return Copy(first - (rank - int(mesh.mesh.min())), world_size)
    return Copy(first, world_size)


def copies_are_known(model: Models) -> bool:
    """Return True if wrappers, pipelines or meshes define the copies; False if each rank just counts as a copy."""
    return (
        sharded_mesh(model) is not None
        or bool(data_parallel(model))
        or any(True for _ in _stage_ranks())
        or any(True for _ in _split_meshes(model))
    )


def holds_part(model: Models, copy: Copy, world_size: int) -> bool:
    """Return True if this rank computes only a part of ``copy``: of its layers, or of its tensors.

    Fewer copies than ranks show that ranks share a copy. But without a wrapper, :func:`copy_of` counts as many copies
    as ranks. So this function also looks for pipelines, DTensor meshes and declared parts of tensors.
    """
    if copy.numbers != world_size:
        return True
    if sharded_mesh(model) is not None or data_parallel(model):
        return False
    if any(len(ranks) > 1 for ranks in _stage_ranks()) or any(
        mesh.size() > 1 for mesh in _split_meshes(model)
    ):
        return True
    return any(region_of(p) is not None for _, top in modules_of(model) for p in top.parameters())


def _stage_ranks() -> Iterator[list[int]]:
    """Yield, for each pipeline stage in this process, the ranks of its pipeline."""
    for stage in instances(*private_api.PIPELINE_STAGE):
        yield dist.get_process_group_ranks(stage.group or dist.group.WORLD)


def _split_meshes(model: Models) -> Iterator[DeviceMesh]:
    """Yield the mesh of each parameter that is a DTensor."""
    for _, top in modules_of(model):
        for parameter in top.parameters():
            if isinstance(parameter, DTensor):
                yield parameter.device_mesh
