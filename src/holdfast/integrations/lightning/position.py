"""The position of a Lightning training, as plain values and tensors: its loops, its callbacks and their metrics.

Theory. A position is taken when a step ends. It is taken again when the next step begins, if a validation or the end of
an epoch lies between the two moments: a newcomer must begin after all work of the other ranks. Lightning's own restart
is made for positions at the end of a batch, and errs in two cases, which this module corrects:

- After a restart from a position before a batch, Lightning counts this batch and the validation before it twice. So the
  process sets the counters again when it trains its first batch.
- After a restart from a position after a batch, Lightning leaves out the following validation or end of the epoch. So
  the process begins one batch earlier, and a substitute for the training of that batch sets the counters. A newcomer
  does not begin earlier, because the other ranks have done that work.

A validation may give scores and other small tensors other names. These tensors are saved as plain values, so that the
layout of the state does not change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from holdfast.errors import UnsupportedError
from holdfast.frameworks.torch.data.position import Source, make_source
from holdfast.frameworks.torch.state.rng import Draws
from holdfast.integrations.recorded_calls import is_newcomer
from holdfast.integrations.session_in_loop import Replay

SMALL = "small tensor"
SMALL_NUMEL = 64
UNSAVED = ("current_score", "_last_global_step_saved", "_last_checkpoint_saved")
"""Attributes of a ModelCheckpoint that its ``load_state_dict`` leaves out, although they decide when to save."""


def place_of(trainer: pl.Trainer, *, arrived: bool) -> dict[str, Any]:
    """Return the current position of the training.

    Args:
        arrived: True if a batch is about to be trained; False if a batch has just been trained.
    """
    states = {c.state_key: c.state_dict() for c in trainer.callbacks}
    savers = {
        c.state_key: {name: getattr(c, name) for name in UNSAVED}
        for c in trainer.callbacks
        if isinstance(c, ModelCheckpoint)
    }
    place = {
        "loops": trainer.fit_loop.state_dict(),
        "callbacks": {key: state for key, state in states.items() if state},
        "savers": savers,
        "metrics": dict(trainer.callback_metrics),
        "arrived": arrived,
    }
    made: dict[str, Any] = _plain(place)
    return made


def go_on(trainer: pl.Trainer, place: dict[str, Any]) -> None:
    """Move the trainer to the position ``place`` before the loops begin."""
    place = _made(place)
    if place["arrived"] or is_newcomer():
        trainer.fit_loop.load_state_dict(place["loops"])
    else:
        trainer.fit_loop.load_state_dict(_before_last_batch(place["loops"]))
        _skip_next_batch(trainer, place["loops"])
    trainer._logger_connector._callback_metrics.update(place.get("metrics", {}))
    for callback in trainer.callbacks:
        if callback.state_key in place["callbacks"]:
            callback.load_state_dict(place["callbacks"][callback.state_key])
        for name, value in place.get("savers", {}).get(callback.state_key, {}).items():
            setattr(callback, name, value)


def _before_last_batch(loops: dict[str, Any]) -> dict[str, Any]:
    """Return the loops' state from before the step's last batch."""
    loops = copy.deepcopy(loops)
    batches = loops["epoch_loop.batch_progress"]
    batches["is_last_batch"] = False
    for counts in (batches["total"], batches["current"]):
        counts.update(dict.fromkeys(counts, counts["completed"]))
    for counts in loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"].values():
        counts.update({name: count - 1 for name, count in counts.items()})
    return loops


def _skip_next_batch(trainer: pl.Trainer, loops: dict[str, Any]) -> None:
    """Replace the training of the next batch, which is already trained: set the loops to the state after the batch."""
    epoch_loop = trainer.fit_loop.epoch_loop

    def advance(fetcher: Any) -> None:
        del epoch_loop.advance  # restores Lightning's own method
        _set_loops(trainer, loops)
        epoch_loop.batch_progress.increment_completed()
        fetcher.fetched += 1
        fetcher.done = fetcher.length is not None and fetcher.fetched >= fetcher.length

    epoch_loop.advance = advance


def arrive(trainer: pl.Trainer, place: dict[str, Any]) -> None:
    """Set the counters of the loops when the first batch after :func:`go_on` is about to be trained."""
    if place.get("arrived"):
        _set_loops(trainer, _made(place["loops"]))


def _set_loops(trainer: pl.Trainer, loops: dict[str, Any]) -> None:
    """Set the state of the loops while they run."""
    trainer.fit_loop.load_state_dict(loops)
    trainer.fit_loop.restarting = trainer.fit_loop._loaded_from_state_dict = False


def _plain(value: Any) -> Any:
    """Return a copy of ``value`` in which small tensors are bytes."""
    if isinstance(value, Tensor) and 0 < value.numel() <= SMALL_NUMEL:
        flat = value.detach().cpu().reshape(-1).view(torch.uint8).numpy()
        return {
            SMALL: str(value.dtype).removeprefix("torch."),
            "shape": tuple(value.shape),
            "bytes": flat.tobytes(),
        }
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return {key: _plain(item) for key, item in value.items()} if type(value) is dict else copy.deepcopy(value)


def _made(value: Any) -> Any:
    """Return a copy of ``value`` in which bytes are small tensors again; the inverse of :func:`_plain`."""
    if type(value) in (list, tuple):
        return type(value)(map(_made, value))
    if type(value) is not dict:
        return copy.deepcopy(value)
    if SMALL not in value:
        return {key: _made(item) for key, item in value.items()}
    dtype = getattr(torch, value[SMALL])
    return torch.frombuffer(bytearray(value["bytes"]), dtype=dtype).reshape(value["shape"])


class PositionedLoader:
    """The training data of one loader, epoch after epoch. It begins at the batch that the loops have reached.

    If a trainer has several loaders, each is wrapped in its own object.
    """

    def __init__(self, loader: Any, trainer: pl.Trainer, seed: int, replay: Callable[[], Replay]) -> None:
        """Wrap ``loader``. ``replay`` returns the :class:`Replay` of this rank once the session is open."""
        self._rank = trainer.global_rank
        self._source: Source = make_source(loader, seed, Draws.same(self._rank))
        self._loop = trainer.fit_loop
        self._loader = loader
        self._replay = replay
        self._ended = -1  # the newest epoch in which a pass over this loader ended

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        # Read the epoch at the first batch, when Lightning has set it.
        epoch = self._loop.epoch_progress.current.processed
        skip, drawn = self._skip(epoch), self._replay().drawn
        self._source.become(Draws.of(self._replay().streams, self._rank))
        if self._is_alone():
            # The batch before ``skip`` is read only for the comparison.
            first = skip - 1 if drawn.expects(epoch, skip - 1) else skip
            for batch, data in enumerate(self._source.open(epoch, first), first):
                drawn.saw(epoch, batch, data, self._loader)
                if batch >= skip:
                    yield data
        else:
            yield from self._source.open(epoch, skip)
        self._ended = epoch

    def _is_alone(self) -> bool:
        """Return True if the trainer has only this loader.

        Its batches then have the same numbers as the loop's batches.
        """
        return len(self._loop._combined_loader.flattened) == 1

    def _skip(self, epoch: int) -> int:
        """Return the number of batches at the start of this pass over the loader that were already trained."""
        ready: int = self._loop.epoch_loop.batch_progress.current.ready
        combined = self._loop._combined_loader
        if self._is_alone() or combined._mode == "min_size":
            return ready
        length: int | None = sized_len(self._loader)
        if length is None or combined._mode not in ("max_size", "max_size_cycle"):
            raise UnsupportedError(
                f"several data loaders in mode {combined._mode}, or without a length",
                hint="a dict of DataLoaders over map-style datasets; CombinedLoader in another mode than 'sequential'",
            )
        if combined._mode == "max_size":
            return min(ready, length)
        # The shorter loaders begin again within an epoch.
        return 0 if self._ended == epoch else ready % length
