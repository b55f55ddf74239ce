"""Learning rate schedules that move an optimizer of the session and are not part of the session.

Theory. The position of a schedule is in no checkpoint if the session does not have the schedule. A process that joins
or resumes makes it again, at its first position, and then sets other learning rates. The session's state has the rates,
but not the position. All ranks of a resumed job begin with the same position, so no comparison of ranks shows the
difference. So torch's schedules are searched for in the process, and the position of each is compared from step to
step. A schedule that never moves is harmless.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from holdfast.frameworks.torch.state.state import TorchState
from holdfast.frameworks.torch.state.wrapper_reset import instances

DEPTH = 3  # containers and objects between a declared object and a schedule in it
_Position = tuple[object, object]


class UndeclaredSchedules:
    """The search for schedules of the session's optimizers that the session does not have.

    Args:
        state: state of the session.
    """

    def __init__(self, state: TorchState) -> None:
        self._state = state
        # By id of the schedule: weak reference, name of its optimizer, and position at the last comparison.
        self._seen: dict[int, tuple[weakref.ref[Any], str, _Position]] = {}

    def search(self) -> None:
        """Search the process for schedules. Schedules that are known keep their first position."""
        declared = set(_inside([*self._state.schedulers.values(), *self._state.extras.values()]))
        for schedule in instances("torch.optim.lr_scheduler", "LRScheduler"):
            name = self._optimizer_of(schedule)
            if name is not None and id(schedule) not in declared:
                known = self._seen.get(id(schedule))
                if known is None or known[0]() is not schedule:
                    self._seen[id(schedule)] = weakref.ref(schedule), name, _position(schedule)

    def moved(self) -> list[str]:
        """Return descriptions of the schedules that have moved since the search that found them."""
        found = [(each(), name, at) for each, name, at in self._seen.values()]
        return [
            f"the {type(schedule).__name__} of optimizer {name!r}"
            for schedule, name, at in found
            if schedule is not None and _position(schedule) != at
        ]

    def _optimizer_of(self, schedule: Any) -> str | None:
        groups = getattr(getattr(schedule, "optimizer", None), "param_groups", None)
        for name, held in self._state.optimizers.items():
            if groups is held.optimizer.param_groups:
                return name
        return None


def _position(schedule: Any) -> _Position:
    return getattr(schedule, "last_epoch", None), getattr(schedule, "_step_count", None)


def _inside(objects: Iterable[object], depth: int = DEPTH) -> Iterator[int]:
    """Yield the ids of the schedules among ``objects``, and of those in their containers and attributes."""
    for each in objects:
        if isinstance(each, LRScheduler):
            yield id(each)
        if not depth or isinstance(each, torch.Tensor | nn.Module | Optimizer):
            continue
        if isinstance(each, dict):
            yield from _inside(list(each.values()), depth - 1)
        elif isinstance(each, list | tuple):
            yield from _inside(each, depth - 1)
        else:
            yield from _inside(list(getattr(each, "__dict__", {}).values()), depth - 1)
