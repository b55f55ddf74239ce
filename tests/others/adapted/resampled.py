"""Noise levels that are drawn by the losses of all ranks in the last steps (the sampler of guided diffusion)."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from tests.others.beat import beat, end, long

EPOCHS = long(3)
LEVELS = 2
KEPT = 3


class LossAware:
    """Draws noise levels more often if their last losses were high. All ranks keep the same losses."""

    def __init__(self) -> None:
        self.losses = np.zeros((LEVELS, KEPT))
        self.counts = np.zeros(LEVELS, dtype=int)

    def weights(self) -> np.ndarray:
        """Return the probability of each level."""
        if not (self.counts == KEPT).all():
            return np.full(LEVELS, 1 / LEVELS)
        weights = np.sqrt((self.losses**2).mean(axis=1))
        return np.asarray(0.99 * weights / weights.sum() + 0.01 / LEVELS)

    def draw(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return levels, and weights of their losses."""
        p = self.weights()
        levels = np.random.choice(LEVELS, size=number, p=p)
        return torch.from_numpy(levels), torch.from_numpy(1 / (LEVELS * p[levels])).float()

    def update(self, levels: torch.Tensor, losses: torch.Tensor) -> None:
        """Keep the losses of all ranks."""
        all_levels = [torch.zeros_like(levels) for _ in range(dist.get_world_size())]
        all_losses = [torch.zeros_like(losses) for _ in range(dist.get_world_size())]
        dist.all_gather(all_levels, levels)
        dist.all_gather(all_losses, losses)
        self.keep(torch.cat(all_levels).tolist(), torch.cat(all_losses).tolist())

    def keep(self, levels: list[int], losses: list[float]) -> None:
        """Add losses, without the oldest ones."""
        for level, loss in zip(levels, losses, strict=True):
            if self.counts[level] == KEPT:
                self.losses[level, :-1] = self.losses[level, 1:]
                self.losses[level, -1] = loss
            else:
                self.losses[level, self.counts[level]] = loss
                self.counts[level] += 1


dist.init_process_group("gloo")
torch.manual_seed(7)
np.random.seed(dist.get_rank())
inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs)
sampler = DistributedSampler(data)  # type: ignore[var-annotated]
loader = DataLoader(data, batch_size=4, sampler=sampler)
raw = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 6))
model = DistributedDataParallel(raw)
optimizer = torch.optim.AdamW(raw.parameters(), lr=0.01)
levels = LossAware()

kept = {"losses": levels.losses, "counts": levels.counts}
with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt", state={"kept": kept}) as s:
    for step in s.steps(loader, epochs=EPOCHS):
        with step as (x,):
            beat(step.number)
            noise, weights = levels.draw(len(x))
            losses = (model(x + noise[:, None] * torch.randn_like(x)) - x).square().mean(1)
            levels.update(noise, losses.detach())
            loss = (losses * weights).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

end(raw, losses=levels.losses.tolist())
dist.destroy_process_group()
