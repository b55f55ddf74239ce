"""Learning rate schedules that move an optimizer of the session and are not part of the session.

Theory. The position of a schedule is in no checkpoint if the session does not have the schedule. A process that joins
or resumes makes it again, at its first position, and then sets other learning rates. The session's state has the rates,
but not the position. All ranks of a resumed job begin with the same position, so no comparison of ranks shows the
difference. So torch's schedules are searched for in the process, and the position of each is compared from step to
step. A schedule that never moves is harmless.

Libraries have schedules that are no ``LRScheduler`` (mmengine, ignite, pytorch_warmup). Such a class is known by its
name, and by ``state_dict``; the plain values in that dict are the position. A class of the script is not searched here:
its source shows what it keeps (``session/variables``).
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from holdfast.frameworks.torch.state.state import TorchState
from holdfast.frameworks.torch.state.wrapper_reset import instances_of
from holdfast.runtime.worker.script_attributes import instance_of
from holdfast.runtime.worker.script_frames import LIBRARIES

DEPTH = 3  # containers and objects between a declared object and a schedule in it
_NAMES = re.compile("schedul|warmup|anneal", re.IGNORECASE)
_PLAIN = (bool, int, float, str)
_Position = tuple[object, ...]


class UndeclaredSchedules:
    """The search for schedules of the session's optimizers that the session does not have.

    Args:
        state: state of the session.
    """

    def __init__(self, state: TorchState) -> None:
        self._state = state
        # By id of the schedule: weak reference, name of its optimizer, and position at the last comparison.
        self._seen: dict[int, tuple[weakref.ref[Any], str, _Position]] = {}
        self._modules: set[str] = set()  # the modules that were searched for classes of schedules
        self._kinds: set[type] = {LRScheduler}

    def search(self) -> None:
        """Search the process for schedules. Schedules that are known keep their first position."""
        declared = set(_inside([*self._state.schedulers.values(), *self._state.extras.values()]))
        new = sys.modules.keys() - self._modules
        self._modules |= new
        self._kinds |= {kind for name in new for kind in _kinds_in(name)}
        for schedule in instances_of(self._kinds):
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
        """Return the name of the optimizer that a schedule holds, also inside of a library's wrapper or as its groups.

        The result is None if it holds none of the session. A wrapper around a schedule of torch holds none.
        """
        holds = [each for each in instance_of(schedule).values() if not isinstance(each, LRScheduler)]
        ids = {id(each) for each in (*holds, *(instance_of(each).get("optimizer") for each in holds))}
        for name, held in self._state.optimizers.items():
            if ids & {id(held.optimizer), id(held.optimizer.param_groups)}:
                return name
        return None


def _position(schedule: Any) -> _Position:
    if isinstance(schedule, LRScheduler):
        return getattr(schedule, "last_epoch", None), getattr(schedule, "_step_count", None)
    return tuple((key, value) for key, value in schedule.state_dict().items() if type(value) in _PLAIN)


def _kinds_in(name: str) -> list[type]:
    """Return the classes with a state, named like a schedule, in a module of a library other than torch."""
    variables = instance_of(sys.modules.get(name))  # not getattr(): a lazy module answers it with an import
    file = variables.get("__file__")
    if (
        not isinstance(file, str)
        or not file.startswith(LIBRARIES)
        or name.startswith(("torch.", "holdfast."))
    ):
        return []
    # Not isinstance(): a proxy (absl's FLAGS) says that it is a class.
    kinds = [cast("type", each) for each in list(variables.values()) if issubclass(type(each), type)]
    return [
        each
        for each in kinds
        if _NAMES.search(each.__name__)
        and not each.__module__.startswith("torch.")
        and callable(getattr(each, "load_state_dict", None))
    ]


def _inside(objects: Iterable[object], depth: int = DEPTH) -> Iterator[int]:
    """Yield the ids of ``objects``, and of what is in their containers and attributes."""
    for each in objects:
        yield id(each)
        if not depth or isinstance(each, torch.Tensor | nn.Module | Optimizer):
            continue
        if isinstance(each, dict):
            yield from _inside(list(each.values()), depth - 1)
        elif isinstance(each, list | tuple):
            yield from _inside(each, depth - 1)
        else:
            yield from _inside(list(getattr(each, "__dict__", {}).values()), depth - 1)
