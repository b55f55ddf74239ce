"""Semi-supervised training as in FixMatch: two loaders of different length, whose passes are counted apart."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.others.beat import beat, end, long

STEPS = long(14)
dist.init_process_group("gloo")
torch.manual_seed(7)
raw = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
model = DistributedDataParallel(raw)
optimizer = torch.optim.SGD(raw.parameters(), lr=0.05, momentum=0.9)
labeled = TensorDataset(torch.randn(16, 6), torch.randint(4, (16,)))
unlabeled = TensorDataset(torch.randn(56, 6), torch.randn(56, 6))
labeled_sampler: DistributedSampler[object] = DistributedSampler(labeled)
unlabeled_sampler: DistributedSampler[object] = DistributedSampler(unlabeled)
labeled_loader = DataLoader(labeled, batch_size=4, sampler=labeled_sampler, drop_last=True)
unlabeled_loader = DataLoader(unlabeled, batch_size=8, sampler=unlabeled_sampler, drop_last=True)

labeled_epoch = unlabeled_epoch = 0
labeled_batches, unlabeled_batches = iter(labeled_loader), iter(unlabeled_loader)
for number in range(STEPS):
    beat(number)
    try:
        inputs, targets = next(labeled_batches)
    except StopIteration:
        labeled_epoch += 1
        labeled_sampler.set_epoch(labeled_epoch)
        labeled_batches = iter(labeled_loader)
        inputs, targets = next(labeled_batches)
    try:
        weak, strong = next(unlabeled_batches)
    except StopIteration:
        unlabeled_epoch += 1
        unlabeled_sampler.set_epoch(unlabeled_epoch)
        unlabeled_batches = iter(unlabeled_loader)
        weak, strong = next(unlabeled_batches)
    logits = model(torch.cat((inputs, weak, strong)))
    loss = nn.functional.cross_entropy(logits[:4], targets)
    pseudo = torch.softmax(logits[4:12].detach(), dim=-1)
    threshold, wanted = pseudo.max(dim=-1)
    mask = (threshold > 0.3).float()
    loss = loss + (nn.functional.cross_entropy(logits[12:], wanted, reduction="none") * mask).mean()
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()

end(raw)
dist.destroy_process_group()
