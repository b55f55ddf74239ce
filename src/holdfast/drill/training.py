"""The parts that the drill's training script (``train.py``) and the same training without Holdfast (``bare.py``) share.

The parts are arguments, data, model, gradients of a step, and the digest, all in plain torch. The loops are in the two
scripts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from holdfast.core.protocol.status_page import TrapAction
from holdfast.drill.corpus import load
from holdfast.drill.exercise import LAYOUTS
from holdfast.drill.model import SIZES, Gpt, Size, Stage
from holdfast.drill.parallelism import divide, run_pipeline
from holdfast.runtime.worker.worker_client import WorkerClient

ACCUMULATION = 2
LOADER_WORKERS = 2
MASKED = 0.05
MASK_TOKEN = 0
LEARNING_RATE = 1e-3

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class DrillSettings:
    """The command-line arguments of the drill's training script."""

    layout: str
    size: str
    steps: int
    seed: int
    result: Path | None
    checkpoint: str | None
    save_every: int
    trace: Path | None


def parse(argv: Sequence[str] | None = None) -> DrillSettings:
    """Parse the command line of the drill's training script, with or without Holdfast, and return the settings."""
    parser = argparse.ArgumentParser(description="byte-level GPT on the sources of the standard library")
    parser.add_argument("--layout", choices=LAYOUTS, default="ddp")
    parser.add_argument("--size", choices=tuple(SIZES), default="tiny")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--result", type=Path, default=None, help="directory for one digest file per rank")
    parser.add_argument(
        "--checkpoint", default=None, help="where the session saves; default: in the run directory"
    )
    parser.add_argument("--save-every", type=int, default=0, help="save every N steps; 0: only when needed")
    parser.add_argument(
        "--trace", type=Path, default=None, help="directory for step times, one file per rank"
    )
    return DrillSettings(**vars(parser.parse_args(argv)))


class Windows(Dataset[Pair]):
    """A dataset of text windows with random augmentation, drawn from the default generators as most datasets do.

    The text is cut into one part per item. The offset of the window in its part and the masked bytes are random.
    """

    def __init__(self, text: npt.NDArray[np.uint8], context: int, length: int) -> None:
        self.text = text
        self.context = context
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Pair:
        """Return the input tokens and the next tokens, int64, shape ``(context,)`` each."""
        part = len(self.text) // self.length
        room = max(1, part - self.context - 1)
        start = min(index * part + random.randrange(room), len(self.text) - self.context - 1)
        window = torch.from_numpy(self.text[start : start + self.context + 1].astype(np.int64))
        masked = torch.rand(self.context) < MASKED
        return window[:-1].masked_fill(masked, MASK_TOKEN), window[1:]


@dataclass
class DrillTraining:
    """The training of one rank.

    ``network`` is the wrapped module that forward calls; ``model`` (a ``Gpt`` or one stage) is inside. ``copy`` is the
    number of this rank's copy of the model; None if that is the rank's own number. ``group`` is the process group over
    which DDP sends the buffers of its first rank to the others; None without DDP.
    """

    model: nn.Module
    network: nn.Module
    copy: int | None
    group: Any
    pipeline: Any
    optimizer: Optimizer
    scheduler: LRScheduler
    loader: DataLoader[Pair]
    sampler: DistributedSampler[Pair]


def build(settings: DrillSettings, world_size: int) -> DrillTraining:
    """Return model, optimizer, scheduler and loader of one rank. The process group must exist already.

    With DDP this function does not need the rank (the sampler asks for it later), so a spare can call it.
    """
    size: Size = SIZES[settings.size]
    text = load(size.text_bytes)
    torch.manual_seed(settings.seed)
    gpt = Gpt(size)
    parts = divide(gpt, size, settings.layout, world_size, ACCUMULATION)
    optimizer = AdamW(parts.model.parameters(), lr=LEARNING_RATE)
    scheduler = CosineAnnealingLR(optimizer, T_max=settings.steps)
    data = Windows(text, size.context, size.epoch_steps * size.batch * parts.copies)
    replicas = None if parts.copy is None else parts.copies
    sampler: DistributedSampler[Pair] = DistributedSampler(
        data, replicas, parts.copy, seed=settings.seed, drop_last=True
    )
    loader = DataLoader(data, size.batch, sampler=sampler, num_workers=LOADER_WORKERS, drop_last=True)
    return DrillTraining(
        parts.model, parts.network, parts.copy, parts.group, parts.pipeline,
        optimizer, scheduler, loader, sampler,
    )  # fmt: skip


