"""The values of variables at the first and the newest step of a job, and the detection of variables that begin again.

Theory. A process that continues a job runs the script from its top. A variable has *begun again* if it has its first
value there, but had another value at the previous step. If an epoch ended with the previous step, the variable may
count the steps of an epoch. Then it has begun again only if the source shows that the script does not reset it in an
epoch. A whole number to which the loop only adds has also begun again if it is smaller than at the previous step: the
script may take its initial value from a checkpoint of its own. An array has begun again if it has only zeros, and had
other numbers at the previous step.

A count has its first value at the first update, and changes after that update. If the job goes back to the second
step, the values at the updates do not show that the count has begun again. So variables that have had one value in
all updates are also read when the script takes the next step. In the process that continues the job, such a variable
is compared if it has the first value both at the start of the loop and at the update.

A block may also add to a container before its update: a list of norms, the sums of an average. At the first update of
the continuing process it then has one item, and not its first value. Such a container has begun again if it was empty
where the process has entered the loop, and the source only fills it. This does not apply to arrays, because a rollout
may write all items of an array.

Code before a block may also change a variable (the moves of a game). At the first update of the continuing process the
variable then has neither its first value nor the newest one. So the values where the job has entered its first loop are
kept as well. A variable has begun again if the process enters its loop with that value, and the job had another one.
This does not apply to a variable that had one value in all updates, nor to a script that uses ``Session.own``, because
its block may put back any variable.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Set
from typing import Any, NamedTuple

from holdfast.session.variables.deciding_variables import Places, counts, filled, lasting_variables
from holdfast.session.variables.growing_tables import TABLE, agree

PlainValue = bool | int | float | str
Names = Mapping[str, tuple[tuple[str, int], Places]]
"""Each variable with the place of its function, and with the places from the update out to the loop."""
NUMBER = "the value "
"""The begin of the text for a number or a text that the source never seems to change, and that has changed."""
ZEROS = "of zeros"
"""The end of the text for an array or tensor that has only zeros."""


EMPTY = ("[]", "()", "{}")
"""The texts of empty containers."""
ARRAYS = ("an array ", "a tensor ")
"""The begin of the text for an array or a tensor."""


def is_array(value: PlainValue) -> bool:
    """Return whether ``value`` is the text that stands for an array or a tensor."""
    return isinstance(value, str) and value.startswith(ARRAYS)


def is_same(before: PlainValue, now: PlainValue) -> bool:
    """Return whether two values of a variable count as one value.

    Two tables do if their common first parts are equal. A table was no table before the script has made it.
    """
    if isinstance(now, str) and now.startswith(TABLE):
        return not isinstance(before, str) or not before.startswith(TABLE) or agree(before, now)
    return before == now


class _Record(NamedTuple):
    """The values of variables at the first step and at the newest step of the job.

    Attributes:
        ended: an epoch ended with the newest step.
        passed: values that variables had when the script took the step after the newest one. Only variables that
            changed there for the first time are included.
        start: values with which the job has entered its first loop.
    """

    first: Mapping[str, PlainValue] = {}
    newest: Mapping[str, PlainValue] = {}
    ended: bool = False
    passed: Mapping[str, PlainValue] = {}
    start: Mapping[str, PlainValue] = {}

    def of(self, names: Container[str]) -> _Record:
        """Return the part of this record that is about the variables ``names``."""
        first, newest, passed, start = (
            {name: value for name, value in values.items() if name in names}
            for values in (self.first, self.newest, self.passed, self.start)
        )
        return _Record(first, newest, self.ended, passed, start)


class VariableHistory:
    """The history of some variables of one job.

    Args:
        partly: variables that some steps write first (``PlacedVariable.partly``). The owner may add more.

    Attributes:
        values: the values at the first update of the open block; empty if the block has made no update.
        continues: True if this process has loaded the history, and has not committed a step since then.
        loaded: the same, also if the loaded state has no such variables.
    """

    def __init__(self, partly: Set[str] = frozenset()) -> None:
        self.values: Mapping[str, PlainValue] = {}
        self.continues = self.loaded = False
        self._record = _Record()
        # Values where this process enters the loop of the loaded state, and at the end of that loop.
        self._at_begin: Mapping[str, PlainValue] = {}
        self._at_end: Mapping[str, PlainValue] = {}
        self._start: Mapping[
            str, PlainValue
        ] = {}  # values of all variables where the job enters its first loop
        self._puts_back = False
        self._partly = partly

    @property
    def newest(self) -> Mapping[str, PlainValue]:
        """The values of the variables at the newest committed step of the job."""
        return self._record.newest

    def stand_at(self, kept: object) -> None:
        """Take over the history in ``kept``, a result of :meth:`kept`. Any other value of ``kept`` is ignored."""
        self.loaded = True
        fields = len(_Record._fields)
        if isinstance(kept, list) and len(kept) in (
            fields - 2,
            fields - 1,
            fields,
        ):  # earlier versions had fewer
            self._record, self.continues = _Record(*kept), True

    def passes_end(self, values: Mapping[str, PlainValue]) -> None:
        """Keep ``values``, the values at the end of a loop, as the values with which this process continues the job.

        The code after the loop may change the variables before the first update.
        """
        self._at_end = values

    def enters(self, values: Mapping[str, PlainValue], *, puts_back: bool = False) -> None:
        """Keep ``values``, the values with which this process enters the loop of the loaded state.

        Args:
            values: the values by name.
            puts_back: the script may put other values into the variables in its first block.
        """
        self._at_begin, self._puts_back = values, puts_back

    def starts(self, values: Mapping[str, PlainValue]) -> None:
        """Keep ``values``, with which this process enters the first loop of the job.

        The names of the variables are not known yet, so these are the values of all variables of the script.
        """
        self._start = values

    @property
    def first(self) -> Set[str]:
        """The names of the variables that had a value at the first step of the job."""
        return self._record.first.keys()

    @property
    def unchanged(self) -> Set[str]:
        """The names of the variables that have had one value in all updates."""
        first, newest, *_ = self._record
        return {name for name, value in newest.items() if first.get(name) == value}

    def adopt(self, values: Mapping[str, PlainValue]) -> None:
        """Include variables that have had the values ``values`` in all updates of the job."""
        record = self._record
        self._record = record._replace(first={**values, **record.first}, newest={**values, **record.newest})

    def passes(self, values: Mapping[str, PlainValue]) -> bool:
        """When the script takes the next step, record ``values``, the values of unchanged variables.

        Return whether the history has changed.
        """
        before = self._record.passed
        changed = {name: value for name, value in values.items() if self.newest.get(name, value) != value}
        self._record = self._record._replace(passed=changed)
        return changed != before

    def before(self, name: str) -> PlainValue:
        """Return the last known value of a variable before the open block."""
        return self._record.passed.get(name, self.newest[name])

    def begun_again(self, names: Names) -> dict[str, PlainValue]:
        """Return the variables that have begun again in the open block, with their values.

        Such a variable did not continue from its value at the previous step. The result is empty if this process does
        not continue a job.
        """
        if not self.continues:
            return {}
        here = {name: self._at_end.get(name, value) for name, value in self.values.items()}
        return {
            name: value for name, value in here.items() if self._has_begun_again(name, value, names[name][1])
        }

    def _has_begun_again(self, name: str, value: PlainValue, places: Places) -> bool:
        before = self.newest.get(name, value)
        if isinstance(value, str) and value.startswith(TABLE):
            return not is_same(before, value)
        if type(value) is type(before) is int and value < before and name in counts(places):
            return True
        may_begin = self._record.ended and name not in lasting_variables(places)
        if self._was_emptied(name, places):
            return True
        if self._starts_again(name) and not may_begin:
            return True
        again = self._record.first.get(name) == value or (isinstance(value, str) and value.endswith(ZEROS))
        if value == before == self._at_begin.get(name):
            before = self.before(name)
        return again and value != before and not may_begin

    def _starts_again(self, name: str) -> bool:
        """Return whether this process has entered its loop with the value with which the job has entered its first."""
        start = self._record.start.get(name)
        if start is None or self._puts_back or name in self.unchanged or name in self._partly:
            return False
        return self._at_begin.get(name) == start != self.newest.get(name, start)

    def _was_emptied(self, name: str, places: Places) -> bool:
        """Return whether a container that the loop only fills was empty where this process has entered the loop."""
        if self._at_begin.get(name) not in EMPTY or self.newest.get(name) in EMPTY or name in self.unchanged:
            return False
        may_begin = self._record.ended and name not in lasting_variables(places)
        return not may_begin and name in filled(places)

    def emptied(self, names: Names) -> dict[str, PlainValue]:
        """Return the containers that have begun again, with their values where this process has entered the loop.

        The result is empty if this process does not continue a job. The values in the open block do not matter.
        """
        found = (name for name, (_, places) in names.items() if self._was_emptied(name, places))
        return {name: self._at_begin[name] for name in found} if self.continues else {}

    def has_first_values(self, values: Mapping[str, PlainValue]) -> bool:
        """Return whether all ``values`` are those of the first step of the job."""
        return all(self._record.first.get(name) == value for name, value in values.items())

    def changed_first(self) -> dict[str, PlainValue]:
        """Return the values in the open block. Variables that have had one value in all updates come last."""
        return dict(sorted(self.values.items(), key=lambda item: item[0] in self.unchanged))

    def first_changes(self) -> dict[str, PlainValue]:
        """Return the numbers, arrays and tensors that the open block has changed for the first time.

        At all earlier steps each of them had one value. The result is empty if this process does not continue the
        job. A variable that was a whole number before is left out, because it was not computed from data.
        """
        first, newest, *_ = self._record
        return {
            name: value
            for name, value in self.values.items()
            if self.continues
            and name in newest
            and (is_array(value) or (isinstance(value, float) and isinstance(newest[name], float)))
            and first.get(name, value) == newest[name] != value
        }

    def kept(self, names: Container[str] | None = None) -> list[Any]:
        """Return the history for the state. If ``names`` is given, return only the part for these variables."""
        return list(self._record if names is None else self._record.of(names))

    def kept_after(self, names: Container[str] | None = None, *, ended: bool) -> list[Any]:
        """Return the history for the state after the open block.

        Args:
            names: as in :meth:`kept`.
            ended: an epoch ends with the block.
        """
        record = self._next(ended=ended)
        return list(record if names is None else record.of(names))

    def committed(self, *, ended: bool) -> None:
        """Record that the step of the open block is committed. ``ended``: an epoch ends with this step."""
        # A block without an update has not compared the values.
        self._record, self.continues = self._next(ended=ended), self.continues and not self.values
        self.loaded = False

    def _next(self, *, ended: bool) -> _Record:
        if not self.values:
            return self._record._replace(ended=self._record.ended or ended)
        first, start = self._record.first, self._record.start
        if not first:
            start = {name: value for name, value in self._start.items() if name in self.values}
        return _Record({**self.values, **first}, self.values, ended, start=start)
