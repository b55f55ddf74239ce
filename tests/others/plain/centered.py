"""A student learns from a teacher, an average of its weights. The loss keeps a center, which each forward replaces."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.others.beat import beat, end, long

EPOCHS = long(3)


class CenteredLoss(nn.Module):
    """Cross-entropy to the centered output of the teacher."""

    center: torch.Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, size))

    def forward(self, student_output: torch.Tensor, teacher_output: torch.Tensor) -> torch.Tensor:
        """Return the loss, and update the center with the outputs of all ranks."""
        wanted = functional.softmax((teacher_output - self.center) / 0.1, dim=-1).detach()
        loss = -(wanted * functional.log_softmax(student_output, dim=-1)).sum(dim=-1).mean()
        self.update_center(teacher_output)
        return loss

    @torch.no_grad()
    def update_center(self, teacher_output: torch.Tensor) -> None:
        """Average the outputs of all ranks into a new center."""
        total = teacher_output.sum(dim=0, keepdim=True)
        dist.all_reduce(total)
        self.center = self.center * 0.9 + total / (len(teacher_output) * dist.get_world_size()) * 0.1


dist.init_process_group("gloo")
torch.manual_seed(7)
inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs)
sampler = DistributedSampler(data)  # type: ignore[var-annotated]
loader = DataLoader(data, batch_size=4, sampler=sampler)
raw = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 5))
teacher = copy.deepcopy(raw)
teacher.requires_grad_(False)
student = DistributedDataParallel(raw)
criterion = CenteredLoss(5)
optimizer = torch.optim.AdamW(raw.parameters(), lr=0.01)

number = 0
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        beat(number)
        loss = criterion(student(x), teacher(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mine, average in zip(raw.parameters(), teacher.parameters(), strict=True):
                average.mul_(0.9).add_(mine, alpha=0.1)
        number += 1

end(raw, teacher, criterion)
dist.destroy_process_group()
