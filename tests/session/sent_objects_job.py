"""Two ranks. Rank 0 draws a number and sends it to all ranks as an object, before the training.

``python sent_objects_job.py``. Each process that starts later draws another number, as from the clock. ``KILL`` names
the kills, as in ``tests/others/beat.py``. Each rank writes the numbers and its weights into ``ended-RANK``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from tests.others.beat import beat
from tests.session.once import first


def main() -> None:
    """Train eight steps."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    drawn = 1 if first(Path(f"drawn-{rank}")) else 2
    told: list[Any] = [drawn if rank == 0 else None]
    dist.broadcast_object_list(told, src=0)
    dealt: list[Any] = [None]
    dist.scatter_object_list(dealt, [drawn, drawn] if rank == 0 else None, src=0)
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, drawn)
    number = torch.tensor([drawn])
    dist.broadcast(number, src=0)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    numbers = [*told, *dealt, *gathered, int(number)]
    mask = torch.tensor(numbers, dtype=torch.float32)
    with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
        for step in s.steps(until=8):
            with step:
                beat(s.step)
                optimizer.zero_grad()
                (model(torch.full((2, 4), s.step + 1.0)).square() * mask).sum().backward()
                optimizer.step()
    Path(f"ended-{rank}").write_text(f"{numbers} {model.module.weight.tolist()}")


if __name__ == "__main__":
    main()
