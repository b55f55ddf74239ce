"""Lightning: ``Trainer(callbacks=[Holdfast()])``.

Theory. The session opens when the strategy has wrapped the model and made the optimizer, before the loops begin. A
step lies between the first micro-batch's ``automatic_optimization.run`` and ``on_train_batch_end``; those runs are
remembered and run again when it is aborted (``session_in_loop.py``). The progress of Lightning's loops and the state
of its callbacks travel in the checkpoint. Lightning itself starts a data loader anew after a resume; ours starts at
the batch where the loops are, and its order and augmentation are functions of (seed, epoch, batch).
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior

from holdfast.errors import UsageError
from holdfast.integrations.lightning.once_per_process import keep_decisions, warn_of_loggers
from holdfast.integrations.lightning.patches import Patches, stand_behind
from holdfast.integrations.lightning.position import PositionedLoader, arrive, go_on, place_of
from holdfast.integrations.lightning.supported import require_one_optimizer, require_supported
from holdfast.integrations.session_in_loop import Replay


class Holdfast(pl.Callback):  # type: ignore[misc]
    """Makes ``trainer.fit`` survive faults, and go on where the job was.

    Args:
        session: arguments of :func:`holdfast.session`, such as ``checkpoint``, ``resume``, ``seed``.

    Raises (from ``trainer.fit``):
        UnsupportedError: manual optimization, several optimizers, averages of weights; neither DDP nor one device.
        UsageError: a second ``fit``.
    """

    def __init__(self, **session: Any) -> None:
        self._arguments = {"seed": 0, **session}
        self._replay: Any = None  # a Replay while fitting
        self._resumed: dict[str, Any] = {}  # the place to arrive at
        self._passed = False  # a validation, or the end of an epoch, since the step ended
        self._between, self._patches = ExitStack(), Patches()
        keep_decisions()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Before the strategy is set up: stand behind it."""
        if stage != "fit":
            return
        if self._replay is not None:
            raise UsageError("fit() was called before", hint="one fit() per process, and per Holdfast()")
        require_supported(trainer, pl_module)
        warn_of_loggers(trainer)
        # The step ends after what other callbacks count, and before anybody saves: that communicates.
        saves = pl.callbacks.Checkpoint
        trainer.callbacks = sorted(trainer.callbacks, key=lambda c: 2 if isinstance(c, saves) else c is self)
        self._patches = stand_behind(trainer, self._open, self._loader, self._run, self._fit)

    def _open(self, setup: Any, trainer: pl.Trainer) -> None:
        """Model and optimizers are ready: open the session, go to where the job is."""
        setup(trainer)
        require_one_optimizer(trainer)
        # What fit(ckpt_path=...) still holds comes before what the session loads. Lightning would load it behind us, at
        # each start: an optimizer and a place of long ago beside the weights of the job.
        trainer._checkpoint_connector.restore_training_state()
        trainer._checkpoint_connector._loaded_checkpoint = {}
        self._replay = Replay(
            model=trainer.strategy.model,
            optimizer=trainer.optimizers[0],
            scheduler=[config.scheduler for config in trainer.lr_scheduler_configs],
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            **self._arguments,
        )
        self._resumed = self._replay.position
        if self._resumed:
            go_on(trainer, self._resumed)

    def _loader(self, trainer: pl.Trainer, process: Any, loader: Any) -> Any:
        made = process(loader)
        drawn, seed = lambda: self._replay.drawn, self._arguments["seed"]
        return PositionedLoader(made, trainer, seed, drawn) if trainer.training else made

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """An evaluation may take long."""
        if self._replay is not None:
            self._between.enter_context(self._replay.section("evaluate"))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Back to training."""
        self._between.close()
        self._passed = True

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Callbacks look at what was validated."""
        self._passed = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Seal the end."""
        self._replay.close(None)

    def _fit(self, run: Any) -> None:
        """All epochs; what follows is Lightning's alone. With nothing left to train it calls no hook."""
        try:
            run()
        finally:
            self._patches.undo()
        self._replay.close(None)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Whatever ends the training closes the session."""
        if self._replay is not None:
            self._replay.close(exception)

    def _run(
        self, trainer: pl.Trainer, loop: Any, run: Any, optimizer: Any, batch_idx: int, kwargs: Any
    ) -> Any:
        """One micro-batch; with the last of a step, the update."""
        if self._resumed:
            arrive(trainer, self._resumed)
            self._resumed = {}
        if self._passed and not self._replay.is_open:
            self._replay.amend(place_of(trainer, arrived=True))
            self._passed = False
        accumulate = trainer.fit_loop._should_accumulate()
        progress = copy.deepcopy(loop.optim_progress.state_dict())

        def call() -> Any:
            loop.optim_progress.load_state_dict(progress)
            if not accumulate:
                return run(optimizer, batch_idx, kwargs)
            # As `run` does it; but a repeated run would ask whether *now* is the time to accumulate.
            closure = loop._make_closure(kwargs, optimizer, batch_idx)
            with _block_parallel_sync_behavior(trainer.strategy, block=True):
                closure()
            result = closure.consume_result()
            return {} if result.loss is None else result.asdict()

        self._replay.drawn.trains(trainer.fit_loop.epoch_progress.current.processed, batch_idx)
        self._replay.begin()
        return self._replay.do(call)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The step ends with its last micro-batch. Leaves the process when a graceful exit is agreed."""
        if not trainer.fit_loop._should_accumulate():
            self._replay.commit(place_of(trainer, arrived=False))
