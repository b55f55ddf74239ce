"""A discriminator that learns from a pool of earlier images (CycleGAN); the pool of each rank is in ``state=``."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from tests.others.beat import beat, end, long

STEPS, SIZE = long(12), 3
dist.init_process_group("gloo")
torch.manual_seed(7)
random.seed(7)


class Pool:
    """Earlier images of this rank."""

    def __init__(self) -> None:
        self.images = torch.zeros(SIZE, 6)
        self.count = torch.zeros((), dtype=torch.int64)

    def query(self, images: torch.Tensor) -> torch.Tensor:
        """Return each image or, at random, an earlier one in its place."""
        chosen = []
        for image in images:
            if self.count < SIZE:
                self.images[int(self.count)] = image
                self.count += 1
                chosen.append(image)
            elif random.random() > 0.5:
                number = random.randrange(SIZE)
                chosen.append(self.images[number].clone())
                self.images[number] = image
            else:
                chosen.append(image)
        return torch.stack(chosen)


raw = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
model = DistributedDataParallel(raw)
optimizer = torch.optim.Adam(raw.parameters(), 0.01)
data = TensorDataset(torch.randn(48, 6))
loader = DataLoader(data, 2, sampler=DistributedSampler(data))
pool = Pool()

state = {"images": pool.images, "count": pool.count}
with holdfast.session(model=model, optimizer=optimizer, state=state, checkpoint="ckpt") as s:
    for step in s.steps(loader, until=STEPS):
        with step as (images,):
            beat(step.number)
            fake = pool.query(images)
            loss = (model(fake) - 1).square().mean() + model(images).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

end(raw)
dist.destroy_process_group()
