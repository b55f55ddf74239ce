"""The division of the drill's model over its ranks: data, tensor and pipeline parallel, and mixes of them. Plain torch.

========  ======================================================================================
ddp       one copy per rank
hsdp      ``fully_shard`` on a mesh: replicated over 2, sharded over the rest
fsdp      ``fully_shard`` over all ranks: each shard is on one rank only
tp        each pair of ranks splits every feed-forward layer in halves, the pairs are copies
pp        the first half of the ranks has the first blocks, the second half the last; DDP in each
pp-tp     pp and tp: each half consists of tp pairs
========  ======================================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from holdfast.drill.model import VOCABULARY, Block, Gpt, Size, Stage, next_byte_loss
from holdfast.frameworks.torch.private_api import replicate

if TYPE_CHECKING:
    from torch.distributed.pipelining import Schedule1F1B

SPLIT = 2


class Divided(NamedTuple):
    """The part of the model on one rank.

    Attributes:
        model: the user's own module, with the parameter names of the whole model.
        network: the wrapped module, whose forward the training calls.
        copies: the number of ranks, or groups of ranks, that train on different data.
        copy: the number of this rank's copy; None if that is the rank's own number.
        group: the process group over which DDP sends the buffers of its first rank to the others; None without DDP.
        pipeline: runs forward and backward of a pipeline; None if the model is not a pipeline.
    """

    model: nn.Module
    network: nn.Module
    copies: int
    copy: int | None
    group: Any = None
    pipeline: Schedule1F1B | None = None


def divide(gpt: Gpt, size: Size, layout: str, world_size: int, micro_batches: int) -> Divided:
    """Return this rank's part of ``gpt``. With several ranks the process group must exist already."""
    if layout in ("hsdp", "fsdp"):
        replicas = 2 if layout == "hsdp" else 1
        shape = (replicas, world_size // replicas)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        mesh = mesh if replicas > 1 else mesh["shard"]
        for block in gpt.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(gpt, mesh=mesh)
        return Divided(gpt, gpt, world_size, dist.get_rank())
    if layout == "tp":
        mesh = init_device_mesh("cpu", (world_size // SPLIT, SPLIT), mesh_dim_names=("copies", "split"))
        _halve(gpt, mesh["split"])
        return Divided(gpt, _copied(gpt, mesh["copies"]), world_size // SPLIT, dist.get_rank() // SPLIT)
    if layout.startswith("pp"):
        return _pipeline(gpt, size, layout, world_size, micro_batches)
    if world_size == 1:
        return Divided(gpt, gpt, 1, 0)
    return Divided(gpt, DistributedDataParallel(gpt), world_size, None, dist.group.WORLD)


def _halve(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make the model tensor parallel: each rank of a pair has one half of each feed-forward layer."""
    for module in model.modules():
        if isinstance(module, Block):
            parallelize_module(module, mesh, {"feed.0": ColwiseParallel(), "feed.2": RowwiseParallel()})


def _copied(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Make a tensor-parallel model data parallel."""
    copied = replicate(model, mesh=mesh)  # the same object, whose class is now a generated subclass
    assert isinstance(copied, nn.Module)
    return copied


def _pipeline(gpt: Gpt, size: Size, layout: str, world_size: int, micro_batches: int) -> Divided:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # slow, and only needed here

    split = SPLIT if layout == "pp-tp" else 1
    shape = (SPLIT, world_size // SPLIT // split, split)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("stages", "copies", "split"))
    index = mesh.get_local_rank("stages")
    model = Stage(gpt, index, SPLIT)
    if split > 1:
        _halve(model, mesh["split"])
        network = _copied(model, mesh["copies"])
    else:
        network = DistributedDataParallel(model, process_group=mesh.get_group("copies"))
    batch = size.batch // micro_batches
    tokens = torch.zeros(batch, size.context, dtype=torch.int64)
    activations = torch.zeros(batch, size.context, size.width, requires_grad=True)
    logits = torch.zeros(batch, size.context, VOCABULARY, requires_grad=True)
    stage = PipelineStage(
        network,
        index,
        SPLIT,
        torch.device("cpu"),
        # Shapes given here: a rank that joins a running pipeline cannot ask its neighbours for them.
        input_args=tokens if index == 0 else activations,
        output_args=logits if index == SPLIT - 1 else activations,
        group=mesh.get_group("stages"),
    )
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=next_byte_loss)
    return Divided(
        model, network, shape[1], mesh.get_local_rank("copies"), mesh.get_group("copies"), schedule
    )


def run_pipeline(pipeline: Any, stage: Stage, tokens: Tensor, targets: Tensor) -> float:
    """Run forward and backward of one batch over all stages.

    Return the mean loss; 0 on stages that do not compute it.
    """
    losses: list[Tensor] = []
    if stage.is_first:
        pipeline.step(tokens)
    else:
        pipeline.step(target=targets, losses=losses)
    return float(torch.stack(losses).mean().detach()) if losses else 0.0
