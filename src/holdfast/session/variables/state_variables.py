"""The variables in the user's state on which the updates depend, and their values for the vote.

Theory. The session saves ``state=`` once, and a process that joins gets it from another rank. So all ranks must have
the same values. A mean of the rank's own losses in ``state=`` gives no error: the replacement of a lost rank continues
with the mean of its peer, and so makes another update than the lost rank would have made. The session warns of items
that differ (``replica_state_check.py``). If an update depends on such a value, the weights of the job would depend on
the fault, so all ranks end before the update. The values of the vote show a difference in the step in which it begins.

Only plain values, containers of them, small tensors on the CPU, and meters of libraries are compared.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.frameworks.common.optional_abilities import DescribesUpdates
from holdfast.session.variables.deciding_variables import Places, described
from holdfast.session.variables.library_meters import meter_text
from holdfast.session.variables.plain_values import (
    identified_values,
    plain_values,
    present_values,
    shown,
)
from holdfast.session.variables.variable_history import Names, PlainValue

HINT = (
    "keep a value of one rank in s.own (plain values) or by s.attach(NAME, object), a tensor of one rank by "
    "holdfast.torch.declare() as a part of a larger one, or make it equal on all ranks before the update (all_reduce, "
    "broadcast); session(verify_block=0) leaves out this check"
)


class StateVariables:
    """The variables in ``state=`` on which the updates of one rank depend.

    Args:
        source: the adapter; None if it cannot describe updates.
    """

    def __init__(self, source: DescribesUpdates | None) -> None:
        self._source = source
        self._names: dict[str, tuple[tuple[str, int], Places]] = {}
        self._values: Mapping[str, PlainValue] = {}  # at the first update of the open block

    def add(self, names: Names) -> None:
        """Add variables with their places."""
        self._names.update(names)

    def opens(self) -> None:
        """Record that a block begins."""
        self._values = {}

    def look(self) -> None:
        """Read the values at the first update of a block."""
        if self._names and not self._values:
            found = present_values(self._names)
            texts = {name: meter_text(value, self._source) for name, value in found.items()}
            meters = {name: text for name, text in texts.items() if text is not None}
            self._values = {**plain_values(found, self._source), **meters}

    def number(self) -> int:
        """Return a number from 1 to STEP_MODULUS - 1 that identifies the values in the open block.

        The result is 0 if there are no values.
        """
        return identified_values(self._values)

    def described(self) -> str:
        """Return a text with the variables, their values on this rank, and their places in the script."""
        where = "".join(sorted({f" ({described(places)})" for _, places in self._names.values()}))
        return f"{shown(self._values)}{where}"
