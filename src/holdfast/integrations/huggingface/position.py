"""The position of Hugging Face's ``Trainer`` in its loop: its progress, and the state of its callbacks.

Theory. The Trainer may log, evaluate and save after a step, and again at the end of an epoch. A position that is taken
before this work has entries for the actions that are still due (``due``, ``ended``). A process that restarts from that
position first does these actions.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from typing import Any

from transformers.trainer_callback import ExportableState, TrainerCallback

from holdfast.integrations.recorded_calls import is_newcomer

# The fields of TrainerState that belong to the training, not to one run or process.
OF_TRAINING = "epoch global_step num_input_tokens_seen total_flos log_history".split()
OF_TRAINING += "best_metric best_global_step best_model_checkpoint".split()
DUE = "should_log should_evaluate should_save".split()


def due_of(trainer: Any) -> list[str]:
    """Return the actions that the Trainer's callbacks have requested: log, evaluate, save."""
    return [name for name in DUE if getattr(trainer.control, name)]


def progress_of(trainer: Any) -> dict[str, Any]:
    """Return the entries ``progress`` and ``callbacks`` of a position: the Trainer's and its callbacks' state."""
    return {
        "progress": {name: copy.copy(getattr(trainer.state, name)) for name in OF_TRAINING},
        "callbacks": {type(c).__name__: dict(c.state().get("attributes", {})) for c in _exportable(trainer)},
    }


def go_on(trainer: Any, position: Mapping[str, Any]) -> None:
    """Restore the Trainer's progress and the state of its callbacks from ``position``."""
    vars(trainer.state).update(copy.deepcopy(position["progress"]))
    for callback in _exportable(trainer):
        vars(callback).update(position["callbacks"].get(type(callback).__name__, {}))


def _exportable(trainer: Any) -> list[Any]:
    return [c for c in trainer.callback_handler.callbacks if isinstance(c, ExportableState)]


class Tokens:
    """The token counts of one step, in its micro-batches and in the Trainer's sum. A repeated step is counted once.

    Attributes:
        held: the number of tokens by which the Trainer divides the loss; None if the Trainer does not divide.
    """

    def __init__(self, trainer: Any) -> None:
        self.held: Any = None
        self._trainer = trainer

    def counting(self, samples: list[Any], device: Any) -> Callable[[], None]:
        """Return a function that counts the tokens of ``samples`` for one run of the block.

        The returned function first resets the Trainer's sum to the value at this call. So repeated runs count once.
        """
        state = self._trainer.state
        seen = state.num_input_tokens_seen

        def count() -> None:
            state.num_input_tokens_seen = seen
            self.held = self._trainer._get_num_items_in_batch(samples, device)

        return count


class Epochs(TrainerCallback):  # type: ignore[misc]
    """The callback that runs the Trainer's epochs from the position of the job on."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._ended = 0
        self._ending = False  # an epoch is over, and the work at its end is not done yet
        self._rate = 0.0  # learning rate of the newest update, which the Trainer logs
        self._after: dict[str, Any] | None = None  # the entry ``after`` of the loaded position
        self._is_newcomer = False

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the learning rate of this update before the schedule changes it."""
        self._rate = self._trainer._get_learning_rate()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record that the Trainer's work at the end of an epoch comes next."""
        self._ending = True

    def after(self, norm: Any) -> dict[str, Any]:
        """Return the entry ``after`` of a position: the work that is still due after the step.

        Args:
            norm: norm of the gradients, to be logged with that work; None if unknown.
        """
        state, due = self._trainer.state, due_of(self._trainer)
        stopped = self._trainer.control.should_training_stop and state.global_step < state.max_steps
        logged = {"norm": None if norm is None else float(norm), "rate": self._rate} if due else {}
        return {"due": due, "ended": self._ended, "stopped": stopped, **logged}

    def follow(self) -> bool:
        """Record that the due work is done. Return True if it was the work at the end of an epoch."""
        vars(self._trainer.control).update(dict.fromkeys(DUE, False))
        ending, self._ending = self._ending, False
        self._ended += ending
        return ending

    def go_on(self, after: Mapping[str, Any]) -> None:
        """Take over the due work of a loaded position. ``after`` is the entry that :meth:`after` returned."""
        self._after = dict(after)
        self._ended = self._after["ended"]
        self._is_newcomer = is_newcomer()  # the other ranks have done the due work

    def run(self, original: Callable[..., None], kwargs: dict[str, Any]) -> None:
        """Run the epoch with ``original(**kwargs)`` unless it is finished. First do the work that is still due."""
        if kwargs["epoch"] < self._ended:
            return
        after, self._after = self._after, None
        if after is None or self._arrive(kwargs, after):
            original(**kwargs)

    def _arrive(self, kwargs: dict[str, Any], after: dict[str, Any]) -> bool:
        """Do the due work, and set ``kwargs`` so that the Trainer continues inside the job's current epoch.

        Args:
            kwargs: arguments of the Trainer's method for an epoch; changed in place.
            after: the entry ``after`` of the position that was loaded.

        Returns:
            False if no part of the epoch is left to run.
        """
        trainer, epoch, whole = self._trainer, kwargs["epoch"], kwargs["num_update_steps_per_epoch"]
        state, control = trainer.state, trainer.control
        done = max(0, state.global_step - epoch * whole)
        if after["due"] and not self._is_newcomer:
            vars(control).update(dict.fromkeys(after["due"], True))
            trainer._maybe_log_save_evaluate(
                trainer._tr_loss, after.get("norm"), kwargs["model"], kwargs["trial"], epoch,
                kwargs["ignore_keys_for_eval"], kwargs["start_time"], learning_rate=after.get("rate"),
            )  # fmt: skip
        control.should_training_stop |= after["stopped"] or state.global_step >= state.max_steps
        if control.should_training_stop and done:
            done = whole  # only the end of the epoch is left
        if (control.should_training_stop and not done) or (self._is_newcomer and done == whole):
            self._ended = epoch + 1
            return False
        trainer.args.ignore_data_skip = False
        # This directory has no random states that the Trainer could load. Each step is seeded anyway.
        kwargs |= {"epochs_trained": epoch, "resume_from_checkpoint": os.devnull}
        kwargs["steps_trained_in_current_epoch"] = done * trainer.args.gradient_accumulation_steps
        return True
