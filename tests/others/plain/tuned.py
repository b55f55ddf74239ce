"""A GAN in StyleGAN2's style: its augmentation follows the guesses of all ranks, and each rank keeps a mean slope.

The generator is trained first. Each network has a gradient scaler, which leaves out the first updates.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.others.beat import beat, beat_inside, end, long

EPOCHS = long(3)


class Tuning:
    """The strength of the augmentation, and the mean slope of the generator."""

    def __init__(self) -> None:
        self.strength, self.calls, self.sums, self.slope = 0.0, 0, [0.0, 0.0], 0.0

    def tune(self, guesses: torch.Tensor) -> None:
        """Count the guesses. At each second call, set the strength by those of all ranks."""
        self.calls += 1
        self.sums = [self.sums[0] + guesses.sign().sum().item(), self.sums[1] + len(guesses)]
        if self.calls % 2 == 0:
            total = torch.tensor(self.sums)
            dist.all_reduce(total)
            step = 0.2 if total[0] > 0.1 * total[1] else -0.1
            self.strength, self.sums = min(1.0, max(0.0, self.strength + step)), [0.0, 0.0]


dist.init_process_group("gloo")
torch.manual_seed(7)
inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs)
sampler = DistributedSampler(data)  # type: ignore[var-annotated]
loader = DataLoader(data, batch_size=4, sampler=sampler)
raw = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 6))
judge = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
g, d = DistributedDataParallel(raw), DistributedDataParallel(judge)
of_g = torch.optim.Adam(raw.parameters(), lr=0.01)
of_d = torch.optim.Adam(judge.parameters(), lr=0.01)
scaler_g, scaler_d = (torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=5) for _ in range(2))
tuning = Tuning()


def fakes(count: int) -> torch.Tensor:
    """Return augmented samples of the generator."""
    made: torch.Tensor = g(torch.randn(count, 3))
    return made + tuning.strength * torch.randn(count, 6)


number = 0
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for (real,) in loader:
        beat(number)
        of_g.zero_grad()
        fake = fakes(4)
        slope = fake.square().mean()
        tuning.slope += 0.1 * (slope.item() - tuning.slope)
        scaler_g.scale(8 * softplus(-d(fake)).mean() + (slope - tuning.slope).square()).backward()  # type: ignore[no-untyped-call]
        scaler_g.unscale_(of_g)
        scaler_g.step(of_g)
        scaler_g.update()
        of_d.zero_grad()
        guesses = d(torch.cat([real + tuning.strength * torch.randn(4, 6), fakes(4).detach()]))
        scaler_d.scale(8 * softplus(torch.cat([-guesses[:4], guesses[4:]])).mean()).backward()  # type: ignore[no-untyped-call]
        scaler_d.unscale_(of_d)
        beat_inside(number)
        scaler_d.step(of_d)
        scaler_d.update()
        tuning.tune(guesses[:4].detach())
        number += 1

end(raw, judge, scale=[scaler_g.get_scale(), scaler_d.get_scale()], strength=tuning.strength)
dist.destroy_process_group()
