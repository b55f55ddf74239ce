"""Two ranks whose model has a module of a library, with running statistics in plain attributes.

SpeechBrain's ``InputNormalization`` keeps them in this way. The library is a file in ``site-packages`` of the working
directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import holdfast

SOURCE = """
import torch


class Normalize(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.count, self.shape, self.table = torch.zeros(6), 0, None, torch.zeros(0)

    def forward(self, x):
        self.shape = x.shape
        if len(x) > len(self.table):
            self.table = torch.ones(len(x))
        self.count += 1
        self.mean = self.mean + (x.mean(0) - self.mean).detach() / self.count
        return (x - self.mean) * self.table[: len(x), None] + len(self.shape)
"""


def main() -> None:
    """Train for eight steps."""
    dist.init_process_group("gloo")
    file = Path("site-packages", f"normalize_{dist.get_rank()}.py").absolute()
    file.parent.mkdir(exist_ok=True)
    file.write_text(SOURCE)
    names: dict[str, Any] = {"__name__": "normalize"}
    exec(compile(SOURCE, file, "exec"), names)
    torch.manual_seed(7)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(names["Normalize"](), nn.Linear(6, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    with holdfast.session(model=model, optimizer=optimizer) as s:
        for step in s.steps(range(8)):
            with step:
                inputs = torch.randn(4 + step.number, 6, generator=torch.Generator().manual_seed(step.number))
                model(inputs).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
