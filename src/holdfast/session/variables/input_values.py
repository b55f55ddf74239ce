"""The check of the inputs of a loop in a process that continues the job: they must be those with which the loop began.

Theory. The module ``loop_inputs.py`` defines the inputs of a loop. The digests of the inputs are rank-local values,
from the start of the loop to its end. A process that continues in the loop has run the code before the loop again. It
compares the digests when it enters the loop. If the job is at the end of an epoch, only the inputs that are set
outside of epochs are compared. Ranks may have different inputs (the cluster assignments of their own samples), so
each rank is compared with its own earlier values.

A user may change a setting on purpose. A setting may also be a step number from a checkpoint of the script. The
script would add it to the session's step number, and so count these steps twice. So a warning names each setting that
is a number and has changed.

Invariant: all steps of a loop are made with the same inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import ModuleType
from typing import Any, cast

from holdfast.errors import StepError
from holdfast.frameworks.common.optional_abilities import DescribesUpdates
from holdfast.runtime.worker.script_attributes import instance_of
from holdfast.runtime.worker.script_frames import as_written, owners_of, values_of
from holdfast.session.variables.data_flow import remembered_values
from holdfast.session.variables.deciding_variables import VARIABLES_MAX, PlacedVariable, all_places, described
from holdfast.session.variables.loop_inputs import InputOrigin, LoopInput, loop_inputs
from holdfast.session.variables.search_defects import warns_of_defects
from holdfast.session.variables.update_variables import UpdateVariables

log = logging.getLogger("holdfast")

KEY = "loop_inputs"
"""Key of the rank-local values for the digests of the inputs, by name."""
SETTINGS_KEY = "loop_settings"
"""Key of the rank-local values for the numbers among the settings, by name."""
LOOP_KEY = "loop_of_inputs"
"""Key of the rank-local values for the number of the loop to which the digests belong."""
SETTINGS_MAX = 100


class InputValues:
    """The inputs of the loops of one rank, and their comparison with those of the job.

    Args:
        source: the adapter; None if the adapter cannot digest values, or nothing is checked.
        variables: the check of the variables on which updates depend; it knows which variables are state of the
            session.
        warns: this rank logs the warnings about settings.
    """

    def __init__(self, source: DescribesUpdates | None, variables: UpdateVariables, *, warns: bool) -> None:
        self._source = source
        self._warns = warns
        self._variables = variables
        self._searched: dict[tuple[str, int], tuple[LoopInput, ...]] = {}  # by the line of the loop
        self._digests: dict[str, int] = {}  # of the open loop
        self._loop: int | None = None  # its number; None if it is not known
        self._outside: set[str] = set()  # the names in it that no epoch sets
        self._settings: dict[str, bool | int | float] = {}
        self._continues = False  # no loop has begun since the state was loaded

    def stand_at(self, local: Mapping[str, Any]) -> None:
        """Take over the digests from the rank-local values of the loaded state."""
        self._digests, self._settings = dict(local.get(KEY, {})), dict(local.get(SETTINGS_KEY, {}))
        self._loop, self._continues = local.get(LOOP_KEY), True

    def of_rank(self) -> dict[str, Any]:
        """Return the rank-local values for the open loop: digests of its inputs, and settings.

        The result is empty if there are none.
        """
        values: dict[str, dict[str, Any]] = {KEY: self._digests, SETTINGS_KEY: self._settings}
        found = {key: found for key, found in values.items() if found}
        return {**found, LOOP_KEY: self._loop} if found else {}

    def enters_loop(self, step: int, loop: int, *, opened: int, in_epoch: bool) -> None:
        """Take digests of the inputs of the loop that the script begins now.

        Args:
            step: the present step.
            loop: number of the loop.
            opened: number of the newest loop that the job has opened. The earlier process of this rank may have been
                lost ahead of this loop, after another rank has opened it.
            in_epoch: the loop belongs to an epoch after the first one.

        Raises:
            StepError: an input has another value than in the earlier process.
        """
        before, settings = self._digests, self._settings
        newest = opened if self._loop is None else self._loop
        again, follows = newest == loop, newest == loop - 1 and in_epoch
        self._loop = loop
        self._read()
        continues, self._continues = self._continues, False
        if not continues or not (again or follows):
            return
        self._compare_settings(settings)
        comparable = self._digests.keys() if again else self._outside
        changed = [
            name for name in comparable if before.get(name, self._digests[name]) != self._digests[name]
        ]
        if changed:
            named = ", ".join(map(as_written, changed[:VARIABLES_MAX]))
            raise StepError(
                f"step {step}: the updates depend on {named}, which the code before the "
                f"loop over steps sets ({described(all_places()[:1])}). This process continues the job, has run that "
                "code again, and has got another value",
                hint="compute such a variable where the epoch begins (before all epochs: where the job begins) alone, "
                "and keep it in session(state={...}): `if s.new_epoch: kept['targets'] = cluster(model)`. The same "
                "command then continues at this step; session(verify_block=0) leaves out this check",
            )
        if again:
            self._digests = {**before, **self._digests}

    def _compare_settings(self, before: Mapping[str, bool | int | float]) -> None:
        """Warn of settings that are numbers and had other values ``before``."""
        here = self._settings
        changed = [name for name, value in here.items() if before.get(name, value) != value]
        if changed and self._warns:
            log.warning(
                "holdfast: the updates depend on %s, until now on %s (%s). The session continues with the number of "
                "the step: a number that the script takes from a checkpoint of its own would count it twice",
                ", ".join(f"{as_written(name)} = {here[name]!r}" for name in changed[:VARIABLES_MAX]),
                ", ".join(f"{as_written(name)} = {before[name]!r}" for name in changed[:VARIABLES_MAX]),
                described(all_places()[:1]),
            )

    def _read(self) -> None:
        """Read the inputs and settings of the loop that begins."""
        self._digests, self._settings, self._outside = {}, {}, set()
        source = self._source
        if source is None:
            return
        found: dict[PlacedVariable, InputOrigin] = {}
        variables: list[PlacedVariable] = []
        unsearched = (
            "variables that the code before the loop sets are not searched, so one that a new process computes from "
            "other weights is not noticed"
        )
        with warns_of_defects(unsearched), remembered_values():
            found = {each.variable: each.origin for each in self._inputs()}
            variables = self._variables.without_state(found)
        for each in variables:
            value = values_of([each.name], each.place).get(each.name)
            if found[each] is InputOrigin.SETTING:
                if (
                    type(value) in (bool, int, float)
                    and len(self._settings) < SETTINGS_MAX
                    and _is_stored(each)
                ):
                    self._settings[each.name] = cast("bool | int | float", value)
                continue
            if (digest := source.digest_of(value)) is not None:
                self._digests[each.name] = digest
                if found[each] is InputOrigin.SESSION:
                    self._outside.add(each.name)

    def _inputs(self) -> tuple[LoopInput, ...]:
        places = all_places()
        if not places:
            return ()
        if places[0] not in self._searched:
            self._searched[places[0]] = loop_inputs(places)
        return self._searched[places[0]]


def _is_stored(variable: PlacedVariable) -> bool:
    """Return whether the value is stored in the variable itself: not a property, and not an attribute of a module."""
    *_, owner = ("", *owners_of(variable.name))
    if not owner:
        return True
    holder = values_of([owner], variable.place).get(owner)
    stored = not isinstance(holder, ModuleType) and variable.name.rpartition(".")[2] in instance_of(holder)
    return isinstance(holder, dict) or stored
