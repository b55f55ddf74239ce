"""FSDP2 on two ranks. In step ``BAD``, only rank 1's shard of one gradient contains nan."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast

BAD, STEPS = 3, 6


def main() -> None:
    """Train."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), 0.1)
    with holdfast.session(model=net, optimizer=optimizer, nonfinite="skip") as s:
        for step in s.steps(until=STEPS):
            with step:
                net(torch.ones(4, 8)).square().mean().backward()
                gradient = net[1].weight.grad
                assert isinstance(gradient, DTensor)
                if step.number == BAD and dist.get_rank() == 1:
                    gradient.to_local()[0, 3] = float("nan")
                optimizer.step()
                optimizer.zero_grad()
        whole = [p.to_local() for p in net.parameters() if isinstance(p, DTensor)]
        assert all(p.isfinite().all() for p in whole)
        print("finite at", s.step, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
