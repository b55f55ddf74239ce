"""A Lightning training in which each rank takes its slice of one shuffled batch, without a DistributedSampler."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast.integrations.lightning import Holdfast


class Net(pl.LightningModule):  # type: ignore[misc]
    """A model that records the samples of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.drawn: dict[int, list[int]] = {}

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Return the loss of this rank's slice."""
        samples, x = batch
        number = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        self.drawn[number] = samples.tolist()
        killed = Path("killed")
        if self.global_rank == 1 and number == 5 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        loss: Tensor = self.net(x[self.global_rank :: 2]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    """Train, and write the samples of each batch."""
    pl.seed_everything(0)
    module = Net()
    data = TensorDataset(torch.arange(32), torch.randn(32, 4))
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", use_distributed_sampler=False, max_epochs=2, logger=False,
        enable_progress_bar=False, enable_checkpointing=False, callbacks=[Holdfast()],
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, 8, shuffle=True))
    for number, samples in module.drawn.items():
        Path(f"drawn-{module.global_rank}-{number}").write_text(str(samples))


if __name__ == "__main__":
    main()
