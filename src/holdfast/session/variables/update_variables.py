"""The variables of a script on which its updates depend, and the check that they continue with the job.

Theory. A script may decide by variables of its own about an update, a learning rate or a part of the loss. A process
that joins or continues a job runs the script from its top, and begins with the initial values of these variables. A
variable in the loss changes the gradients of all ranks alike, because the gradients are summed. So no comparison of
the state shows it. The source is searched for such variables, and their values are compared:

- between the ranks, when a replacement votes for the first time (``equal_updates.py``);
- with the state, in a process that continues the job. This also covers a job in which all ranks are replacements,
  because ranks may be lost one after the other, before any vote. The state holds the values at the first and at the
  newest step of the job (``variable_history.py``);
- with the rank-local values, if the ranks have different values. The rank-local values hold the values of each rank
  at the same two steps. Arrays that only some steps fill are often the data of one rank, so they are only compared in
  this way. The same applies to tables that grow with the longest batch (``growing_tables.py``), and to a variable that
  has an object where it was None before (``teacher = None``). Only the presence of such an object is compared;
- with the rank-local values, at the end of the first step that has changed a variable. At the update of that step the
  variable still has its initial value.

A warning names the variables when they change for the first time, before any fault. Another warning names variables
that decide whether a file is saved (the best result so far): a new process would replace the file of the best result.
The weights do not depend on these variables, so no script is refused for them.

Invariant: after the values have differed between ranks, each rank is compared only with its own earlier values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple, NoReturn

import numpy as np

from holdfast.errors import StepError
from holdfast.frameworks.common.optional_abilities import DescribesUpdates
from holdfast.runtime.worker.script_attributes import instance_of
from holdfast.runtime.worker.script_frames import (
    as_written,
    owners_of,
    runs_at,
    values_of,
    variables_of_script,
)
from holdfast.session.variables.cut_changes import CutChange, cut_change
from holdfast.session.variables.data_flow import remembered_values
from holdfast.session.variables.deciding_variables import (
    VARIABLES_MAX,
    PlacedVariable,
    Places,
    described,
    file_variables,
    placed_variables,
    places_in_script,
    stores,
)
from holdfast.session.variables.growing_tables import growing_tables
from holdfast.session.variables.kept_attributes import KeptAttributes, kept_by, read_by_property
from holdfast.session.variables.library_meters import meter_states
from holdfast.session.variables.loop_inputs import unwritten_variables
from holdfast.session.variables.module_variables import NO_MODULES, module_variables
from holdfast.session.variables.plain_values import (
    CONTAINERS,
    GENERATOR,
    as_number,
    identified,
    identified_values,
    plain_values,
    present_values,
    shown,
)
from holdfast.session.variables.rare_digests import RareDigests
from holdfast.session.variables.reported_variables import listed, reported_variables
from holdfast.session.variables.search_defects import warns_of_defects
from holdfast.session.variables.set_once import set_once
from holdfast.session.variables.variable_history import Names, PlainValue, VariableHistory, is_array, is_same

log = logging.getLogger("holdfast")

KEY = "update_variables"
"""Key, in the session's plain values, of variables on which the updates depend."""

_FILES = "whether a file is saved depends on"
_MODULES = "the results of a module of a library may depend on"

OBJECT = "an object"
"""The text for a value that is no plain one, of a variable that has had a plain one (None)."""
_READ_AT_START = ("builtins", "collections", "numpy", "torch", "torch.utils.data.dataloader")
ITEMS_MAX = 4
"""Number of items of a container that are looked at, to tell whether it is state of the session."""
HINT_OF_RANK = (
    "keep a value of one rank in s.own or by s.attach(NAME, object) (numbers and lists in its attributes), or compute "
    "it from step.number"
)
HINT_OF_ANY = (
    "keep what decides about an update in session(state={...}), or in s.own if it is of one rank, or compute it from "
    "step.number"
)
HINT = (
    "keep what decides about an update in session(state={...}) (a dict that the code changes after "
    "`if step.committed:`), as a buffer if it is an attribute of a module (register_buffer), by s.attach(NAME, object) "
    "if it is of one rank (a sum of losses), or compute it from step.number"
)
SEVERAL_LOADERS = "draw the batches of several loaders by s.steps(loader, second). Otherwise "


