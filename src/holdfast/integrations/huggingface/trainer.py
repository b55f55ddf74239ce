"""The protection of Hugging Face's ``Trainer``: call ``protect(trainer)`` before ``trainer.train()``.

Theory. A step lasts from the fetch of its micro-batches to ``on_step_end``. The calls of a step are recorded, and run
again when the step is aborted (``session_in_loop.py``). Batches come from Holdfast's feed over the Trainer's own
dataset and sampler. Order and augmentation are functions of (seed, epoch, batch), and a resume does not read used
batches.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import transformers
from transformers.trainer_callback import TrainerCallback

from holdfast.errors import UsageError
from holdfast.frameworks.torch.data.position import MapSource, TorchFeed
from holdfast.frameworks.torch.state.rng import Draws
from holdfast.integrations.huggingface import position
from holdfast.integrations.huggingface.counted import CountedValues
from holdfast.integrations.huggingface.losses import ReportedLosses
from holdfast.integrations.huggingface.supported import require_supported
from holdfast.integrations.session_in_loop import Replay, closing

WRAPPED = (
    "_inner_training_loop _run_epoch _maybe_log_save_evaluate _finalize_training get_batch_samples training_step"
    " _track_num_input_tokens"
).split()


def protect(trainer: transformers.Trainer, **session: Any) -> transformers.Trainer:
    """Make ``trainer.train()`` survive faults, and continue at the job's position. Return the trainer.

    Args:
        trainer: the Trainer, which is changed in place.
        session: arguments of :func:`holdfast.session`; its ``seed`` is the Trainer's by default.

    Raises:
        UnsupportedError: a Trainer of another structure, DeepSpeed, FSDP, or an iterable dataset.
        UsageError: ``trainer`` is already protected.
    """
    require_supported(trainer, (*WRAPPED, "_clip_grad_norm"))
    if any(isinstance(c, _Hooks) for c in trainer.callback_handler.callbacks):
        raise UsageError("this Trainer is protected already", hint="call protect(trainer) once")
    hooks = _Hooks(trainer, {"seed": trainer.args.seed, **session})
    for name in WRAPPED:
        setattr(trainer, name, partial(getattr(hooks, name), getattr(trainer, name)))
    trainer.add_callback(hooks._epochs)
    trainer.add_callback(hooks)
    return trainer


class _Hooks(TrainerCallback):  # type: ignore[misc]
    """Replacements for the Trainer's methods of the same names. The argument ``original`` is the replaced method."""

    def __init__(self, trainer: transformers.Trainer, session: dict[str, Any]) -> None:
        self._trainer = trainer
        self._arguments = session
        self._replay: Any = None  # a Replay from on_train_begin on
        self._losses = ReportedLosses(trainer)
        self._counted = CountedValues(trainer)
        self._epochs = position.Epochs(trainer)
        self._tokens = position.Tokens(trainer)

    def _inner_training_loop(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        with closing(lambda: self._replay):
            return original(*args, **kwargs)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the session when model and optimizer are ready, and move to the position of the job."""
        trainer = self._trainer
        if self._replay is not None:
            raise UsageError("train() was called before", hint="one train() per protected Trainer")
        # The same stream on all ranks: the sampler draws for the whole job, and each rank takes its share.
        loader = trainer.callback_handler.train_dataloader
        self._feed = TorchFeed(MapSource(loader, self._arguments["seed"], Draws.same(0)))
        outer = trainer.optimizer
        self._replay = replay = Replay(
            model=trainer.model_wrapped, optimizer=getattr(outer, "optimizer", outer),
            scheduler=trainer.lr_scheduler, scaler=trainer.accelerator.scaler, **self._arguments,
        )  # fmt: skip
        outer.step = replay.remembering(outer.step)
        trainer._clip_grad_norm = replay.remembering(partial(self._losses.clip, trainer._clip_grad_norm))
        if replay.position:
            position.go_on(trainer, replay.position)
            self._epochs.go_on(replay.position["after"])
            replay.drawn.seek(self._feed, replay.position["data"], trainer.callback_handler.train_dataloader)
            own = replay.own or {}
            self._losses.go_on(replay.position["reported"], own)
            self._counted.go_on(own.get("counted", {}))

    def _run_epoch(self, original: Any, **kwargs: Any) -> None:
        """Run one epoch without the batches that were trained before the resume."""
        if not self._replay.position and kwargs["epoch"] == kwargs["epochs_trained"]:
            # Without a position of the session, begin at the Trainer's own checkpoint, or at the start.
            self._feed.seek({"epoch": kwargs["epoch"], "batch": kwargs["steps_trained_in_current_epoch"]})
        self._epochs.run(original, kwargs)

    def get_batch_samples(self, original: Any, iterator: Any, count: int, device: Any) -> Any:
        """Begin a step. Return its ``count`` micro-batches from Holdfast's feed, and their number of tokens."""
        loader = self._trainer.callback_handler.train_dataloader
        samples = [self._replay.drawn.draw(self._feed, loader) for _ in range(count)]
        self._counted.begin()
        # Since the last step ended, the Trainer may have logged and reset its counted values.
        self._replay.begin({**(self._replay.own or {}), "counted": self._counted.own()})
        count_tokens = self._tokens.counting(samples, device)

        def start() -> None:
            self._counted.put_back()
            count_tokens()

        self._replay.do(start)
        self._losses.begin()
        return samples, self._tokens.held

    def training_step(self, original: Any, model: Any, inputs: Any, tokens: Any = None) -> Any:
        """Compute the gradients of one micro-batch as a recorded part of the step. Return its loss."""
        accelerator = self._trainer.accelerator
        sync, place = accelerator.sync_gradients, self._losses.place()

        def call() -> None:
            accelerator.gradient_state._set_sync_gradients(sync)
            with nullcontext() if sync else accelerator.no_sync(model), self._counted.watched():
                self._losses.put(place, original(model, copy.copy(inputs), self._tokens.held))

        self._replay.do(call)
        return self._losses.add()

    def _track_num_input_tokens(self, original: Any, inputs: Any) -> None:
        """Sum the number of seen tokens over the ranks, as a recorded part of the step."""
        self._replay.do(partial(original, inputs))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the step. Leave the process if the ranks have agreed on a graceful exit."""
        self._losses.correct()
        self._replay.commit(self._position(), {**self._losses.own(), "counted": self._counted.own()})

    def _position(self) -> dict[str, Any]:
        return {
            **position.progress_of(self._trainer),
            "data": self._feed.place(),
            "reported": self._losses.reported(),
            "after": self._epochs.after(self._losses.newest(None)),
        }

    def _maybe_log_save_evaluate(
        self, original: Any, loss: Any, norm: Any, *args: Any, **kwargs: Any
    ) -> None:
        due = position.due_of(self._trainer)
        name = next((word for word in ("evaluate", "save") if f"should_{word}" in due), "")
        with self._replay.section(name):
            original(loss, self._losses.newest(norm), *args, **kwargs)
            if name:
                # Only rank 0 saves, and the other ranks wait for it. A newcomer as rank 0 would not finish the files.
                self._trainer.accelerator.wait_for_everyone()
        if self._epochs.follow() or due:
            self._replay.amend(self._position())

    def _finalize_training(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Seal the last state before the Trainer replaces the last model by the best model."""
        self._replay.close(None)
        self._feed.close()
        return original(*args, **kwargs)
