"""The batch of the next iteration is drawn while this one computes, as before: refused."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from tests.others.beat import beat, end, long

MAX_ITERS = long(12)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1337 + rank)
text = torch.arange(512) % 29
raw = nn.Sequential(nn.Embedding(29, 16), nn.Dropout(0.1), nn.Linear(16, 29))
model = DistributedDataParallel(raw)
optimizer = torch.optim.AdamW(raw.parameters(), lr=1e-2)
criterion = nn.CrossEntropyLoss()


def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return random pieces of the text."""
    starts = torch.randint(len(text) - 9, (4,)).tolist()
    return torch.stack([text[i : i + 8] for i in starts]), torch.stack([text[i + 1 : i + 9] for i in starts])


x, y = get_batch()
with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
    for step in s.steps(until=MAX_ITERS):
        with step:
            beat(step.number)
            loss = criterion(model(x).flatten(0, 1), y.flatten())
            x, y = get_batch()
            loss.backward()
            nn.utils.clip_grad_norm_(raw.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step.committed and rank == 0:
            print(f"iter {step.number}: loss {loss.item():.4f}")

end(raw)
dist.destroy_process_group()