def micro_batches(batch: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Yield the halves of a batch as (tokens, targets, whether this is the last half)."""
    tokens, targets = batch
    parts = list(zip(tokens.chunk(ACCUMULATION), targets.chunk(ACCUMULATION), strict=True))
    for index, (some_tokens, some_targets) in enumerate(parts):
        yield some_tokens, some_targets, index == len(parts) - 1


def synchronise(network: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Return a context for forward and backward of one micro-batch.

    Gradients are synchronised between ranks only if ``last``: the micro-batch is the last one of its step.
    """
    if isinstance(network, FSDPModule):
        network.set_requires_gradient_sync(last)
        return nullcontext()
    if isinstance(network, DistributedDataParallel) and not last:
        guard: AbstractContextManager[None] = network.no_sync()
        return guard
    return nullcontext()


def accumulate(parts: DrillTraining, batch: Sequence[Tensor]) -> float:
    """Run forward and backward over all micro-batches of one step. Return the mean loss of this rank."""
    if parts.pipeline is not None:
        assert isinstance(parts.model, Stage)
        return run_pipeline(parts.pipeline, parts.model, batch[0], batch[1])
    total = 0.0
    for tokens, targets, last in micro_batches(batch):
        with synchronise(parts.network, last):
            loss = parts.network(tokens, targets) / ACCUMULATION
            loss.backward()
        total += float(loss.detach())
    return total


def average_statistics(parts: DrillTraining) -> None:
    """Average BatchNorm's statistics over all ranks, once per step, because HSDP does not keep them equal."""
    if not isinstance(parts.network, FSDPModule) or parts.pipeline is not None:
        return
    assert isinstance(parts.model, Gpt)
    statistics = parts.model.statistics
    mean, var = statistics.running_mean, statistics.running_var
    assert mean is not None and var is not None
    flat = torch.cat([mean, var])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    mean.copy_(flat[: mean.numel()])
    var.copy_(flat[mean.numel() :])


def tensor_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of this rank's part of a tensor."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().contiguous().numpy().tobytes()


def digest_tensors(named: Iterator[tuple[str, Tensor]]) -> str:
    """Return the xxh3-128 digest over names, types, shapes and bytes of tensors, in the order given."""
    total = xxhash.xxh3_128()
    for name, tensor in named:
        total.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        total.update(tensor_bytes(tensor))
    return total.hexdigest()


def optimizer_tensors(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of the optimizer's state, in the order of the parameters and then of the names."""
    for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        entries = optimizer.state[parameter]
        for key in sorted(entries):
            if isinstance(entries[key], Tensor):
                yield f"{index}.{key}", entries[key]


@dataclass(frozen=True)
class RankResult:
    """The digests of one rank's state after training. ``loss``: loss of the last step; None if no step was trained."""

    rank: int
    world_size: int
    steps: int
    parameters: str
    optimizer: str
    buffers: str
    scheduler: str
    loss: float | None


def result_of(
    parts: DrillTraining, settings: DrillSettings, world_size: int, loss: float | None
) -> RankResult:
    """Return the digests of everything that the training of this rank changes."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in parts.optimizer.param_groups]
    plan = json.dumps([parts.scheduler.last_epoch, [group["lr"] for group in groups]])
    return RankResult(
        rank=rank(),
        world_size=world_size,
        steps=settings.steps,
        parameters=digest_tensors(iter(parts.model.named_parameters())),
        optimizer=digest_tensors(optimizer_tensors(parts.optimizer)),
        buffers=digest_tensors(iter(parts.model.named_buffers())),
        scheduler=xxhash.xxh3_128(plan.encode()).hexdigest(),
        loss=loss,
    )


def write_result(result: RankResult, directory: Path) -> None:
    """Write the result file of one rank into ``directory``, by an atomic rename."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"rank-{result.rank:05d}.json"
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(asdict(result)))
    partial.replace(path)


def workers() -> int:
    """Return the world size from the launcher's environment; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def offer_faults(parts: DrillTraining, world_size: int) -> None:
    """Register the faults that this rank must execute itself (deadlock, flipped bits), for a drill's injector."""
    client = WorkerClient.current()
    if client is None or world_size == 1:
        return
    page = client.page
    page.on_trap(TrapAction.DEADLOCK, lambda: dist.recv(torch.zeros(1), src=(rank() + 1) % world_size))
    page.on_trap(TrapAction.FLIP, lambda: flip_bit(parts.model.parameters()))
    moments = (t for name, t in optimizer_tensors(parts.optimizer) if name.endswith("exp_avg_sq"))
    page.on_trap(TrapAction.FLIP_STATE, lambda: flip_bit(moments))


def flip_bit(tensors: Iterator[Tensor]) -> None:
    """Change one bit of the first nonzero number in this rank's part of ``tensors``, in place.

    The number changes by a factor of 2 or 1/2.
    """
    for tensor in tensors:
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().reshape(-1)
        nonzero = local.nonzero()
        if len(nonzero):
            local.view(torch.int32)[int(nonzero[0])] ^= 1 << 23
            return
