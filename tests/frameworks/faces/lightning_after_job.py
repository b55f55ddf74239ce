"""A Lightning script with work after its fit: ``lightning_after_job.py RANK`` kills that rank once in the fit.

Its loggers and callbacks choose their directories before the session opens. The script writes down their choices.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import SaveConfigCallback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast.integrations.lightning import Holdfast

SAMPLES, BATCH, DEATH = 40, 4, 7


class Net(pl.LightningModule):  # type: ignore[misc]
    """A model of one layer. Rank ``victim`` dies in its training step number ``DEATH``."""

    def __init__(self, victim: str) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.calls = 0
        self.dies = victim == os.environ["RANK"] and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

    def training_step(self, batch: tuple[Tensor], index: int) -> Tensor:
        """Return the mean square of the output."""
        self.calls += 1
        killed = Path("killed")
        if self.dies and self.calls == DEATH and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        loss: Tensor = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor], index: int) -> None:
        """Log the mean square."""
        self.log("held_out", self.net(batch[0]).square().mean(), sync_dist=True)

    def test_step(self, batch: tuple[Tensor], index: int) -> None:
        """Log the mean square."""
        self.log("tested", self.net(batch[0]).square().mean(), sync_dist=True)

    def predict_step(self, batch: tuple[Tensor], index: int) -> Tensor:
        """Return the output."""
        output: Tensor = self.net(batch[0])
        return output

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return a plain SGD optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Parser:
    """The part of a ``LightningCLI``'s parser that ``SaveConfigCallback`` needs."""

    def save(self, config: Any, path: str, **options: Any) -> None:
        """Write the configuration."""
        Path(path).write_text(str(config))


def main(victim: str) -> None:
    """Fit, test, validate, predict."""
    pl.seed_everything(0)
    data = DataLoader(TensorDataset(torch.randn(SAMPLES, 4)), BATCH)
    trainer = pl.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp", max_epochs=2, log_every_n_steps=1,
        logger=pl.loggers.CSVLogger("logs", flush_logs_every_n_steps=1), enable_progress_bar=False,
        callbacks=[Holdfast(), SaveConfigCallback(Parser(), "configuration")],
    )  # fmt: skip
    module = Net(victim)
    trainer.fit(module, data, data)
    (tested,) = trainer.test(module, data, ckpt_path="best")
    (validated,) = trainer.validate(module, data)
    predicted = trainer.predict(module, data)
    if trainer.is_global_zero:
        scores = {**tested, **validated, "predicted": float(torch.cat(predicted).sum())}
        Path("scores.json").write_text(json.dumps(scores))


if __name__ == "__main__":
    main(sys.argv[1])
