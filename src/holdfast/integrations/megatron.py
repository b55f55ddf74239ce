"""The integration of Megatron-core: ``declare(model)`` declares which part of each weight this rank holds.

Megatron marks a tensor-parallel weight (``tensor_model_parallel``, ``partition_dim``) and keeps its part as a plain
tensor. Without a declaration, the store takes all parts of one name for copies of each other. Pipeline stages number
their layers from 0, so give each stage its own name in the session, ``model={f"stage{rank}": chunk}``.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from holdfast.errors import UnsupportedError
from holdfast.frameworks.torch.state.boxes import declare as declare_region


def declare(model: nn.Module, rank: int | None = None, world_size: int | None = None) -> None:
    """Declare every tensor-parallel parameter of ``model``. Call this before ``holdfast.session(model=model, ...)``.

    Args:
        model: a module with Megatron's marks on its parameters.
        rank: rank in the tensor-parallel group; None means the rank that Megatron reports.
        world_size: size of that group; None means the size that Megatron reports.

    Raises:
        UnsupportedError: a strided partition, whose parts are not rectangles of the weight.
    """
    if rank is None or world_size is None:
        from megatron.core import parallel_state

        rank = parallel_state.get_tensor_model_parallel_rank()
        world_size = parallel_state.get_tensor_model_parallel_world_size()
    for name, parameter in model.named_parameters():
        marked: Any = parameter
        if not getattr(marked, "tensor_model_parallel", False):
            continue
        if marked.partition_stride != 1:
            raise UnsupportedError(
                f"{name}: a partition of stride {marked.partition_stride} is no rectangular part of the whole weight",
                hint="weights with partition_stride=1; a gated MLP as two separate projections",
            )
        shape, offsets = list(parameter.shape), [0] * parameter.ndim
        shape[marked.partition_dim] *= world_size
        offsets[marked.partition_dim] = rank * parameter.shape[marked.partition_dim]
        declare_region(parameter, shape, offsets)