def hint_for(values: Iterable[PlainValue], hint: str = HINT) -> str:
    """Return ``hint``, after the way to draw from several loaders if one of ``values`` is a position in batches."""
    is_drawn = any(isinstance(value, str) and value.startswith(GENERATOR) for value in values)
    return f"{SEVERAL_LOADERS}{hint}" if is_drawn else hint


class FoundVariables(NamedTuple):
    """The result of a search.

    Attributes:
        in_state: the variables in ``state=`` on which the updates depend, with their places.
        cut: a change of the training that a lost rank would cut off; None if there is none.
    """

    in_state: Names
    cut: CutChange | None


class UpdateVariables:
    """The check of the variables on which one rank's updates depend.

    Args:
        on: if False, no variables are searched, so nothing is checked.
        source: the adapter; None if the adapter cannot describe updates.
        warns: this rank logs the warnings about the variables.

    Attributes:
        set_once: the variables that the script sets only once, each with a flag. The flag is True if a block sets the
            variable from the result of a collective.
        mixed: True if, in a vote that has passed, ranks had different values.
        met: True if the values of this process have been compared with those of other ranks.
    """

    def __init__(self, source: DescribesUpdates | None, *, on: bool, warns: bool) -> None:
        self._on = on
        self._source = source
        self._warns = warns
        self._names: dict[str, tuple[tuple[str, int], Places]] = {}
        # Variables for which no script is refused, by the begin of their warning.
        self._only_warned: dict[str, dict[str, tuple[tuple[str, int], Places]]] = {_FILES: {}, _MODULES: {}}
        self._partly: set[str] = set()  # some steps write them first (`PlacedVariable.partly`)
        self._began: dict[str, PlainValue] = {}  # the first value of each variable in this process
        self._told: set[str] = set()
        # Objects whose attributes the session keeps for each rank.
        self._left_out: list[Callable[[], Iterable[object]]] = []
        self._rare = RareDigests(source)
        self._history = VariableHistory(self._partly)  # of the variables that the ranks compare
        self._of_rank = VariableHistory(self._partly)  # of all variables
        self.set_once: dict[str, bool] = {}
        self.mixed = False
        self.met = False

    def leave_out(self, parts: Callable[[], Iterable[object]]) -> None:
        """Exclude the attributes of objects from the check, because the session keeps them for each rank.

        Args:
            parts: returns these objects and containers. It is called at each search.
        """
        self._left_out.append(parts)

    def opens(self) -> None:
        """Record that a block begins."""
        self._history.values = self._of_rank.values = {}
        self._rare.constants.begins()

    def search(self, *, joins: bool) -> FoundVariables:
        """Search the source for the variables on which an optimizer depends, at the first step of that optimizer.

        Args:
            joins: this process replaces a lost process. It logs no warnings, because the lost process has logged
                them. It only names the variables that begin again in it, and on which no update depends.

        Returns:
            What the search has found besides the variables that are checked here.
        """
        found = FoundVariables({}, None)
        if not self._on:
            return found
        self._warns = self._warns and not joins
        unsearched = (
            "variables on which the updates depend are not searched, so one that a new process begins again is not "
            "noticed"
        )
        with warns_of_defects(unsearched), remembered_values():
            places = places_in_script()
            state = frozenset(each.name for each in stores(places) if self._is_state(each.name, each.place))
            in_state = self._search(places, state)
            if joins or self._begins_here():
                self._name_reported(places, "reports lack the steps before")
            # The lost process has passed this check.
            found = FoundVariables(in_state, None if joins else cut_change(places, state, in_state.keys()))
        return found

    def _search(self, places: Places, state: frozenset[str]) -> Names:
        of_modules = NO_MODULES
        if self._source is not None:
            of_modules = module_variables(places, self._source, libraries=self._warns)
        placed = (*placed_variables(places, update=True, state=state), *of_modules.placed)
        by_place = {at: growing_tables(places[: depth + 1]) for depth, at in enumerate(places)}
        tables = {name for each in (of_modules.growing, *by_place.values()) for name in each.tables}
        found = self._undeclared(placed, places, tables)
        self._names.update(found)
        self._partly |= found.keys() & {each.name for each in placed if each.partly}
        for name, (at, _) in list(found.items()):
            known = {**of_modules.growing.tables, **by_place[at].tables}
            once = set_once(places[: places.index(at) + 1])
            if name in known:
                self._rare.tables[name] = known[name]
            elif name in by_place[at].sizes | of_modules.growing.sizes or not known.keys().isdisjoint(
                owners_of(name)
            ):
                del self._names[name]
            elif name in once:
                self.set_once[name] = once[name]
        constants = self._undeclared(unwritten_variables(places), places)
        self._rare.constants.watch(constants)
        self._names.update(
            {name: at for name, at in constants.items() if name in self._rare.constants.changed}
        )
        if self._warns:
            self._only_warned[_FILES].update(self._undeclared(file_variables(places), places))
            self._only_warned[_MODULES].update(self._undeclared(of_modules.of_libraries, places))
        kept = kept_by([] if self._source is None else self._source.objects())
        return {
            each.name: (each.place, places)
            for each in placed
            if self._is_of_user(each.name, each.place, kept)
        }

    def _undeclared(
        self, found: Iterable[PlacedVariable], places: Places, tables: Set[str] = frozenset()
    ) -> Names:
        """Return the variables in ``found`` that are new and not state of the session: the names with their places.

        Args:
            tables: names of tables that the script only makes larger. The state has their first part alone.
        """
        new = [each for each in found if each.name not in self._names]
        undeclared = {each.name for each in self.without_state(new)} | tables
        return {each.name: (each.place, places) for each in new if each.name in undeclared}

    def without_state(self, found: Iterable[PlacedVariable]) -> list[PlacedVariable]:
        """Return the variables in ``found`` that are not state of the session."""
        objects = [] if self._source is None else self._source.objects()
        kept = kept_by(objects)
        # The name of a meter in a loop over meters does not contain the name of the attached object.
        left_out = {id(part) for parts in self._left_out for part in parts()}
        kept = kept._replace(objects=kept.objects | left_out)
        return [each for each in found if not self._declared(each.name, each.place, objects, kept)]

    def _begins_here(self) -> bool:
        """Return whether this process has loaded a state of the job, has not committed a step, and logs warnings."""
        return self._warns and self._history.loaded

    def passes_over(self, *, joins: bool) -> None:
        """Name the variables that begin again in this process, where it skips a loop that the job has finished.

        Args:
            joins: this process replaces a lost process.
        """
        if self._on and (joins or self._begins_here()):
            with warns_of_defects("a variable whose value the script reports may begin again unnoticed"):
                self._name_reported(places_in_script(), "the code after this loop sees initial values")

    def _name_reported(self, places: Places, effect: str) -> None:
        """Log the names of the variables that begin again in this process, and on which no update depends."""
        found = self._undeclared(reported_variables(places), places)
        values = present_values(found)
        plain = plain_values(values, self._source)
        meters = {name for name, value in values.items() if meter_states(value) is not None}
        kept = values.keys() - plain.keys() - meters  # the loop sets these again, or they are state
        names = [name for name in found if name not in kept | self._told]
        if names:
            self._told.update(names)
            text, number = listed(names)
            log.warning(
                "holdfast: %s %s in this process (%s), and %s. The weights do not use that; session(state={...}), "
                "s.own or s.attach(NAME, object) keep values",
                text,
                "begin again" if number > 1 else "begins again",
                described(places),
                effect,
            )

    def passes_end(self) -> None:
        """Read the values of the variables at the end of the loop in which this process continues the job.

        The code after the loop may change them. The source has not been searched yet, so the names come from the
        loaded state.
        """
        if self._history.continues:
            self._history.passes_end(plain_values(values_of(self._history.newest), self._source))
        if self._of_rank.continues:
            self._of_rank.passes_end(self._read(values_of(self._of_rank.newest), fresh=True))

    def enters_loop(self, *, starts: bool, puts_back: bool) -> None:
        """Read the values of the variables when this process enters the loop in which it continues the job.

        Args:
            starts: this process enters the first loop of the job. It reads all plain values, because the variables are
                not known yet.
            puts_back: the script may put values back in its first block, from ``Session.own``.
        """
        if starts and self._on:
            with warns_of_defects("a variable that code before a block changes may begin again unnoticed"):
                every = self._every()
                self._history.starts(every)
                self._of_rank.starts(every)
        if self._history.continues:
            values = plain_values(values_of(self._history.newest), self._source)
            self._history.enters(values, puts_back=puts_back)
        if self._of_rank.continues:
            of_rank = self._read(values_of(self._of_rank.newest), fresh=True)
            self._of_rank.enters(of_rank, puts_back=puts_back)

    def _every(self) -> dict[str, PlainValue]:
        """Return the plain values of all variables of the script, and of the attributes of ``self``.

        Only types of Python, NumPy and torch are read, so that no code of other classes runs.
        """
        variables = variables_of_script()
        own = instance_of(variables.get("self"))
        every = {**variables, **{f"self.{name}": value for name, value in own.items()}}
        known = {name: value for name, value in every.items() if type(value).__module__ in _READ_AT_START}
        return plain_values(known, self._source)

    def look(self, *, joins: bool) -> None:
        """Read and compare the values of the variables at the first update of a block.

        At the later updates, only containers that have begun again are found.

        Raises:
            StepError: this process continues the job, and a variable has its initial value again.
        """
        for what, group in self._only_warned.items() if self._warns else ():
            if names := {name: at for name, at in group.items() if name not in self._told}:
                self._warn(what, names, plain_values(present_values(names), self._source))
        self._note_constants(self._rare.constants.changed_numbers())
        if not self._names:
            return
        if self._of_rank.values:  # a variable of a later optimizer of this block
            for history in (self._history, self._of_rank):
                if again := history.emptied(self._names):
                    self._refuse(again, history, HINT)
            return
        found = present_values(self._names)
        values, every = self._values(found, fresh=self._rare.due)
        self._of_rank.values = {
            **every,
            **dict.fromkeys((found.keys() & self._of_rank.first) - every.keys(), OBJECT),
        }
        self._history.values = {
            name: value
            for name, value in values.items()
            # An array that some steps fill is often the data of one rank.
            if name not in self._rare.tables
            and (name not in self._partly or isinstance(found[name], PlainValue | np.generic | None))
        }
        self._warn("the updates depend on", self._names, every)
        if self.again and not joins:
            self.refuse()
        if again := self._of_rank.begun_again(self._names):
            of_rank = all(self._of_rank.newest[name] not in (value, OBJECT) for name, value in again.items())
            self._refuse(again, self._of_rank, HINT_OF_RANK if of_rank else HINT_OF_ANY)
        self._note_set_once(joins=joins)

    def _read(self, values: Mapping[str, object], *, fresh: bool) -> dict[str, PlainValue]:
        """Return plain values for ``values``, also for large ones and for tensors on a device.

        Args:
            values: the present values of variables.
            fresh: take new digests of these.
        """
        return self._values(values, fresh=fresh)[1]

    def _values(
        self, values: Mapping[str, object], *, fresh: bool
    ) -> tuple[dict[str, PlainValue], dict[str, PlainValue]]:
        """Return the plain values that the ranks compare, and those of :meth:`_read`, for ``values``."""
        constants = {name: values[name] for name in self._rare.constants.changed & values.keys()}
        others = {name: value for name, value in values.items() if name not in constants}
        plain = plain_values(others, self._source)
        every = self._rare.texts(others, plain, fresh=fresh) | self._rare.constants.texts(
            constants, fresh=fresh
        )
        return plain, every

    def _note_constants(self, changed: Names) -> None:
        """Add the constants that have ``changed`` to the variables on which the updates depend."""
        if not changed:
            return
        first = {name: self._rare.constants.first(name) for name in changed}
        self._names.update(changed)
        self._began.update(first)
        self._of_rank.adopt(first)

    def _note_set_once(self, *, joins: bool) -> None:
        """Warn of numbers and arrays that had one value in all earlier steps of the job, and have another value now.

        The script may set such a variable once from data (the first loss). The user may also have changed a setting
        before this start. No setting changes between a lost process and its replacement. So a replacement refuses an
        array that has another value. A number is not refused, because it may be a time.

        Raises:
            StepError: such an array differs in a replacement.
        """
        arrays = {
            name: value
            for name, value in self._of_rank.first_changes().items()
            if is_array(value) and name in self.set_once
        }
        if joins and arrays:
            self._refuse(arrays, self._of_rank, HINT_OF_RANK)
        found = {**self._history.first_changes(), **arrays}
        new = {name: value for name, value in found.items() if name in self.set_once or not is_array(value)}
        if new and self._warns and self._told.isdisjoint(new):
            self._told.update(new)
            log.warning(
                "holdfast: the updates depend on %s, until now on %s. What the script sets once from data is kept in "
                "session(state={...}): a process that joins or resumes would set it again",
                shown(new),
                shown({**self._of_rank.newest, **self._history.newest}, new),
            )

    def _warn(self, what: str, names: Names, values: Mapping[str, PlainValue]) -> None:
        """Warn of the variables that have changed in this process. Unchanged variables may be settings or caches."""
        changed = [n for n, value in values.items() if not is_same(self._began.setdefault(n, value), value)]
        new = [name for name in changed if name not in self._told | self._partly] if self._warns else []
        new = [name for name in new if not self._keeps(name, names[name][0])]
        if new:
            self._told.update(new)
            log.warning(
                "holdfast: %s %s (%s), and a process that joins or resumes begins with the value of a start: %s",
                what,
                ", ".join(map(as_written, new[:VARIABLES_MAX])),
                described(names[new[0]][1]),
                hint_for(values[name] for name in new),
            )

    def _keeps(self, name: str, place: tuple[str, int]) -> bool:
        """Return whether the variable is a plain attribute that the session keeps, as of an optimizer."""
        owners = owners_of(name)
        if not owners or self._source is None:
            return False
        owner = values_of(owners, place).get(owners[-1])
        return self._source.keeps(owner, name.removeprefix(f"{owners[-1]}."))

    @property
    def again(self) -> bool:
        """True if this process continues the job, and a variable has its initial value again in the open block."""
        return bool(self._history.begun_again(self._names))

    def refuse(self) -> NoReturn:
        """Raise a StepError that names the variables that have their initial values again."""
        self._refuse(self._history.begun_again(self._names), self._history, HINT)

    def _refuse(self, again: Mapping[str, PlainValue], history: VariableHistory, hint: str) -> NoReturn:
        begun = ", as at the first step of the job" if history.has_first_values(again) else ""
        raise StepError(
            f"the updates depend on {shown(again)}{begun}; at the step before: "
            f"{shown({name: history.before(name) for name in again})}. This process continues the job, and the "
            "script does not continue with these values",
            hint=f"{hint_for(again.values(), hint)}; session(verify_block=0) leaves out this check",
        )

    def hint(self) -> str:
        """Return the hint of an error that comes from the values in the open block."""
        return hint_for(self._history.values.values())

    def number(self) -> int:
        """Return a number from 1 to STEP_MODULUS - 1 that identifies the values in the open block.

        The result is 0 if there are no values.
        """
        return identified_values(self._history.values)

    def numbers(self) -> dict[str, int]:
        """Return a number for each value in the open block, by the name of the variable.

        Generators are left out, because the search also finds generators whose items no update uses.
        """
        return {
            name: identified(repr(as_number(value)).encode())
            for name, value in self._history.values.items()
            if not (isinstance(value, str) and value.startswith(GENERATOR))
        }

    def voted(self, *, mixed: bool) -> None:
        """Record that a vote has passed. ``mixed``: the ranks have different values."""
        self.mixed = self.mixed or mixed
        self.met = self.met or bool(self._history.values)

    def committed(self, *, ended: bool) -> None:
        """Record that the step is committed. ``ended``: an epoch ends with this step."""
        if self._of_rank.values:
            self._rare.committed()
        self._history.committed(ended=ended)
        self._of_rank.committed(ended=ended)

    def stand_at(self, session: Mapping[str, Any], local: Mapping[str, Any]) -> None:
        """Take over the values of variables from the plain values of the state: of the session, and of this rank."""
        self._history.stand_at(session.get(KEY))
        self._of_rank.stand_at(local.get(KEY))
        self._rare.constants.stand_at(self._of_rank.newest)

    def kept(self) -> dict[str, Any]:
        """Return the values under ``KEY`` for the state of the whole job.

        The result is empty if there are no values, or they differ between ranks.
        """
        return {KEY: self._history.kept()} if self._history.newest and not self.mixed else {}

    def of_rank(self, *, ended: bool) -> dict[str, Any]:
        """Return the values under ``KEY`` for the rank-local values of the step after the open block.

        The result is empty if all variables are compared between the ranks.

        Args:
            ended: an epoch ends with the open block.
        """
        if self._are_of_rank():
            return {KEY: self._of_rank.kept_after(ended=ended)}
        # The vote of this step may show that the ranks differ, and a rank may be lost right after it.
        here, newest = self._of_rank.values, self._of_rank.newest
        changed = {name for name in self._of_rank.unchanged if here.get(name, newest[name]) != newest[name]}
        return {KEY: self._of_rank.kept_after(changed, ended=ended)} if changed else {}

    def _are_of_rank(self) -> bool:
        """Return whether some variables are not compared between the ranks."""
        every, compared = self._of_rank.values, self._history.values
        if not every:  # no update in this block
            every, compared = self._of_rank.newest, self._history.newest
        return bool(every) and (self.mixed or every != compared)

    def passed(self) -> dict[str, Any]:
        """When the script takes the next step, read the variables that have had one value in all updates.

        Return values under ``KEY`` for the rank-local values of this next step; empty if the earlier values stay.
        """
        self._note_constants(self._rare.constants.look())
        if not (names := self._of_rank.unchanged - self._partly):
            return {}
        places = {name: self._names[name][0] for name in names & self._names.keys()}
        here = {place for place in set(places.values()) if runs_at(place)}
        values = values_of(name for name, place in places.items() if place in here)
        if not self._of_rank.passes(self._read(values, fresh=False)):
            return {}
        return {KEY: self._of_rank.kept(None if self._are_of_rank() else names)}

    def names(self) -> str:
        """Return the names of the variables as text; empty if there are none."""
        return ", ".join(map(as_written, list(self._names)[:VARIABLES_MAX]))

    def described(self) -> str:
        """Return a text with the variables, their values and places in the script. Changed variables come first."""
        where = "".join({f" ({described(places)})" for _, places in self._names.values()})
        return f"{shown(self._history.changed_first()) or 'none'}{where}"

    def _is_state(self, name: str, place: tuple[str, int]) -> bool:
        """Return whether a container or an attribute of the script has tensors of the session's state."""
        value = values_of([name], place).get(name)
        if self._source is None or isinstance(value, PlainValue | None):
            return False
        if isinstance(value, dict):
            value = list(value.values())
        items = value[:ITEMS_MAX] if isinstance(value, list | tuple) else [value]
        return any(not isinstance(each, PlainValue) and self._source.declares(each) for each in items)

    def _declared(
        self, name: str, place: tuple[str, int], objects: Sequence[object], kept: KeptAttributes
    ) -> bool:
        """Return whether a variable is state of the session, or is an attribute (``self.rate``) of an object that is.

        Args:
            name, place: name of the variable, and place of its stack frame.
            objects: the objects with ``state_dict()`` in ``state=``.
            kept: the attributes that ``state_dict()`` of these objects saves.
        """
        owners = owners_of(name)
        found = values_of([*owners, name], place)
        values = [value for each, value in found.items() if each != name or not isinstance(value, PlainValue)]
        if any(id(value) in kept.objects for value in values):
            return True
        if owners and (read := read_by_property(found.get(owners[-1]), name.removeprefix(f"{owners[-1]}."))):
            return all(self._declared(f"{owners[-1]}.{each}", place, objects, kept) for each in read)
        source = self._source
        if source is None:
            return False
        if meter_states(found.get(name)) is not None and source.in_user_state(found[name]):
            return True
        if isinstance(found.get(name), CONTAINERS) and self._is_state(name, place):
            return True
        if owners and (id(found.get(owners[-1])), name.removeprefix(f"{owners[-1]}.")) in kept.attributes:
            return True
        whole = (value for value in values if not any(value is item for item in objects))
        return any(map(source.declares, whole))

    def _is_of_user(self, name: str, place: tuple[str, int], kept: KeptAttributes) -> bool:
        """Return whether a variable is in ``state=``: a value, an item of a container, or a kept attribute."""
        owners = owners_of(name)
        found = values_of([*owners, name], place)
        if self._source is None:
            return False
        of_owner = bool(owners) and (id(found.get(owners[-1])), name.removeprefix(f"{owners[-1]}."))
        values = [value for value in found.values() if not isinstance(value, PlainValue | None)]
        return (
            of_owner in kept.attributes
            or any(id(value) in kept.objects for value in values)
            or any(self._source.in_user_state(value) for value in values)
        )
