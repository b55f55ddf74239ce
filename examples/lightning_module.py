"""Lightning, protected: a small network learns scikit-learn's handwritten digits.

    pip install 'holdfast[lightning]' scikit-learn
    holdfast run --nproc-per-node 4 --preload lightning.pytorch examples/lightning_module.py      # then kill -9 any

Holdfast adds: from holdfast.integrations.lightning import Holdfast; Trainer(callbacks=[Holdfast()]).
"""

import argparse
import os

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast.integrations.lightning import Holdfast  # + Holdfast


class Digits(pl.LightningModule):
    """Convolutions over 8 x 8 images of ten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(16 * 64, 10),
        )

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        right = (self.net(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", right, prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    given = parser.parse_args()
    pl.seed_everything(0)
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    data = TensorDataset(x, torch.tensor(labels))
    workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=workers,
        strategy="ddp" if workers > 1 else "auto",
        max_epochs=given.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[Holdfast()],  # + Holdfast
    )
    held_out = torch.utils.data.Subset(data, range(1500, len(data)))
    seen = torch.utils.data.Subset(data, range(1500))
    trainer.fit(Digits(), DataLoader(seen, 32, shuffle=True), DataLoader(held_out, 99))
    if trainer.is_global_zero:
        print(f"step {trainer.global_step}, epoch {trainer.current_epoch}, {trainer.callback_metrics}")


if __name__ == "__main__":
    main()
