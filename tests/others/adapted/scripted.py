"""Functions of TorchScript, which give other last bits after their first calls (WaveNet, VITS)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from tests.others.beat import beat, end, long

EPOCHS = long(3)
dist.init_process_group("gloo")
torch.manual_seed(7)
inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs + 0.1)
sampler = DistributedSampler(data)  # type: ignore[var-annotated]
loader = DataLoader(data, batch_size=4, sampler=sampler)


@torch.jit.script
def gate(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return a gated activation. TorchScript optimizes this function after its first call."""
    total = one + other
    return torch.tanh(total) * torch.sigmoid(total)


class Gated(nn.Module):
    """A network of gated layers (WaveNet)."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 48), nn.Linear(6, 48), nn.Linear(48, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the network."""
        y: torch.Tensor = self.last(gate(self.first(x), self.second(x)))
        return y


raw = Gated()
model = DistributedDataParallel(raw)
optimizer = torch.optim.AdamW(raw.parameters(), lr=1e-2)


@torch.no_grad()
def evaluate() -> None:
    """Run the network on all inputs. A process that begins with this call optimizes the function for no gradients."""
    raw.eval()
    raw(inputs)
    raw.train()


with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
    for step in s.steps(loader, epochs=EPOCHS):
        if step.number % 4 == 0 and step.number > 0 and not step.again:
            evaluate()
        with step as (x, y):
            beat(step.number)
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()

end(raw)
dist.destroy_process_group()
