"""Data-parallel training with CUDA graphs, over gloo with CUDA tensors.

``python graph_job.py --result DIR --graph KIND [--die STEP]`` writes a digest per rank. KIND ``compiled`` or
``callables``: forward and backward lie in graphs. KIND ``update``: the update as well, which Holdfast refuses.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import xxhash
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast

SEED, STEPS, BATCH, WIDTH = 5, 14, 16, 64
WARM_UP = 3  # passes before a capture
DEVICE = torch.device("cuda", 0)


def whole_step(
    net: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Return a function that runs a step on (inputs, targets) as one CUDA graph."""
    x, y = torch.zeros(BATCH, WIDTH, device=DEVICE), torch.zeros(BATCH, WIDTH, device=DEVICE)

    def once() -> None:
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()

    def replay(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        x.copy_(inputs)
        y.copy_(targets)
        graph.replay()

    return replay


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--graph", choices=("compiled", "callables", "update"), required=True)
    parser.add_argument("--die", type=int, default=-1)
    given = parser.parse_args()
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    net = nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, WIDTH)).to(DEVICE)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, capturable=given.graph == "update")
    model: nn.Module = net
    if given.graph == "compiled":
        model = DistributedDataParallel(torch.compile(net, mode="reduce-overhead"))
    elif given.graph == "callables":
        example = torch.zeros(BATCH, WIDTH, device=DEVICE)
        model = DistributedDataParallel(torch.cuda.make_graphed_callables(net, (example,)))
    replay = whole_step(net, optimizer) if given.graph == "update" else None
    data = TensorDataset(*torch.randn(2, 4000, WIDTH, generator=torch.Generator().manual_seed(SEED)))
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data, seed=SEED))
    died = given.result / "died"
    with holdfast.session(model=model, optimizer=optimizer, seed=SEED) as s:
        for step in s.steps(loader, until=STEPS):
            with step as batch:
                x, y = (part.to(DEVICE) for part in batch)
                if (
                    step.number == given.die
                    and dist.get_rank() == dist.get_world_size() - 1
                    and not died.exists()
                ):
                    died.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                if replay is not None:
                    replay(x, y)
                    continue
                F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
    torch.cuda.synchronize()
    total = xxhash.xxh3_128()
    for tensor in net.parameters():
        total.update(tensor.detach().cpu().numpy().tobytes())
    (given.result / f"rank-{dist.get_rank()}").write_text(total.hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
