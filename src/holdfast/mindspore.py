"""The interface for MindSpore: ``train`` in place of ``model.train``, or a callback, or a session for your own loop.

    import holdfast.mindspore
    holdfast.mindspore.train(model, 5, dataset, callbacks=[...], checkpoint="ckpts/")

Each step votes before its update, inside the compiled graph. A lost worker costs no committed step, and the next start
of the unchanged script continues at the next step. See docs/mindspore.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import mindspore as ms
from mindspore import nn

from holdfast.errors import UsageError
from holdfast.frameworks.common.adapter import Adapter
from holdfast.frameworks.mindspore.adapter import MindSporeAdapter, place
from holdfast.frameworks.mindspore.checkpoint_files import export_checkpoint, import_checkpoint
from holdfast.frameworks.mindspore.data_position import Counted, DataFeed
from holdfast.frameworks.mindspore.gradient_gate import Relay
from holdfast.frameworks.mindspore.state import Slice
from holdfast.session.api import configure_logging
from holdfast.session.arguments import checked
from holdfast.session.external_loop import steps_of_framework
from holdfast.session.session import Session
from holdfast.session.settings import FACE_OPTIONS, SessionOptions, SessionSettings, extras_of
from holdfast.session.steps.step import Step

__all__ = ["Callback", "Slice", "export_checkpoint", "guard", "import_checkpoint", "session", "train"]


def guard(optimizer: Any) -> Any:
    """Return the optimizer with a vote before its update, for a training cell without ``grad_reducer``.

    Give the result to the training cell in place of the optimizer. ``nn.TrainOneStepCell`` and ``Model`` need no guard.
    """
    return _Guarded(optimizer)


class _Guarded(nn.Optimizer):  # type: ignore[misc]
    """An optimizer that passes its gradients through a gate before its update."""

    def __init__(self, optimizer: Any) -> None:
        if not isinstance(optimizer, nn.Optimizer):
            raise UsageError(
                f"guard() takes a mindspore.nn.Optimizer, not a {type(optimizer).__name__}",
                hint="holdfast.mindspore.guard(nn.SGD(...))",
            )
        nn.Cell.__init__(self, auto_prefix=False)
        self.opt = optimizer
        self.relay = Relay()
        for name in (
            "parameters",
            "global_step",
            "learning_rate",
            "dynamic_lr",
            "is_group",
            "is_group_lr",
            "loss_scale",
        ):
            if hasattr(optimizer, name):
                setattr(self, name, getattr(optimizer, name))

    def construct(self, gradients: Any) -> Any:
        """Pass the gradients through the gate, then update the weights. MindSpore compiles this method."""
        return self.opt(self.relay(gradients))


@checked("holdfast.mindspore.session", FACE_OPTIONS)
def session(
    cell: Any,
    *,
    state: dict[str, Any] | None = None,
    slices: Mapping[str, Slice] | None = None,
    **options: Unpack[SessionOptions],
) -> Session:
    """Return a session: ``for step in s.steps(dataset, until=N): with step as batch: cell(*batch)``.

    Args:
        cell: the training cell, not called before. It has the network, ``optimizer``, and ``grad_reducer`` or a guarded
            optimizer.
        state: the user's own state, by name: plain values, NumPy arrays, MindSpore parameters and tensors, containers
            of these, and objects with ``state_dict`` and ``load_state_dict``. Restored in place where possible.
        slices: this rank's slices of the parameters that are divided among ranks, by parameter name.
        options: the options of ``holdfast.session``.

    Raises (when the session is entered):
        UnsupportedError: the MindSpore version, the parallel mode or the training cell is not supported.
        Other errors: see ``holdfast.session``.
    """
    configure_logging()
    settings = SessionSettings(**options)
    extras = extras_of(state)

    def adapter() -> Adapter:
        return MindSporeAdapter(cell, extras, settings.seed, slices or {}, made.redo)

    made = Session(adapter, extras, settings)
    return made


class _Batches:
    """The iterator of batches for ``Model.train``.

    The iterator ends at the end of each epoch; the next call begins the next epoch.
    """

    def __init__(self, draw: Callable[[], Any]) -> None:
        self._draw = draw

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return self._draw()


class Callback(ms.train.Callback):  # type: ignore[misc]
    """A callback for a protected ``model.train(5, dataset, callbacks=[c], initial_epoch=c.resume(dataset))``.

    It must be the first callback.

    Args:
        model: a ``Model`` that has not trained yet.
        exit_name: at a graceful exit each rank also writes ``rank_N/<exit_name>_train.ckpt`` and ``.mindir``;
            if empty, it writes no such files.
        exit_directory: parent of ``rank_N``.
        options: options of :func:`session`.
    """

    def __init__(
        self,
        model: Any,
        *,
        exit_name: str = "",
        exit_directory: str | os.PathLike[str] = ".",
        **options: Any,
    ) -> None:
        super().__init__()
        self._cell = model.train_network
        self._exit_name = exit_name
        self._exit_directory = Path(exit_directory)
        self._session = session(self._cell, **options)
        self._steps: Iterator[Step] | None = None
        self._given: Step | None = None  # the next step, which has not begun
        self._step: Step | None = None
        self._dataset: Any = None
        self._within = self._ended = False  # training begins within an epoch; an epoch's last batch was given

    @property
    def step(self) -> int:
        """The number of updates that the job has made."""
        return self._session.step

    def resume(self, dataset: Any) -> int:
        """Load the newest valid checkpoint, move ``dataset`` to its step, and return the epoch of that step.

        Raises:
            UsageError: this method was called before.
            CheckpointMismatch: with this number of ranks no batch begins at the position of the job in its data.
            Other errors: see ``holdfast.session``.
        """
        if self._steps is not None:
            raise UsageError(
                "resume() was called before on this callback", hint="one Callback per Model.train"
            )
        self._session.__enter__()
        loader = Counted(dataset, self.step)
        feed = DataFeed(loader, 0, place()[1], lambda busy: None)
        if (at := self._session.place_in_data) is not None:
            feed.seek(at)
        begin = feed.place()
        self._within = begin["batch"] > 0
        self._steps = steps_of_framework(self._session, loader)
        self._dataset = dataset
        # A function, not a method: MindSpore copies the pipeline with the objects that its attributes refer to.
        dataset.create_tuple_iterator = lambda *_, **__: _Batches(self._next_batch)
        return begin["epoch"]

    def _next_batch(self) -> Any:
        """Return the batch of the next step.

        Raises:
            StopIteration: an epoch has ended; the next call begins the next epoch.
        """
        assert self._steps is not None
        if self._ended:
            self._ended = False
            raise StopIteration
        self._given = self._given or next(self._steps)
        self._ended = self._given.last_in_epoch
        return self._given.batch

    def close(self) -> None:
        """Close the session of a training that has no step left to do."""
        self._release()
        self._session.__exit__(None, None, None)

    # called by MindSpore

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        step, self._step = self._step, None
        if step is not None and error is not None:
            step.__exit__(kind, error, trace)
        if self._steps is not None:
            self._release()
            self._session.__exit__(kind, error, trace)

    def _release(self) -> None:
        """Restore the iterator method of the dataset."""
        if self._dataset is not None:
            self._dataset.__dict__.pop("create_tuple_iterator", None)

    def on_train_begin(self, run_context: Any) -> None:
        """Set the step count for the other callbacks. Raises: UsageError: ``resume`` was not called."""
        if self._steps is None:
            raise UsageError(
                "this training would begin at its first batch whatever the checkpoint says",
                hint="model.train(..., initial_epoch=callback.resume(dataset)), or holdfast.mindspore.train(...)",
            )
        run_context.original_args().cur_step_num = self.step

    def on_train_epoch_begin(self, run_context: Any) -> None:
        """Take the first step of an epoch.

        Code that other callbacks run from now on belongs to this step, before its block.

        If the training begins within an epoch, do nothing: the callbacks ran this code in an earlier process.
        """
        assert self._steps is not None
        if not self._within:
            self._given = next(self._steps)
        self._within = False

    def on_train_step_begin(self, run_context: Any) -> None:
        """Open the step. Raises: UsageError: the training draws batches from another dataset than ``resume`` got."""
        step, self._given = self._given, None
        if step is None:
            raise UsageError(
                "the training takes its batches from another dataset than resume() was given",
                hint="model.train(epochs, dataset, callbacks=[callback], initial_epoch=callback.resume(dataset), "
                "dataset_sink_mode=False)",
            )
        step.__enter__()
        self._step = step

    def on_train_step_end(self, run_context: Any) -> None:
        """Commit the step. Stop the training when all ranks have agreed to leave."""
        step, self._step = self._step, None
        assert step is not None
        step.__exit__(None, None, None)
        if self._session.exiting:
            if self._exit_name:
                self._write_exit_files(run_context.original_args())
            run_context.request_stop()

    def _write_exit_files(self, training: Any) -> None:
        """Write the files that MindSpore writes at an exit: ``rank_N/<name>_train.ckpt`` and ``.mindir``."""
        rank, _ = place()
        folder = self._exit_directory / f"rank_{rank}"
        folder.mkdir(parents=True, exist_ok=True)
        base = str(folder / f"{self._exit_name}_train")
        about = {
            "epoch_num": training.cur_epoch_num,
            "step_num": training.cur_step_num,
            "batch_num": training.batch_num,
            "global_step": self.step,
        }
        ms.save_checkpoint(self._cell, f"{base}.ckpt", append_dict=about)
        ms.export(training.network, training.train_dataset_element[0], file_name=base, file_format="MINDIR")


def train(
    model: Any,
    epoch: int,
    dataset: Any,
    callbacks: Any = None,
    *,
    exit_name: str = "",
    exit_directory: str | os.PathLike[str] = ".",
    **options: Any,
) -> None:
    """Run ``model.train(epoch, dataset, callbacks)``, protected: resume automatically, and save at faults and exits.

    Args:
        model, dataset, callbacks: as for ``Model.train``.
        epoch: number of the final epoch, as for ``Model.train``, also after a resume.
        exit_name, exit_directory: at a graceful exit each rank also writes ``rank_N/<exit_name>_train.ckpt`` and
            ``.mindir`` below ``exit_directory``. With an empty name it writes no such files.
        options: options of :func:`session`.

    Raises:
        Other errors: see :func:`session`.
        SystemExit: with code 75 after a graceful exit.
    """
    callback = Callback(model, exit_name=exit_name, exit_directory=exit_directory, **options)
    first = callback.resume(dataset)
    if first >= epoch:
        callback.close()
        return
    others = (
        [] if callbacks is None else list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
    )
    model.train(epoch, dataset, callbacks=[callback, *others], dataset_sink_mode=False, initial_epoch=first)
