"""An average of the weights warms up with a count that the session does not have. PLACE: how a step moves the average.

``kept``: the average is in a dict of the session, and each step puts new tensors into it. The other ways change the
tensors of a module.
"""

from __future__ import annotations

import copy
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from tests.others.beat import beat, end, long

EPOCHS = long(3)
PLACE = os.environ.get("PLACE", "kept")


class Average:
    """A moving average of the weights of a module."""

    def __init__(self, module: nn.Module) -> None:
        self.kept = {name: value.detach().clone() for name, value in module.named_parameters()}
        self.module = copy.deepcopy(module).requires_grad_(False)
        self.updates = 0

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Add the weights of ``module``."""
        keep = min(0.9, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        for name, value in module.named_parameters():
            old = self.module.get_parameter(name)
            if PLACE == "kept":
                self.kept[name] = keep * self.kept[name] + (1 - keep) * value
            elif PLACE == "data":
                old.data = keep * old.data + (1 - keep) * value
            elif PLACE == "copy":
                old.copy_(keep * old + (1 - keep) * value)
            else:
                old.sub_((1 - keep) * (old - value))


dist.init_process_group("gloo")
torch.manual_seed(7)
inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
raw = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
model = DistributedDataParallel(raw)
optimizer = torch.optim.SGD(raw.parameters(), lr=0.05, momentum=0.9)
criterion = nn.MSELoss()
average = Average(raw)
state = {"average": average.kept if PLACE == "kept" else average.module}

with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt", state=state) as s:
    for step in s.steps(loader, epochs=EPOCHS):
        with step as (x, y):
            beat(step.number)
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
        if step.committed:
            average.update(raw)

end(raw, average.module)
dist.destroy_process_group()
