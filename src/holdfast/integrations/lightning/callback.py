"""The callback for Lightning: ``Trainer(callbacks=[Holdfast()])``.

Theory. The session opens before the loops begin, when the strategy has wrapped the model and made the optimizer. A step
lasts from the first micro-batch's ``automatic_optimization.run`` to ``on_train_batch_end``. The runs of its
micro-batches are recorded, and run again when the step is aborted (``session_in_loop.py``). The checkpoint holds the
progress of Lightning's loops and the state of its callbacks. Lightning itself starts a data loader from its beginning
after a resume. :class:`PositionedLoader` starts at the batch that the loops have reached. The order and augmentation of
its batches are functions of (seed, epoch, batch).
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
    """A callback that makes ``trainer.fit`` survive faults, and continue at the job's position.

    Args:
        session: arguments of :func:`holdfast.session`, such as ``checkpoint``, ``resume``, ``seed``.

    Raises (from ``trainer.fit``):
        UnsupportedError: manual optimization, several optimizers, averages of weights, or a strategy other than DDP or
            one device.
        UsageError: a second ``fit``.
    """

    def __init__(self, **session: Any) -> None:
        self._arguments = {"seed": 0, **session}
        self._replay: Any = None  # a Replay while fitting
        self._resumed: dict[str, Any] = {}  # the position from which to continue
        self._passed = False  # a validation, or the end of an epoch, came after the step
        self._between, self._patches = ExitStack(), Patches()
        keep_decisions()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Replace methods of the trainer, before its strategy is set up."""
        if stage != "fit":
            return
        if self._replay is not None:
            raise UsageError("fit() was called before", hint="one fit() per process, and per Holdfast()")
        require_supported(trainer, pl_module)
        warn_of_loggers(trainer)
        # The step must end after the other callbacks have counted, and before a callback saves: a save communicates.
        saves = pl.callbacks.Checkpoint
        trainer.callbacks = sorted(trainer.callbacks, key=lambda c: 2 if isinstance(c, saves) else c is self)
        self._patches = stand_behind(trainer, self._open, self._loader, self._run, self._fit)

    def _open(self, setup: Any, trainer: pl.Trainer) -> None:
        """Open the session when model and optimizers are ready, and move to the position of the job."""
        setup(trainer)
        require_one_optimizer(trainer)
        # Load the rest of fit(ckpt_path=...) before the session loads. Lightning would load it after the session, at
        # each start. The job's weights would then have an old optimizer and an old position.
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
        seed = self._arguments["seed"]
        return PositionedLoader(made, trainer, seed, lambda: self._replay) if trainer.training else made

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open a section of the session, because an evaluation may take long."""
        if self._replay is not None:
            self._between.enter_context(self._replay.section("evaluate"))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Close the section of the evaluation, and record that the position has changed."""
        self._between.close()
        self._passed = True

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record that the position has changed, because callbacks change their state at the end of an epoch."""
        self._passed = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Seal the last checkpoint and close the session."""
        self._replay.close(None)

    def _fit(self, run: Any) -> None:
        """Run all epochs, remove the patches and close the session.

        If no epoch is left, Lightning calls no hook that would close the session.
        """
        try:
            run()
        finally:
            self._patches.undo()
        self._replay.close(None)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Close the session with the exception that ends the training."""
        if self._replay is not None:
            self._replay.close(exception)

    def _run(
        self, trainer: pl.Trainer, loop: Any, run: Any, optimizer: Any, batch_idx: int, kwargs: Any
    ) -> Any:
        """Run one micro-batch as a recorded part of the step. The last micro-batch of a step includes the update."""
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
            # The code of `run` for accumulation. In a repeated call `run` would ask whether to accumulate *now*.
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
        """End the step after its last micro-batch. Leave the process if the ranks have agreed on a graceful exit."""
        if not trainer.fit_loop._should_accumulate():
            self._replay.commit(place_of(trainer, arrived=False))
