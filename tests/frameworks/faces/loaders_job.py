"""A Lightning training over two data loaders of different lengths, in one process: ``loaders_job.py MODE STEPS``.

Prints the first number of each batch, one line per step, and stops after STEPS.
"""

from __future__ import annotations

import sys
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader

from holdfast.integrations.lightning import Holdfast


class Net(pl.LightningModule):  # type: ignore[misc]
    """A model with one weight per loader."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)

    def training_step(self, batch: dict[str, Tensor | None], index: int) -> Tensor:
        """Print the first number of each batch that was given."""
        found = {name: None if part is None else int(part[0]) for name, part in batch.items()}
        print("batch", self.global_step, found["long"], found["short"], flush=True)
        loss: Tensor = sum(self.net(part).square().mean() for part in batch.values() if part is not None)
        return loss

    def configure_optimizers(self) -> Any:
        """Return an optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main() -> None:
    """Train two epochs of five and of two batches."""
    mode, steps = sys.argv[1], int(sys.argv[2])
    long: Any = torch.arange(10.0).reshape(-1, 1)
    short: Any = torch.arange(100.0, 104.0).reshape(-1, 1)
    parts = {"long": DataLoader(long, 2), "short": DataLoader(short, 2)}
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=2, max_steps=steps, logger=False, enable_progress_bar=False,
        enable_checkpointing=False, callbacks=[Holdfast(checkpoint="ckpts")],
    )  # fmt: skip
    trainer.fit(Net(), CombinedLoader(parts, mode))


if __name__ == "__main__":
    main()
