"""Hyperparameters as the script sets them, compared with those set by the script that wrote the checkpoint.

Theory. A load restores the learning rate, the weight decay and the schedule: a schedule changes them, and without them
the results would differ in bits. So a value that the user changes in the script between two starts would silently have
no effect. The saved learning rate cannot be compared with the script's, because the schedule has changed it. So each
checkpoint also holds the values that its script had set when the session was made. A load compares them with the values
that this script sets, and reports every difference with both values. The checkpoint's value stays in use, unless
``session(override=[...])`` names it.

Invariants:
1. If the same script wrote the checkpoint, nothing is reported and nothing is taken from the script, however far the
   schedule has advanced.
2. An overridden value counts as set by the script from then on: the next start does not override it again.

A ``LambdaLR`` saves no function. After a load its function gives the rate for the saved step again, and a rate that
differs from the saved one is reported. The usual causes are another number of steps, and a first step that the script
takes from a checkpoint of its own: the saved step already contains that number.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from holdfast.errors import CheckpointMismatch, UsageError
from holdfast.frameworks.common.state_tree import Plain
from holdfast.frameworks.torch.state.optimizer_state import hyperparameters
from holdfast.text import closest

log = logging.getLogger("holdfast")

HOW_IT_RUNS = frozenset({"foreign", "fused", "capturable", "differentiable"})
"""Settings of parameter groups that choose an implementation and do not change the result."""

FOLLOWS = frozenset({"base_lrs", "last_epoch"})
"""Values of schedules that are computed from the optimizer and the step; they are not compared."""

TOLD_MAX = 10


class HyperparameterChange(NamedTuple):
    """A value that this script sets differently from the script that wrote the checkpoint.

    ``owner`` is ``optimizer.NAME`` or ``scheduler.NAME``, ``then`` the checkpoint's value, ``now`` the script's.
    """

    owner: str
    name: str
    then: Plain
    now: Plain

    def __str__(self) -> str:
        kind, _, which = self.owner.partition(".")
        then, now = (v["groups"] if isinstance(v, dict) else v for v in (self.then, self.now))
        return f"{self.name} of {kind} {which!r}: {then} in the checkpoint, {now} in this script"


class Declared:
    """The values of optimizers and schedules that the script has set, read before anything is loaded.

    Attributes:
        override: names of values that a load takes from the script.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer], schedulers: Mapping[str, Any]) -> None:
        self.override: frozenset[str] = frozenset()
        self._optimizers = optimizers
        self._schedulers = {name: _inner(scheduler) for name, scheduler in schedulers.items()}
        self._now: dict[str, dict[str, Plain]] = {
            **{f"optimizer.{name}": _of_groups(optimizer) for name, optimizer in optimizers.items()},
            **{f"scheduler.{name}": _of_schedule(each) for name, each in self._schedulers.items()},
        }
        self._values = self._now

    def values(self) -> dict[str, Plain]:
        """Return the script's values, to be saved in a checkpoint, by ``optimizer.NAME`` or ``scheduler.NAME``."""
        return {owner: dict(values) for owner, values in self._values.items()}

    def choose(self, override: Collection[str]) -> None:
        """Choose the values that a load takes from the script.

        Args:
            override: their names, for example ``lr``.

        Raises:
            UsageError: no optimizer or schedule has such a value.
        """
        known = sorted({name for values in self._now.values() for name in values if name != "class"})
        for name in override:
            if name not in known:
                meant = closest(name, known)
                raise UsageError(
                    f"session(override=[{name!r}]): no optimizer or schedule of this session has that",
                    hint=f"did you mean {meant!r}?" if meant else f"known are {', '.join(known)}",
                )
        self.override = frozenset(override)

    def compare(self, saved: Plain, *, shown: bool) -> Callable[[], None]:
        """Compare the script's values with the checkpoint's; log the differences if ``shown`` (True on one rank).

        Args:
            saved: the result of :meth:`values` in the checkpoint, or None in an old checkpoint.

        Returns:
            A function to be called after the load. It reports functions of schedules that give other rates, and sets
            the overridden values.

        Raises:
            CheckpointMismatch: the checkpoint has a schedule of another kind.
        """
        found = list(self._differences(saved))
        for each in found:
            if each.name == "class" and self._is_another_kind(each, saved):
                raise CheckpointMismatch(
                    f"{each}: its state means something else there",
                    hint="give the schedule that wrote the checkpoint; a new one on old weights: resume='never' and "
                    "holdfast.load(path, model)",
                )
        taken = [each for each in found if each.name in self.override]
        for number, each in enumerate(found if shown else ()):
            if number < TOLD_MAX:
                self._tell(each)

        def finish() -> None:
            for name, schedule in self._schedulers.items() if shown else ():
                _report_function(name, schedule)
            values = {owner: dict(known) for owner, known in self._now.items()}
            for each in found:
                if each not in taken:
                    values[each.owner][each.name] = each.then
            self._values = values
            for each in taken:
                self._take(each)

        return finish

    def _tell(self, each: HyperparameterChange) -> None:
        if each.name in self.override:
            log.info("holdfast: %s: the script's is used (override)", each)
            return
        advice = "" if each.name == "class" else f"; session(override=[{each.name!r}]) takes the script's"
        log.warning("holdfast: %s: the checkpoint's is used%s", each, advice)

    def _differences(self, saved: Plain) -> Iterator[HyperparameterChange]:
        for owner, values in self._now.items():
            known = saved.get(owner) if isinstance(saved, dict) else None
            for name, now in values.items():
                if isinstance(known, dict) and name in known and known[name] != now:
                    yield HyperparameterChange(owner, name, known[name], now)

    def _is_another_kind(self, each: HyperparameterChange, saved: Plain) -> bool:
        """Return True if the schedule in the checkpoint has values of other names than the script's schedule.

        Another class with the same names is accepted.
        """
        known = saved.get(each.owner) if isinstance(saved, dict) else None
        return isinstance(known, dict) and known.keys() != self._now[each.owner].keys()

    def _take(self, each: HyperparameterChange) -> None:
        kind, _, which = each.owner.partition(".")
        if kind == "scheduler":
            value = each.now
            setattr(self._schedulers[which], each.name, list(value) if isinstance(value, list) else value)
            return
        optimizer = self._optimizers[which]
        count = len(optimizer.param_groups)
        for index, (then, now) in enumerate(
            zip(_each(each.then, count), _each(each.now, count), strict=True)
        ):
            if each.name == "lr":
                self._take_rate(optimizer, index, then, now)
            else:
                group = optimizer.param_groups[index]
                group[each.name] = tuple(now) if isinstance(group.get(each.name), tuple) else now

    def _take_rate(self, optimizer: Optimizer, index: int, then: Any, now: Any) -> None:
        """Set the learning rate of a parameter group as if the job had begun with the script's present value.

        The loaded rate is ``then`` times a factor, by which the schedule has changed it so far. The new rate is ``now``
        times the same factor.

        Args:
            optimizer: the optimizer, with its loaded learning rates.
            index: index of the parameter group.
            then, now: initial rate in the checkpoint, and the rate that the present script has set.
        """
        group = optimizer.param_groups[index]
        before = float(group["lr"])
        rate = now if before == then or not then else before * (now / then)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
        if "initial_lr" in group:
            group["initial_lr"] = now
        for schedule in self._schedulers.values():
            if getattr(schedule, "optimizer", None) is optimizer and hasattr(schedule, "base_lrs"):
                schedule.base_lrs[index] = now


