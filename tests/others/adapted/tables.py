"""Each rank has some tables of embeddings, and all exchange the rows of their samples (DLRM). The MLPs use DDP."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from tests.others.beat import beat, end, long

EPOCHS, TABLES, ROWS, WIDTH = long(3), 4, 12, 4
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)


class Exchange(torch.autograd.Function):
    """The rows that a rank has looked up for all samples become the rows of all tables for its own samples."""

    @staticmethod
    def forward(context: Any, rows: torch.Tensor) -> torch.Tensor:
        """Return the parts of all ranks, one after the other."""
        parts = torch.empty_like(rows)
        dist.all_to_all_single(parts, rows.contiguous())
        return parts

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Return the gradients of the rows that this rank has looked up."""
        rows = torch.empty_like(gradients[0])
        dist.all_to_all_single(rows, gradients[0].contiguous())
        return rows


class RowAdagrad(torch.optim.Optimizer):
    """Adagrad with one sum for each row of a table. A flag of the optimizer says whether the sums exist."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.ready = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters."""
        for group in self.param_groups:
            for p in group["params"]:
                grad = p.grad.coalesce() if p.grad.is_sparse else p.grad
                if not self.ready:
                    self.state[p]["sum"] = torch.zeros(len(p)) if grad.is_sparse else torch.zeros_like(p)
                total = self.state[p]["sum"]
                if grad.is_sparse:
                    rows, values = grad.indices()[0], grad.values()
                    total[rows] += values.square().mean(dim=1)
                    p[rows] -= group["lr"] * values / (total[rows].sqrt() + 1e-6)[:, None]
                else:
                    p -= group["lr"] * grad / (total.addcmul_(grad, grad).sqrt() + 1e-6)
        self.ready = True


mine = range(rank * TABLES // ranks, (rank + 1) * TABLES // ranks)
tables = nn.ModuleList(nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True) for _ in mine)
bottom = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, WIDTH)))
top = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH * (TABLES + 1), 8), nn.ReLU(), nn.Linear(8, 1)))
parameters = [{"params": tables.parameters()}, {"params": bottom.parameters()}, {"params": top.parameters()}]
optimizer = RowAdagrad(parameters, lr=0.1)
words = torch.randint(ROWS, (40, TABLES, 3))
data = TensorDataset(words, torch.randn(40, 6), torch.rand(40, 1))
loader = DataLoader(data, batch_size=8, shuffle=True)

named = {f"table{n}": table for n, table in zip(mine, tables, strict=True)}
model = {**named, "bottom": bottom, "top": top}
with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt", memory=1) as s:
    for step in s.steps(loader, epochs=EPOCHS):
        with step as (chosen, x, y):
            beat(step.number)
            own = slice(rank * len(x) // ranks, (rank + 1) * len(x) // ranks)
            rows = torch.cat([table(chosen[:, n]) for n, table in zip(mine, tables, strict=True)], dim=1)
            exchanged: torch.Tensor = Exchange.apply(rows)  # type: ignore[no-untyped-call]
            found = torch.cat([bottom(x[own]), *exchanged.chunk(ranks)], dim=1)
            loss = nn.functional.binary_cross_entropy_with_logits(top(found), y[own])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

end(tables, bottom, top)
dist.destroy_process_group()
