"""A loader of the script's own. Each block begins at the position that the step before has left in a variable."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from tests.others.beat import beat, end, long

STEPS, ROWS, LENGTH = long(15), 2, 8
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)


class Tokens:
    """Rows of tokens, one after the other; the ranks take turns."""

    def __init__(self) -> None:
        self.tokens = torch.randint(0, 16, (2000,), generator=torch.Generator().manual_seed(1))
        self.position = ROWS * LENGTH * rank

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and the tokens that follow them: each (ROWS, LENGTH)."""
        taken = self.tokens[self.position : self.position + ROWS * LENGTH + 1]
        self.position += ROWS * LENGTH * ranks
        return taken[:-1].view(ROWS, LENGTH), taken[1:].view(ROWS, LENGTH)


tokens = Tokens()
raw = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
model = DistributedDataParallel(raw)
optimizer = torch.optim.AdamW(raw.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()
named: dict[str, Any] = {"shard": 0, "position": tokens.position}
pair = 0, tokens.position

with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
    for step in s.steps(until=STEPS):
        beat(step.number)
        with step:
            if os.environ.get("PLACE") == "named":
                tokens.position = named["position"]
            else:
                _, tokens.position = pair
            x, y = tokens.next_batch()
            optimizer.zero_grad()
            criterion(model(x).view(-1, 16), y.view(-1)).backward()
            optimizer.step()
        if step.committed:
            named = {"shard": 0, "position": tokens.position}
            pair = 0, tokens.position

end(raw)
dist.destroy_process_group()
