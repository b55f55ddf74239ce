"""The interface for TensorFlow 2: ``fit`` instead of ``model.fit``, or a session for a loop of your own.

    import holdfast.tensorflow
    holdfast.tensorflow.fit(model, dataset, epochs=3, steps_per_epoch=100, strategy=strategy, checkpoint="ckpts/")

Every committed step is kept on the host. A lost worker costs only the step in progress, and all workers restart
automatically with a new cluster. See docs/tensorflow.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Unpack

import tensorflow as tf

from holdfast.errors import UnsupportedError, UsageError
from holdfast.frameworks.common.adapter import Adapter
from holdfast.frameworks.tensorflow.adapter import TensorFlowAdapter, place, scope
from holdfast.frameworks.tensorflow.data_position import Source, dataset_of
from holdfast.session.api import configure_logging
from holdfast.session.arguments import checked
from holdfast.session.external_loop import steps_of_framework
from holdfast.session.session import Session
from holdfast.session.settings import FACE_OPTIONS, SessionOptions, SessionSettings, extras_of
from holdfast.session.steps.step import Step

__all__ = ["callback", "fit", "session"]


@checked("holdfast.tensorflow.session", FACE_OPTIONS)
def session(
    model: Any,
    optimizer: Any = None,
    *,
    strategy: Any = None,
    state: dict[str, Any] | None = None,
    **options: Unpack[SessionOptions],
) -> Session:
    """Return a session for a loop of your own: ``for step in s.steps(dataset, until=N): with step as batch: ...``.

    Args:
        model: a built Keras model, made in the strategy's scope.
        optimizer: its optimizer; None means ``model.optimizer``.
        strategy: ``MultiWorkerMirroredStrategy``; None for one process.
        state: the user's own state, by name: plain values, NumPy arrays, TensorFlow variables and tensors, containers
            of these, and objects with ``state_dict`` and ``load_state_dict``. Restored in place where possible.
        options: the options of ``holdfast.session``.

    Raises (when the session is entered):
        UnsupportedError: the version of TensorFlow or the strategy is not supported.
        Other errors: see ``holdfast.session``.
    """
    configure_logging()
    settings = SessionSettings(**options)
    extras = extras_of(state)

    def adapter() -> Adapter:
        chosen = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        if chosen is None:
            raise UsageError(
                "the model has no optimizer", hint="compile the model, or session(model, optimizer)"
            )
        return TensorFlowAdapter(model, chosen, strategy, extras, settings.seed)

    return Session(adapter, extras, settings)


def callback(opened: Session) -> Any:
    """Return a Keras callback that makes each batch of ``fit`` a step of the session.

    It must be the first callback.
    """
    return _Steps(opened)


class _Steps(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """A Keras callback that opens and commits the steps of a session."""

    def __init__(self, opened: Session) -> None:
        super().__init__()
        self._session = opened
        self._steps: Iterator[Step] = steps_of_framework(opened)
        self._given: Step | None = None  # the next step, which has not begun
        self.open: Step | None = None
        self.epoch_steps = 0  # steps of an epoch; 0: the number in Keras' own parameters

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Take the first step of an epoch.

        Code that other callbacks run from now on belongs to this step, before its block.

        If the training begins within an epoch, do nothing: the callbacks ran this code in an earlier process.
        """
        if self._session.step % (self.epoch_steps or self.params.get("steps") or 1) == 0:
            self._given = next(self._steps)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Open the step of this batch."""
        step, self._given = self._given or next(self._steps), None
        step.__enter__()
        self.open = step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Vote and commit the step. Stop the training when all ranks have agreed to leave."""
        step, self.open = self.open, None
        assert step is not None
        step.__exit__(None, None, None)
        if self._session.exiting:
            self.model.stop_training = True


