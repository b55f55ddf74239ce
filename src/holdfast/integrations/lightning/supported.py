"""The checks that refuse the uses of Lightning's ``fit`` that cannot be protected."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from holdfast.errors import UnsupportedError


def require_supported(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Raise UnsupportedError if this use of ``fit`` cannot be protected.

    It is refused with manual optimization, with a strategy other than DDP or one device, and with a callback that puts
    averaged weights into the model.
    """
    strategy = trainer.strategy
    if not module.automatic_optimization or not isinstance(strategy, DDPStrategy | SingleDeviceStrategy):
        raise UnsupportedError(
            f"{type(strategy).__name__}, automatic_optimization={module.automatic_optimization}",
            hint="Trainer(strategy='ddp') or one device, with automatic optimization; or a loop of your own",
        )
    averages = pl.callbacks.StochasticWeightAveraging | pl.callbacks.WeightAveraging
    if averaging := [type(c).__name__ for c in trainer.callbacks if isinstance(c, averages)]:
        raise UnsupportedError(
            f"{', '.join(averaging)}: between two steps the average takes the model's place",
            hint="average in a loop of your own: holdfast.session(state={'average': averaged_model})",
        )


def require_one_optimizer(trainer: pl.Trainer) -> None:
    """Raise UnsupportedError if the trainer does not have exactly one optimizer."""
    if len(trainer.optimizers) != 1:
        raise UnsupportedError(f"{len(trainer.optimizers)} optimizers", hint="configure one optimizer")
