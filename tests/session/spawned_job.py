"""A script that starts its ranks itself."""

from __future__ import annotations

import socket

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

import holdfast


def train(rank: int, port: int) -> None:
    """Train as one rank of two."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holdfast.session(model=model, optimizer=optimizer) as s:
        for step in s.steps(until=2):
            with step:
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as free:
        number = free.getsockname()[1]
    torch.multiprocessing.spawn(train, args=(number,), nprocs=2)  # type: ignore[attr-defined, no-untyped-call]
