"""Hugging Face's ``Trainer``: ``protect(trainer)`` before ``trainer.train()``.

Theory. A step lies between the fetch of its micro-batches and ``on_step_end``; its calls are remembered and run again
when it is aborted (``replay.py``). Batches come from Holdfast's feed over the Trainer's own dataset and sampler: order
and augmentation are functions of (seed, epoch, batch), and a resume does not read what was used.
"""

from __future__ import annotations

import copy
import os
from contextlib import nullcontext
from functools import partial
from typing import Any

import transformers
from torch.utils.data import IterableDataset
from transformers.trainer_callback import ExportableState, TrainerCallback

from holdfast.adapters.torch.data import Feed, MapSource
from holdfast.errors import UnsupportedError, UsageError
from holdfast.integrations.replay import Replay, closing

LOOPS = "_inner_training_loop _run_epoch _maybe_log_save_evaluate _finalize_training"
WRAPPED = [*LOOPS.split(), "get_batch_samples", "training_step"]
# Of TrainerState what is the training's, not this run's or this process's.
PROGRESS = "epoch global_step num_input_tokens_seen total_flos log_history".split()
PROGRESS += "best_metric best_global_step best_model_checkpoint".split()
# Of the Trainer what it needs to report losses, the same on all ranks.
REPORTED = "_total_loss_scalar _globalstep_last_logged _initial_global_step".split()


def protect(trainer: transformers.Trainer, **session: Any) -> transformers.Trainer:
    """Make ``trainer.train()`` survive faults, and go on where the job was; returns the trainer.

    ``session``: arguments of :func:`holdfast.session`; its ``seed`` is the Trainer's by default.

    Raises:
        UnsupportedError: a Trainer of another structure, DeepSpeed, FSDP, or an iterable dataset.
        UsageError: it is protected already.
    """
    missing = [name for name in (*WRAPPED, "_clip_grad_norm") if not hasattr(trainer, name)]
    foreign = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
    if missing or foreign or isinstance(trainer.train_dataset, IterableDataset):
        what = f"has no {', '.join(missing)}" if missing else "uses DeepSpeed, FSDP or an iterable dataset"
        raise UnsupportedError(
            f"this Trainer (transformers {transformers.__version__}) {what}",
            hint="transformers 5.23, a map-style dataset, one process or DDP; or a loop of your own",
        )
    if any(isinstance(c, _Hooks) for c in trainer.callback_handler.callbacks):
        raise UsageError("this Trainer is protected already", hint="call protect(trainer) once")
    hooks = _Hooks(trainer, {"seed": trainer.args.seed, **session})
    for name in WRAPPED:
        setattr(trainer, name, partial(getattr(hooks, name), getattr(trainer, name)))
    trainer.add_callback(hooks)
    return trainer


