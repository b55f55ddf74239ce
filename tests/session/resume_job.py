"""Two sharded ranks that train a few steps. ``--odd RANK`` gives that rank another model in the next start."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import holdfast


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--until", type=int, required=True)
    parser.add_argument("--odd", type=int, default=-1)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    # The odd rank gives its layer another name. The sharding itself must still agree between the ranks.
    names = ("first", "other") if dist.get_rank() == arguments.odd else ("first", "second")
    model = nn.ModuleDict({name: nn.Linear(8, 8) for name in names})
    forward: Any = model
    for layer in model.values():
        fully_shard(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holdfast.session(
        model=forward, optimizer=optimizer, checkpoint=arguments.checkpoint, save_every_steps=1, keep=9
    ) as s:
        for step in s.steps(until=arguments.until):
            with step:
                x = torch.ones(4, 8)
                for layer in model.values():
                    x = layer(x)
                x.square().mean().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
