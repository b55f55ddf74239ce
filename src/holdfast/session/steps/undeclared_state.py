"""The check for state of the script that is not part of the session.

Theory. A process that joins or resumes begins with what the script makes at its start, and receives the state of the
session. What else a script changes from step to step (an average of weights) is then wrong, and no error shows it. The
framework finds the tensors of the script that have changed between two looks. The first looks are at three steps in a
row, before a fault is likely. A value that differs at both of the later ones is state, and is refused. A change that is
seen only afterwards may be a copy that the script fills from the state (for an evaluation), so it is a warning. Further
looks are 4, 8, 16, ... steps after the first one, so that their cost vanishes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from holdfast.errors import UsageError
from holdfast.frameworks.common.optional_abilities import FindsUndeclaredState
from holdfast.session.steps.script_frames import variables_of_script

log = logging.getLogger("holdfast")

SECOND = 2  # steps between the first look and the last one that refuses
_EFFECT = "not part of the session, so a process that joins or resumes begins with other values of it"


class UndeclaredState:
    """The looks of one session at the script's variables.

    Args:
        adapter: the framework. If it cannot find such state, nothing is checked.
        on: whether to look at all.
    """

    def __init__(self, adapter: object, *, on: bool) -> None:
        self._finder = adapter.finder() if on and isinstance(adapter, FindsUndeclaredState) else None
        self._first: int | None = None  # the step of the first look
        self._last = -1
        self._changed: set[str] = set()  # names with a change at the second look
        self._told: set[str] = set()

    def look(self, step: int) -> None:
        """Look at the script's variables if that is due at the begin of ``step``.

        Raises:
            UsageError: a value has changed in each of the first steps.
        """
        if self._finder is None or step <= self._last:
            return
        if self._first is None:
            self._first = step
        since = step - self._first
        if since & (since - 1):  # neither 0 nor a power of two
            return
        self._last = step
        changed = self._finder.changed(variables_of_script())
        if since > SECOND:
            self._tell(step, [name for name in changed if name not in self._told])
        for name in changed:
            if since == SECOND and name in self._changed:
                raise UsageError(
                    f"step {step}: {name} changes from step to step and is {_EFFECT}",
                    hint="session(state={'name': object}), on all ranks, and begin without the checkpoints of this "
                    "run, which lack it; session(verify_block=0) leaves out this check",
                )
        self._changed = set(changed)

    def _tell(self, step: int, names: Sequence[str]) -> None:
        if names:
            self._told.update(names)
            log.warning(
                "holdfast: step %d: %s has changed and is %s: if the next steps use that value, write "
                "session(state={...})",
                step,
                ", ".join(names),
                _EFFECT,
            )