class _Hooks(TrainerCallback):  # type: ignore[misc]
    """Methods named as the Trainer's stand before them: they get the original first."""

    def __init__(self, trainer: transformers.Trainer, session: dict[str, Any]) -> None:
        self._trainer = trainer
        self._arguments = session
        self._replay: Any = None  # a Replay from on_train_begin on
        self._norm: Any = None  # of the newest attempt

    def _inner_training_loop(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        with closing(lambda: self._replay):
            return original(*args, **kwargs)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Model and optimizer are ready: open the session, go to where the job is."""
        trainer = self._trainer
        if self._replay is not None:
            raise UsageError(
                "train() was called before on this Trainer", hint="one train() per protected Trainer"
            )
        # Rank 0's view for all: the sampler draws for the whole job, and each rank takes its share of that.
        self._feed = Feed(MapSource(trainer.callback_handler.train_dataloader, self._arguments["seed"], 0))
        outer = trainer.optimizer
        self._replay = replay = Replay(
            model=trainer.model_wrapped, optimizer=getattr(outer, "optimizer", outer),
            scheduler=trainer.lr_scheduler, scaler=trainer.accelerator.scaler, **self._arguments,
        )  # fmt: skip
        outer.step = replay.remembering(outer.step)
        trainer._clip_grad_norm = replay.remembering(partial(self._clip, trainer._clip_grad_norm))
        if replay.position:
            vars(state).update(copy.deepcopy(replay.position["progress"]))
            for callback in self._exportable():
                vars(callback).update(replay.position["callbacks"].get(type(callback).__name__, {}))
            self._feed.seek(replay.position["data"])
            self._report_from(replay.position, replay.own or {})
        self._resumed_step = state.global_step if replay.position else -1

    def _report_from(self, position: dict[str, Any], own: dict[str, Any]) -> None:
        """Losses are summed up since the last log line, which may be far behind."""
        trainer, step = self._trainer, self._trainer.state.global_step
        vars(trainer).update(position["reported"])
        if trainer._globalstep_last_logged < step:  # else the sums of this rank were logged, too
            trainer._tr_loss.fill_(own.get("loss", 0.0))
            trainer.current_flos = own.get("flos", 0)

    def _exportable(self) -> list[Any]:
        return [c for c in self._trainer.callback_handler.callbacks if isinstance(c, ExportableState)]

    def _run_epoch(self, original: Any, **kwargs: Any) -> None:
        """One epoch; what was trained before the resume is left out."""
        trainer, resumed_step = self._trainer, self._resumed_step
        if resumed_step >= 0:
            epoch, done = divmod(resumed_step, kwargs["num_update_steps_per_epoch"])
            if kwargs["epoch"] < epoch or resumed_step >= trainer.state.max_steps:
                return
            if kwargs["epoch"] == epoch and done:
                trainer.args.ignore_data_skip = False
                # A place without random states: each step is seeded.
                kwargs |= {"epochs_trained": epoch, "resume_from_checkpoint": os.devnull}
                kwargs["steps_trained_in_current_epoch"] = done * trainer.args.gradient_accumulation_steps
        original(**kwargs)

    def get_batch_samples(self, original: Any, iterator: Any, count: int, device: Any) -> Any:
        """A step begins: its micro-batches from our feed, and how many tokens they hold."""
        samples = [self._feed.draw() for _ in range(count)]

        def tokens() -> None:
            self._tokens: Any = self._trainer._get_num_items_in_batch(samples, device)

        self._replay.begin()
        self._replay.do(tokens)
        self._loss_before = self._trainer._tr_loss.clone()
        self._losses: list[Any] = []
        self._added: list[Any] = []
        return samples, self._tokens

    def training_step(self, original: Any, model: Any, inputs: Any, tokens: Any = None) -> Any:
        """Gradients of one micro-batch."""
        accelerator = self._trainer.accelerator
        sync = accelerator.sync_gradients

        place = len(self._added)
        self._losses.append(None)

        def call() -> None:
            accelerator.gradient_state._set_sync_gradients(sync)
            with nullcontext() if sync else accelerator.no_sync(model):
                self._losses[place] = original(model, copy.copy(inputs), self._tokens)

        self._replay.do(call)
        self._added.append(self._losses[place])
        return self._added[place]

    def _clip(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._norm = original(*args, **kwargs)
        return self._norm

    def _correct_loss(self) -> None:
        """Losses that were added up before their step was aborted may come from broken collectives: add anew."""
        trainer = self._trainer
        if all(new is old for new, old in zip(self._losses, self._added, strict=True)):
            return
        total = trainer._tr_loss.copy_(self._loss_before)
        steps = (
            trainer.state.global_step - trainer._globalstep_last_logged
        )  # the Trainer's, this step included
        for loss in self._losses:
            usable = not trainer.args.logging_nan_inf_filter or loss.isfinite()
            total += loss if usable else total / steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The step ends. Leaves the process when a graceful exit is agreed."""
        self._correct_loss()
        own = {"loss": self._trainer._tr_loss.item(), "flos": self._trainer.current_flos}
        self._replay.commit(self._position(), own)

    def _position(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "progress": {name: copy.copy(getattr(trainer.state, name)) for name in PROGRESS},
            "callbacks": {
                type(c).__name__: dict(c.state().get("attributes", {})) for c in self._exportable()
            },
            "data": self._feed.place(),
            "reported": {name: getattr(trainer, name) for name in REPORTED},
        }

    def _maybe_log_save_evaluate(
        self, original: Any, loss: Any, norm: Any, *args: Any, **kwargs: Any
    ) -> None:
        control = self._trainer.control
        name = "evaluate" if control.should_evaluate else "save" if control.should_save else ""
        due = bool(name) or control.should_log
        with self._replay.section(name):
            # The norm that the Trainer was given first may be of an attempt that was aborted.
            original(loss, norm if self._norm is None else self._norm, *args, **kwargs)
        if due:
            self._replay.amend(self._position())

    def _finalize_training(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Trained: seal that, before the Trainer puts the best model in the last one's place."""
        self._replay.close(None)
        self._feed.close()
        return original(*args, **kwargs)
