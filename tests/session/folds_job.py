"""Two models that are trained in turns, a loop for each: ``folds_job.py [RANK:STEP ...]`` kills these ranks once.

Their gradients need several buckets of DDP, in another order than their parameters.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast

WIDTH, SAMPLES, BATCH = 520, 24, 4


class Net(nn.Module):
    """Three layers of 1 MB, which are used in another order than they were made in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        for at in (1, 0, 2):
            x = torch.tanh(self.layers[at](x))
        return x


def main(kills: list[str]) -> None:
    """Train."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    nets = {name: DistributedDataParallel(Net()) for name in ("a", "b")}
    optimizers = {name: torch.optim.SGD(net.parameters(), 0.1) for name, net in nets.items()}
    data = TensorDataset(torch.randn(SAMPLES, WIDTH))
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data, seed=1))
    with holdfast.session(model=nets, optimizer=optimizers, checkpoint="ckpt") as s:
        for _ in s.epochs(2):
            for name, net in nets.items():
                for _ in s.phase(name):
                    for step in s.steps(loader):
                        with step as (x,):
                            mark = Path(f"struck-{step.number}")
                            if f"{rank}:{step.number}" in kills and not mark.exists():
                                mark.touch()
                                os.kill(os.getpid(), signal.SIGKILL)
                            (net(x) - x).square().mean().backward()
                            optimizers[name].step()
                            optimizers[name].zero_grad()
    total = xxhash.xxh3_128()
    for net in nets.values():
        for tensor in net.state_dict().values():
            total.update(tensor.numpy().tobytes())
    print(f"rank {rank} ends with {total.hexdigest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
