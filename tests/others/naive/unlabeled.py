"""Labeled data from the session, and unlabeled data from an iterator that the script advances before the block.

``PLACE`` is ``iterator``, ``object`` (a class with ``__next__`` around an iterator) or ``cycle`` (``itertools.cycle``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from tests.others.beat import beat, end, long

STEPS = long(14)
PLACE = os.environ.get("PLACE", "iterator")
dist.init_process_group("gloo")
torch.manual_seed(7)


class Forever:
    """The batches of a loader without an end."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.batches: Iterator[Any] = iter(loader)

    def __next__(self) -> Any:
        """Return the next batch."""
        try:
            return next(self.batches)
        except StopIteration:
            self.batches = iter(self.loader)
            return next(self.batches)


raw = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
model = DistributedDataParallel(raw)
optimizer = torch.optim.SGD(raw.parameters(), lr=0.05, momentum=0.9)
labeled = TensorDataset(torch.randn(16, 6), torch.randint(4, (16,)))
unlabeled = TensorDataset(torch.randn(104, 6))
labeled_loader = DataLoader(labeled, 4, sampler=DistributedSampler(labeled))
unlabeled_loader = DataLoader(unlabeled, 4, sampler=DistributedSampler(unlabeled))
makes: dict[str, Callable[[Any], Any]] = {"iterator": iter, "object": Forever, "cycle": cycle}
others = makes[PLACE](unlabeled_loader)

with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
    for step in s.steps(labeled_loader, until=STEPS):
        beat(step.number)
        if not step.again:
            try:
                drawn = next(others)
            except StopIteration:
                others = iter(unlabeled_loader)
                drawn = next(others)
        with step as (inputs, targets):
            logits = model(torch.cat((inputs, drawn[0])))
            loss = nn.functional.cross_entropy(logits[:4], targets) + logits[4:].square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

end(raw)
dist.destroy_process_group()
