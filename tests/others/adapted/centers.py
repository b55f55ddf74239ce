"""Centers of classes in parts: each rank has some rows, of which a step uses a sample (PartialFC). DDP is static."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from tests.others.beat import beat, end, long

EPOCHS, CLASSES, SIZE = long(3), 18, 8
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)


class Gather(torch.autograd.Function):
    """Gather the features of all ranks. The backward pass sums the gradients of the features of this rank."""

    @staticmethod
    def forward(context: Any, features: torch.Tensor) -> torch.Tensor:
        """Return the features of all ranks, one after the other."""
        found = [torch.zeros_like(features) for _ in range(ranks)]
        dist.all_gather(found, features)
        return torch.cat(found)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Return the gradient of this rank's features."""
        parts = [part.contiguous() for part in gradients[0].chunk(ranks)]
        works = [dist.reduce(part, owner, async_op=True) for owner, part in enumerate(parts)]
        for work in works:
            work.wait()
        return parts[rank] * ranks


class Distance(torch.autograd.Function):
    """The cross-entropy over the classes of all ranks, from the scores of the classes of this rank."""

    @staticmethod
    def forward(context: Any, scores: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the samples of all ranks. ``mine`` is one where a class is that of the sample."""
        most = scores.max(dim=1, keepdim=True).values
        dist.all_reduce(most, dist.ReduceOp.MAX)
        shares = (scores - most).exp()
        total = shares.sum(dim=1, keepdim=True)
        dist.all_reduce(total)
        shares /= total
        right = (shares * mine).sum(dim=1)
        dist.all_reduce(right)
        context.save_for_backward(shares - mine)
        return -right.clamp_min(1e-30).log().mean()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient of the scores."""
        (difference,) = context.saved_tensors
        return difference / len(difference) * gradients[0], None


class Centers(nn.Module):
    """The rows of this rank, which compares the features of all ranks with a sample of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.count = rank * CLASSES // ranks, CLASSES // ranks
        self.rows = nn.Parameter(torch.normal(0, 0.1, (self.count, SIZE)))

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of all samples. The rows of their classes are always in the sample."""
        gathered: torch.Tensor = Gather.apply(features)  # type: ignore[no-untyped-call]
        every = [torch.zeros_like(labels) for _ in range(ranks)]
        dist.all_gather(every, labels)
        mine = functional.one_hot(torch.cat(every), CLASSES)[:, self.first : self.first + self.count].float()
        chosen = (torch.rand(self.count) + mine.amax(dim=0)).topk(self.count * 2 // 3).indices.sort().values
        scores = 8 * functional.normalize(gathered) @ functional.normalize(self.rows[chosen]).T
        loss: torch.Tensor = Distance.apply(scores, mine[:, chosen])  # type: ignore[no-untyped-call]
        return loss


data = TensorDataset(torch.randn(40, 6), torch.randint(CLASSES, (40,)))
sampler = DistributedSampler(data)  # type: ignore[var-annotated]
loader = DataLoader(data, batch_size=4, sampler=sampler)
raw = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, SIZE))
model = DistributedDataParallel(raw, find_unused_parameters=True)
model._set_static_graph()  # type: ignore[no-untyped-call]
centers = Centers()
groups = [{"params": model.parameters()}, {"params": centers.parameters()}]
optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)

holdfast.torch.declare(centers.rows, (CLASSES, SIZE), (centers.first, 0))
both = {"backbone": model, "centers": centers}
with holdfast.session(model=both, optimizer=optimizer, checkpoint="ckpt", memory=1) as s:
    for step in s.steps(loader, epochs=EPOCHS):
        with step as (x, y):
            beat(step.number)
            optimizer.zero_grad()
            centers(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5)
            optimizer.step()

end(raw, centers)
dist.destroy_process_group()