def fit(
    model: Any,
    dataset: Source,
    *,
    epochs: int = 1,
    steps_per_epoch: int,
    callbacks: Sequence[Any] = (),
    strategy: Any = None,
    fit_options: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Run ``model.fit(dataset, epochs=..., steps_per_epoch=...)``, protected: resume at the next batch automatically.

    Args:
        model: a model, compiled and built in the strategy's scope.
        dataset: a dataset of one epoch (or an endless one), or a function epoch -> dataset.
        epochs: number of the final epoch, also after a resume.
        steps_per_epoch: number of batches in an epoch.
        callbacks: Keras callbacks.
        strategy: ``MultiWorkerMirroredStrategy``; None for one process.
        fit_options: further arguments of ``model.fit``.
        options: options of :func:`session`.

    Raises:
        UnsupportedError: Keras 3 with several workers: its ``fit`` does not work with MultiWorkerMirroredStrategy.
        SystemExit: with code 75 after a graceful exit.
    """
    if place()[1] > 1 and not type(model).__module__.startswith("tf_keras") and not _is_legacy(model):
        raise UnsupportedError(
            "fit of Keras 3 does not work with MultiWorkerMirroredStrategy; supported is tf_keras",
            hint="pip install tf_keras, TF_USE_LEGACY_KERAS=1; or a loop of your own with holdfast.tensorflow.session",
        )
    with session(model, strategy=strategy, **options) as opened, _one_fit(model, callbacks) as finish:
        steps = callback(opened)
        steps.epoch_steps = steps_per_epoch
        model.stop_training = False
        try:
            while opened.step < epochs * steps_per_epoch and not model.stop_training:
                epoch, batch = divmod(opened.step, steps_per_epoch)
                model.fit(
                    _rest(dataset, epoch, batch, steps_per_epoch),
                    epochs=epoch + 1,
                    initial_epoch=epoch,
                    steps_per_epoch=steps_per_epoch - batch,
                    callbacks=[steps, *callbacks],
                    **(fit_options or {}),
                )
        except BaseException as error:
            if steps.open is None or not steps.open.__exit__(type(error), error, error.__traceback__):
                raise
        finish()
    # Only after the last save: a resume from that checkpoint must train the weights, not their average.
    with scope(strategy):
        model.optimizer.finalize_variable_values(model.trainable_variables)


@contextmanager
def _one_fit(model: Any, callbacks: Sequence[Any]) -> Iterator[Callable[[], None]]:
    """Make the fits of all epochs look like one fit for ``callbacks`` and the optimizer, with one start and one end.

    Otherwise an early stop would count from 0 in each epoch, a log file would start again, and the average of the
    weights (``use_ema``) would replace the weights after each epoch.

    Yields:
        The function that ends the fit for the callbacks.
    """
    theirs = [_Once(each) for each in tf.nest.flatten(list(callbacks))]

    def finish() -> None:
        for each in theirs:
            each.finish()

    finalize = model.optimizer.finalize_variable_values
    model.optimizer.finalize_variable_values = lambda variables: None
    try:
        yield finish
    finally:
        model.optimizer.finalize_variable_values = finalize
        for each in theirs:
            each.restore()


class _Once:
    """A wrapper of a callback's hooks: training begins only with the first fit, and ends only with :meth:`finish`."""

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._begin, self._end = callback.on_train_begin, callback.on_train_end
        self._began = False
        self._logs: Any = None
        callback.on_train_begin, callback.on_train_end = self._on_begin, self._on_end

    def _on_begin(self, logs: Any = None) -> None:
        if not self._began:
            self._began = True
            self._begin(logs)

    def _on_end(self, logs: Any = None) -> None:
        self._logs = logs

    def finish(self) -> None:
        """Call the callback's hook for the end of training, if its hook for the start of training was called."""
        if self._began:
            self._end(self._logs)

    def restore(self) -> None:
        """Restore the original hooks of the callback."""
        self._callback.on_train_begin, self._callback.on_train_end = self._begin, self._end


def _rest(source: Source, epoch: int, batch: int, steps_per_epoch: int) -> Any:
    """Return the part of an epoch from batch number ``batch`` on.

    An endless dataset is one stream over all epochs. Any other dataset restarts in each epoch.
    """
    dataset = dataset_of(source, epoch)
    if isinstance(source, tf.data.Dataset) and dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        return dataset.skip(epoch * steps_per_epoch + batch)
    return dataset.skip(batch)


def _is_legacy(model: Any) -> bool:
    """Return True if a base class of the model is from tf_keras."""
    return any(base.__module__.startswith("tf_keras") for base in type(model).__mro__)
