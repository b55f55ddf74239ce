"""A learning rate that follows the mean loss of an epoch over all ranks, which a metric of a library sums.

``FORM=state``: the metric is in ``state=``, and its ``state_dict()`` is empty. ``FORM=kept``: it is not empty.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from tests.others.beat import beat, end
from tests.session.library import Metric

FORM = os.environ.get("FORM", "")
dist.init_process_group("gloo")
torch.manual_seed(7)
inputs = torch.randn(64, 6)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
raw = nn.Linear(6, 1)
model = DistributedDataParallel(raw)
optimizer = torch.optim.SGD(raw.parameters(), lr=0.02)
criterion = nn.MSELoss()
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
    optimizer, factor=0.5, patience=0, threshold=1.5, threshold_mode="abs"
)
metric = Metric()
if FORM == "kept":
    metric.register_buffer("total", metric.__dict__.pop("total"))
state = {"metric": metric} if FORM else None

with holdfast.session(
    model=model, optimizer=optimizer, scheduler=plateau, checkpoint="ckpt", state=state
) as s:
    for _epoch in s.epochs(4):
        for step in s.steps(loader):
            with step as (x, y):
                beat(step.number)
                optimizer.zero_grad()
                loss = criterion(model(x), y)
                loss.backward()
                optimizer.step()
            if step.committed:
                metric.update(loss.item())
        total = metric.compute().clone()
        dist.all_reduce(total)
        plateau.step(float(total) / 2 / len(loader))
        metric.reset()

end(raw)
dist.destroy_process_group()