def _of_groups(optimizer: Optimizer) -> dict[str, Plain]:
    """Return each setting of the parameter groups: one value if all groups agree, otherwise a list by group."""
    groups = hyperparameters(optimizer)
    found: dict[str, Plain] = {}
    for name in groups[0]:
        if name in HOW_IT_RUNS or name == "initial_lr":
            continue
        key = "initial_lr" if name == "lr" and all("initial_lr" in group for group in groups) else name
        values = [_plain(group.get(key)) for group in groups]
        if all(value is not _OTHER for value in values):
            found[name] = values[0] if all(value == values[0] for value in values) else {"groups": values}
    return found


def _of_schedule(schedule: Any) -> dict[str, Plain]:
    """Return the class name and the values of a schedule, without private values (``_name``) and computed ones."""
    found: dict[str, Plain] = {"class": type(schedule).__name__}
    state = schedule.state_dict()
    for name, value in state.items() if isinstance(state, Mapping) else ():
        plain = _plain(value)
        if isinstance(name, str) and not name.startswith("_") and name not in FOLLOWS and plain is not _OTHER:
            found[name] = plain
    return found


def _report_function(name: str, schedule: Any) -> None:
    """Warn if the function of a loaded ``LambdaLR`` gives another rate for the loaded step than the checkpoint has."""
    if not isinstance(schedule, LambdaLR) or type(schedule).get_lr is not LambdaLR.get_lr:
        return
    functions = schedule.lr_lambdas
    if schedule.last_epoch < 0 or not all(isinstance(_called(each), FunctionType) for each in functions):
        return  # an object may count its calls
    with suppress(Exception):  # a function may need variables that the script sets later
        saved = [float(rate) for rate in schedule.get_last_lr()]
        number = schedule.last_epoch
        rates = [
            float(base) * function(number)
            for base, function in zip(schedule.base_lrs, functions, strict=True)
        ]
        if all(map(_is_close, rates, saved)):
            return
        log.warning(
            "holdfast: the function of scheduler %r gives the learning rate %s at step %d, where the checkpoint has "
            "%s. Later steps use this script's function. A function that adds a step from a checkpoint of the script's "
            "own counts these steps twice: remove the code that loads it",
            name, _shown(rates), number, _shown(saved),
        )  # fmt: skip


def _called(function: Any) -> Any:
    """Return the function inside of ``functools.partial``."""
    return function.func if isinstance(function, partial) else function


def _is_close(rate: float, saved: float) -> bool:
    """Return True if two rates agree up to the rounding of another machine, or of a rate in a tensor."""
    return math.isclose(rate, saved, rel_tol=1e-6, abs_tol=1e-30)


def _shown(rates: list[float]) -> str:
    """Return the rates of parameter groups in words: one if all agree."""
    return ", ".join(f"{rate:.6g}" for rate in (rates[:1] if len(set(rates)) == 1 else rates[:TOLD_MAX]))


_OTHER = object()


def _plain(value: Any) -> Any:
    """Return ``value`` in a form that can be compared and saved; if it has no such form, the marker ``_OTHER``."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return _OTHER if any(item is _OTHER for item in items) else items
    return value if value is None or isinstance(value, bool | int | float | str) else _OTHER


def _each(value: Plain, count: int) -> list[Any]:
    """Return one value per parameter group; ``value`` is a list by group (``groups``), or one value for all groups."""
    if isinstance(value, dict) and isinstance(groups := value.get("groups"), list) and len(groups) == count:
        return groups
    return [value] * count


def _inner(scheduler: Any) -> Any:
    """Return the schedule inside accelerate's wrapper."""
    while type(scheduler).__name__ == "AcceleratedScheduler":
        scheduler = scheduler.scheduler
    return scheduler
