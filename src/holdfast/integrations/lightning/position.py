"""Where a Lightning training is, as plain values and tensors: its loops, its callbacks, and what they look at.

Theory. A place is taken when a step ends, and once more when the next one begins, if a validation or the end of an
epoch lies between: a newcomer is to begin after what all others have done. Lightning's own idea of a restart knows
places at the end of a batch; at one before a batch it counts that batch, and the validation before it, twice. So
whoever went on from there puts the counters right when it has arrived. At one after a batch it leaves out what follows,
a validation or the end of the epoch: whoever restarts there is sent back by one batch, and what stands for training it
puts the counters right (a newcomer is not: the others have done all that). Scores and the like, small tensors that a
validation replaces under other names, become plain values: the layout of the state stays as it is.
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
from holdfast.integrations.drawn_batches import DrawnBatches
from holdfast.integrations.recorded_calls import is_newcomer

SMALL = "small tensor"
SMALL_NUMEL = 64
UNSAVED = ("current_score", "_last_global_step_saved", "_last_checkpoint_saved")
"""Of a ModelCheckpoint: it does not load them, and with them it decides whether all ranks save now."""


def place_of(trainer: pl.Trainer, *, arrived: bool) -> dict[str, Any]:
    """The place now; ``arrived``: a batch is about to be trained, instead of just having been."""
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
    """Before the loops begin: go to ``place``."""
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
    """The loops' state as if the step's last batch were still to come."""
    loops = copy.deepcopy(loops)
    batches = loops["epoch_loop.batch_progress"]
    batches["is_last_batch"] = False
    for counts in (batches["total"], batches["current"]):
        counts.update(dict.fromkeys(counts, counts["completed"]))
    for counts in loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"].values():
        counts.update({name: count - 1 for name, count in counts.items()})
    return loops


def _skip_next_batch(trainer: pl.Trainer, loops: dict[str, Any]) -> None:
    """The next batch was trained: what Lightning does after it is done, and its loops are at ``loops``."""
    epoch_loop = trainer.fit_loop.epoch_loop

    def advance(fetcher: Any) -> None:
        del epoch_loop.advance  # Lightning's own again
        _set_loops(trainer, loops)
        epoch_loop.batch_progress.increment_completed()
        fetcher.fetched += 1
        fetcher.done = fetcher.length is not None and fetcher.fetched >= fetcher.length

    epoch_loop.advance = advance


def arrive(trainer: pl.Trainer, place: dict[str, Any]) -> None:
    """The first batch after :func:`go_on` is about to be trained."""
    if place.get("arrived"):
        _set_loops(trainer, _made(place["loops"]))


def _set_loops(trainer: pl.Trainer, loops: dict[str, Any]) -> None:
    """In the running loops."""
    trainer.fit_loop.load_state_dict(loops)
    trainer.fit_loop.restarting = trainer.fit_loop._loaded_from_state_dict = False


def _plain(value: Any) -> Any:
    """A copy, small tensors as bytes."""
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
    """Inverse of :func:`_plain`; a copy."""
    if type(value) in (list, tuple):
        return type(value)(map(_made, value))
    if type(value) is not dict:
        return copy.deepcopy(value)
    if SMALL not in value:
        return {key: _made(item) for key, item in value.items()}
    dtype = getattr(torch, value[SMALL])
    return torch.frombuffer(bytearray(value["bytes"]), dtype=dtype).reshape(value["shape"])


class PositionedLoader:
    """The training data from where the loops are, epoch after epoch; of several loaders, one of them."""

    def __init__(
        self, loader: Any, trainer: pl.Trainer, seed: int, drawn: Callable[[], DrawnBatches]
    ) -> None:
        """``drawn``: asked at the first batch, when the session is open."""
        self._source: Source = make_source(loader, seed, trainer.global_rank)
        self._loop = trainer.fit_loop
        self._loader = loader
        self._drawn = drawn
        self._ended = -1  # the epoch in which a pass of ours ended

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        # Asked at the first batch: by then Lightning knows in which epoch it starts.
        epoch = self._loop.epoch_progress.current.processed
        skip, drawn = self._skip(epoch), self._drawn()
        if self._is_alone():
            # The batch before is read for the comparison alone.
            first = skip - 1 if drawn.expects(epoch, skip - 1) else skip
            for batch, data in enumerate(self._source.open(epoch, first), first):
                drawn.saw(epoch, batch, data, self._loader)
                if batch >= skip:
                    yield data
        else:
            yield from self._source.open(epoch, skip)
        self._ended = epoch

    def _is_alone(self) -> bool:
        """No other loader gives a part of each batch: its batches have the numbers of the loop's."""
        return len(self._loop._combined_loader.flattened) == 1

    def _skip(self, epoch: int) -> int:
        """How many batches of this pass were trained."""
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
        # The shorter ones begin again within an epoch.
        return 0 if self._ended == epoch else ready % length
