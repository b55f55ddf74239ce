"""The check for undeclared state: tensors of the script that change from step to step and are not part of the session.

Theory. A process that joins or resumes runs the script from its start, and then receives the state of the session. Any
other value that the script changes from step to step (an average of weights) is then wrong, and no error shows this. A
*look* is a search for tensors of the script that have changed since the look before. Looks come in threes, at
consecutive steps. A tensor that has changed at the second and at the third look is state, and is refused. A tensor that
has changed less often may be a copy that the script fills from the state (for an evaluation), so it causes a warning.

The first three looks are at the first steps, before a fault is likely. A learning rate may begin with 0, so that
nothing changes at these steps. Further threes begin 4, 16, 64, ... steps after the first look, so that their cost
becomes negligible.

A counter beside state of the session (``ema.updates`` beside ``ema.ema``) causes a warning, unless the source shows
that each step sets it before using it (``ema.updates = step.number``).

A schedule of learning rates that is not part of the session is refused at the next step after it has moved. Its
position is compared at each step, because most schedules move once in an epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Set

from holdfast.errors import UsageError
from holdfast.frameworks.common.optional_abilities import FindsUndeclaredState
from holdfast.runtime.worker.script_frames import variables_of_script
from holdfast.session.variables.data_flow import remembered_values
from holdfast.session.variables.deciding_variables import (
    places_in_script,
    renewed_containers,
    set_by_each_step,
)
from holdfast.session.variables.look_schedule import LOOKS, number_of_look
from holdfast.session.variables.search_defects import warns_of_defects

log = logging.getLogger("holdfast")

_EFFECT = "not part of the session, so a process that joins or resumes begins with other values of it"


class UndeclaredState:
    """The check of one session for undeclared state in the script's variables.

    Args:
        adapter: the framework. If it cannot find undeclared state, nothing is checked.
        on: if False, nothing is checked.
    """

    def __init__(self, adapter: object, *, on: bool) -> None:
        self._finder = adapter.finder() if on and isinstance(adapter, FindsUndeclaredState) else None
        self._first: int | None = None  # the step of the first look
        self._last = -1
        # Names of changed tensors, and of changed counters, for each look of the present three.
        self._changed: list[set[str]] = []
        self._counted: list[set[str]] = []
        self._told: set[str] = set()
        self._renewed: Set[str] | None = None

    def look(self, step: int) -> None:
        """Search the script's variables for changed tensors, if a search is due at the start of ``step``.

        Raises:
            UsageError: a tensor outside of the session has changed at consecutive steps, or a schedule has moved.
            StateError: the state of the session holds a value that cannot be saved.
        """
        if self._finder is None or step <= self._last:
            return
        self._refuse_schedules(step)
        if self._first is None:
            self._first = step
        since = step - self._first
        number = number_of_look(since)
        if number is None:
            return
        self._last = step
        # A save may come after hours, and a script may have added an object since the session began.
        self._finder.require_savable()
        if self._renewed is None or since == 1:
            # The first look is ahead of the first update, which makes some variables. Later, a search of the source
            # would find the same containers again, in seconds for a large script.
            self._renewed = _renewed()
        changed = set(self._finder.changed(variables_of_script(), self._renewed))
        self._changed = [*([] if number == 0 else self._changed), changed]
        self._counted = [*([] if number == 0 else self._counted), set(self._finder.counters)]
        if number == LOOKS - 1:
            self._judge(step, warns=since >= LOOKS)

    def _refuse_schedules(self, step: int) -> None:
        """Raise UsageError if a schedule outside of the session has moved. One move is enough: a schedule is state."""
        moved = [] if self._finder is None else self._finder.moved()
        if moved:
            raise UsageError(
                f"step {step}: {moved[0]} has moved and is {_EFFECT}",
                hint="session(scheduler=...) on all ranks, also with a list or a dict, and begin without the "
                "checkpoints of this run, which lack it; verify_block=0 leaves out this check",
            )

    def _judge(self, step: int, *, warns: bool) -> None:
        refused = sorted(set.intersection(*self._changed[1:]))
        if refused:
            raise UsageError(
                f"step {step}: {refused[0]} changes from step to step and is {_EFFECT}",
                hint="give it to the session on all ranks, state={'name': object}, but a network with an optimizer as "
                "model={'model': model, 'name': network} with all optimizers (and holdfast.torch.declare() if each "
                "rank has other rows), and begin without the checkpoints of this run, which lack it; verify_block=0 "
                "leaves out this check",
            )
        counters = sorted(set.union(*self._counted[1:]) - self._told - _set_by_each_step())
        if counters:
            self._told.update(counters)
            log.warning(
                "holdfast: step %d: %s counts beside state of the session, and a process that joins or resumes counts "
                "from the start: also keep the number in state={'name': {'count': 0}} and set it from there, or "
                "compute it from step.number",
                step,
                ", ".join(counters),
            )
        names = sorted(set.union(*self._changed) - self._told) if warns else []
        if names:
            self._told.update(names)
            log.warning(
                "holdfast: step %d: %s has changed and is %s: if the next steps use that value, give "
                "it to the session, state={'name': object}",
                step,
                ", ".join(names),
                _EFFECT,
            )


def _set_by_each_step() -> Set[str]:
    """Return the variables that each step sets from other values before it uses them."""
    found: Set[str] = frozenset()
    with warns_of_defects("counters that each step sets are named"), remembered_values():
        found = set_by_each_step(places_in_script())
    return found


def _renewed() -> Set[str]:
    """Return the containers of the script that each step replaces by a new one, computed from the old one."""
    found: Set[str] = frozenset()
    unsearched = "averages in containers that each step replaces are not searched"
    with warns_of_defects(unsearched), remembered_values():
        found = renewed_containers(places_in_script())
    return found
