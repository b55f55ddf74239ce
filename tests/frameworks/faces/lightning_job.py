"""A Lightning training with accumulation, clipping and validation, protected or not, with an injected fault.

``lightning_job.py --output DIR [--plain] [--cut RANK@CALL] [--leave RANK@CALL] [--kill RANK@CALL]``:
CALL counts the batches that this process trains, without their repetitions by a check or a rehearsal. With ``--kill-in
validation`` it counts calls of ``validation_step``, with ``--kill-in epoch`` epochs that begin. ``--check N``: validate
every N batches, and not at the end of an epoch. ``--plateau``: the validation scores decide on the learning rate.
``--other-data``: a process that starts when DIR/other exists, or after a kill, has other samples. ``--all``: keep one
Lightning checkpoint per epoch. ``--resume FILE``: start from such a checkpoint. ``--cooling``: the model divides its
output by a temperature, which falls at each third batch.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import xxhash
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast.frameworks.torch.comm.comm_state import fabric
from holdfast.integrations.lightning import Holdfast

EPOCHS = 3
BATCHES = 5  # per epoch and rank, for four ranks; a step has two of them, the last step has one
SAMPLES = 4 * 4 * BATCHES


class Net(pl.LightningModule):  # type: ignore[misc]
    """A model with batch norm, and with dropout if requested: a plain run draws other random numbers."""

    def __init__(self, faults: dict[int, str], given: argparse.Namespace) -> None:
        super().__init__()
        self.faults = faults if given.kill_in == "step" else {}
        self.faults_between = {} if given.kill_in == "step" else faults
        self.kill_in = given.kill_in
        self.plateau = given.plateau
        self.validations = 0
        self.cooling = given.cooling
        self.passes = 0
        self.temperature = 1.0
        self.killed = given.output / "killed"
        self.calls = 0
        self.first = sys.maxsize
        self.net = nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(given.dropout), nn.Linear(16, 1)
        )

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Return the mean square error."""
        self.calls += 1
        number = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        self.first = min(self.first, number)
        kind = self.faults.pop(number - self.first + 1, "")
        if kind == "leave":
            os.kill(os.getpid(), signal.SIGUSR2)
        if kind == "kill":
            self.kill()
        if kind == "cut":
            for inner in fabric()._inners():
                inner.sever()
        if self.cooling:
            self.passes += 1
            if self.passes % 3 == 0:
                self.temperature *= 0.8
        loss: Tensor = (self.net(batch[0]) / self.temperature - batch[1]).square().mean()
        self.log("own", loss)  # a different value on each rank
        return loss

    def kill(self) -> None:
        """Kill this process, once in the run."""
        if not self.killed.exists():
            self.killed.touch()
            time.sleep(0.5)  # a slow peer may still receive this rank's broadcast of the validation before
            os.kill(os.getpid(), signal.SIGKILL)

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """Log the mean square error of held-out data."""
        self.validations += 1
        if self.kill_in == "validation" and self.validations in self.faults_between:
            self.kill()
        self.log("held_out", (self.net(batch[0]) - batch[1]).square().mean(), sync_dist=True)

    def on_train_epoch_start(self) -> None:
        """Kill this process when an epoch starts: the learning rate has changed, and no rank is in the next step."""
        if self.kill_in == "epoch":
            if self.current_epoch + 1 in self.faults_between:
                self.kill()
            self.trainer.strategy.barrier()

    def configure_optimizers(self) -> Any:
        """Return AdamW with a schedule by epoch, or with one that halves if two scores in a row are not better."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        if self.plateau:
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", factor=0.5, patience=1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "held_out"}}
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Count(pl.Callback):  # type: ignore[misc]
    """A callback that counts batches, validations and epochs."""

    def __init__(self) -> None:
        self.seen = {"batches": 0, "validations": 0, "epochs": 0}

    def on_train_batch_end(self, *args: Any) -> None:
        """Count a batch."""
        self.seen["batches"] += 1

    def on_validation_end(self, *args: Any) -> None:
        """Count a validation."""
        self.seen["validations"] += 1

    def on_train_epoch_end(self, *args: Any) -> None:
        """Count an epoch."""
        self.seen["epochs"] += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the counts for a checkpoint."""
        return dict(self.seen)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the counts from a checkpoint."""
        self.seen = dict(state_dict)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--cut", default="")
    parser.add_argument("--leave", default="")
    parser.add_argument("--kill", default="")
    parser.add_argument("--kill-in", default="step")
    parser.add_argument("--check", type=int, default=0)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--plateau", action="store_true")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--other-data", action="store_true")
    parser.add_argument("--resume", default=None)
    parser.add_argument("--cooling", action="store_true")
    given = parser.parse_args()
    faults = {}
    for kind in ("cut", "leave", "kill"):
        rank, _, call = getattr(given, kind).partition("@")
        if rank == os.environ.get("RANK"):
            faults[int(call)] = kind
    pl.seed_everything(0)
    given.output.mkdir(exist_ok=True)
    module = Net(faults, given)
    ranks = int(os.environ["WORLD_SIZE"])
    x = torch.randn(SAMPLES, 4)
    if given.other_data and any((given.output / name).exists() for name in ("other", "killed")):
        x = x.roll(1, 0)
    data = TensorDataset(x, x.sin().sum(1, keepdim=True))
    best = pl.callbacks.ModelCheckpoint(
        dirpath=given.output / "best", monitor="held_out", save_top_k=-1 if given.all else 1
    )
    # counts validations without an improvement
    early = pl.callbacks.EarlyStopping("held_out", patience=3 * EPOCHS, mode="max")
    count = Count()
    theirs = [best, early, count]
    trainer = pl.Trainer(
        accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto",
        max_epochs=EPOCHS, accumulate_grad_batches=2, gradient_clip_val=0.5, logger=False, enable_progress_bar=False,
        num_sanity_val_steps=1, val_check_interval=given.check or None,
        callbacks=theirs if given.plain else [Holdfast(), *theirs],
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, 4, shuffle=True), DataLoader(data, 8), ckpt_path=given.resume)
    if trainer.is_global_zero:
        total = xxhash.xxh3_128()
        for tensor in module.state_dict().values():
            total.update(tensor.numpy().tobytes())
        seen = {"step": trainer.global_step, "epoch": trainer.current_epoch, "calls": module.calls}
        seen["rate"] = trainer.optimizers[0].param_groups[0]["lr"]
        moments = trainer.optimizers[0].state_dict()["state"].values()
        seen["updates"] = sorted({float(moment["step"]) for moment in moments})
        seen["best"] = float(best.best_model_score)
        seen["kept"] = [
            Path(best.best_model_path).name,
            None if best.current_score is None else float(best.current_score),
            best._last_global_step_saved,
        ]
        seen["files"] = sorted(path.name for path in (given.output / "best").iterdir())
        seen["counted"] = count.seen
        seen["early"] = [early.wait_count, float(early.best_score)]
        seen["weights"] = total.hexdigest()
        (given.output / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
