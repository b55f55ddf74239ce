"""The check that a process which continues the job in a loop has the inputs with which the job has begun that loop.

Theory: see ``loop_inputs.py``. The digests of the inputs are rank-local values, from the begin of the loop to its end.
A process that continues in the loop has run the code before the loop again, and compares the digests where it enters
the loop. If the job is at the end of an epoch, only the inputs are compared that no epoch sets. Ranks may have
different inputs (the assignments of their own samples), so each rank is compared with itself.

Invariant: all steps of a loop are made with the same inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from holdfast.errors import StepError
from holdfast.frameworks.common.optional_abilities import DescribesUpdates
from holdfast.runtime.worker.script_frames import values_of
from holdfast.session.variables.deciding_variables import VARIABLES_MAX, described
from holdfast.session.variables.loop_inputs import LoopInput, all_places, loop_inputs
from holdfast.session.variables.update_variables import UpdateVariables

log = logging.getLogger("holdfast")

KEY = "loop_inputs"
"""Key of the rank-local values for the digests of the inputs, by name."""


class InputValues:
    """The inputs of the loops of one rank.

    Args:
        source: the adapter; None: it cannot digest values, or nothing is checked.
        variables: the check of other variables, which knows the state of the session.
    """

    def __init__(self, source: DescribesUpdates | None, variables: UpdateVariables) -> None:
        self._source = source
        self._variables = variables
        self._searched: dict[tuple[str, int], tuple[LoopInput, ...]] = {}  # by the line of the loop
        self._digests: dict[str, int] = {}  # of the open loop
        self._outside: set[str] = set()  # the names in it that no epoch sets
        self._continues = False  # no loop has begun since the state was loaded

    def stand_at(self, local: Mapping[str, Any]) -> None:
        """Take over the digests from the rank-local values of the loaded state."""
        self._digests, self._continues = dict(local.get(KEY, {})), True

    def of_rank(self) -> dict[str, Any]:
        """Return the rank-local values of the open loop; empty: it has no inputs."""
        return {KEY: dict(self._digests)} if self._digests else {}

    def enters_loop(self, step: int, *, again: bool, follows: bool) -> None:
        """Take digests of the inputs of the loop that the script begins now.

        Args:
            step: the present step.
            again: the job has opened this loop before.
            follows: the job has opened the loop of the epoch before.

        Raises:
            StepError: an input has another value than before this process.
        """
        before, self._digests = self._digests, self._now()
        continues, self._continues = self._continues, False
        if not continues or not (again or follows):
            return
        comparable = self._digests.keys() if again else self._outside
        changed = [
            name for name in comparable if before.get(name, self._digests[name]) != self._digests[name]
        ]
        if changed:
            raise StepError(
                f"step {step}: the updates depend on {', '.join(changed[:VARIABLES_MAX])}, which the code before the "
                f"loop over steps sets ({described(all_places()[:1])}). This process continues the job, has run that "
                "code again, and has got another value",
                hint="compute such a variable where the epoch begins (before all epochs: where the job begins) alone, "
                "and keep it in session(state={...}): `if s.new_epoch: kept['targets'] = cluster(model)`. The same "
                "command then continues at this step; session(verify_block=0) leaves out this check",
            )
        if again:
            self._digests = {**before, **self._digests}

    def _now(self) -> dict[str, int]:
        source = self._source
        if source is None:
            return {}
        try:
            found = self._inputs()
            variables = self._variables.without_state(each.variable for each in found)
        except Exception as error:  # a defect of the search must not end a training, nor be hidden
            log.warning(
                "holdfast: variables that the code before the loop sets are not searched, so one that a new process "
                "computes from other weights is not noticed: please report %s: %s",
                type(error).__name__,
                error,
                exc_info=True,
            )
            return {}
        values = ((each.name, values_of([each.name], each.place).get(each.name)) for each in variables)
        digests = ((name, source.digest_of(value)) for name, value in values)
        known = {name: digest for name, digest in digests if digest is not None}
        self._outside = {each.variable.name for each in found if not each.of_turn} & known.keys()
        return known

    def _inputs(self) -> tuple[LoopInput, ...]:
        places = all_places()
        if not places:
            return ()
        if places[0] not in self._searched:
            self._searched[places[0]] = loop_inputs(places)
        return self._searched[places[0]]
