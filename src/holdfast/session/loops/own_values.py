"""The rank-local values that the script sets: ``Session.own``, and the values of objects that the script attaches.

Theory. A script counts losses and samples in an object of its own, and reports them after an epoch. A replacement
begins in the middle of that epoch with an empty object: its report would cover fewer steps, or divide by zero. So the
values of an attached object are saved with the rank-local values of each step. They are put into the object that the
replacement attaches under the same name. If a block is aborted and runs again, its objects get the values from before
the first run.

Most scripts make the object at the start of each epoch. So the saved values also name the turn (epoch or phase) in
which the object was attached. They are only put into an object that is attached in the same turn.

Life of the data: object -> ``entries`` (at the start of a block, at its vote, at its end, and when the script asks for
the next step) -> status page and checkpoint -> ``go_back`` in the next process of this rank -> ``put``, when the script
begins the steps of that turn.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

from holdfast.errors import UsageError
from holdfast.frameworks.common.state_tree import Plain
from holdfast.session.loops.plain_attributes import NotPlainError, plain_copy, put_back

log = logging.getLogger("holdfast")


class OwnValues:
    """The rank-local values that the script of this rank sets.

    Attributes:
        own: the value of ``Session.own``, saved with the step that ends next; None if there are no values to save.
    """

    def __init__(self) -> None:
        self.own: Plain = None
        # Copies of ``own`` at the vote of the newest block, if the script sets ``own``; None: a warning was given.
        self._at_vote: list[Plain] | None = []
        self._by_script = False
        self._objects: dict[str, tuple[str, Any]] = {}  # by name: turn, object
        self._waiting: dict[str, Any] = {}  # by name: turn and saved values whose object is not filled yet

    def set(self, value: Plain) -> None:
        """Set ``own`` to a value of the script."""
        self.own, self._by_script = value, True

    def at_vote(self) -> Plain:
        """Return ``own`` at the vote of a block: its value if this rank is lost before the end of the block."""
        if self._by_script and self._at_vote is not None:
            self._at_vote = [copy.deepcopy(self.own)]
        return self.own

    def warn_if_late(self) -> None:
        """Warn once if the block has set ``own`` after its vote. Call this when the block has ended."""
        if self._at_vote and self._at_vote != [self.own]:
            self._at_vote = None
            log.warning(
                "holdfast: the block sets s.own after its update: a rank that is lost in between leaves the value of "
                "the step before, and its replacement continues with that. Set s.own before optimizer.step()"
            )

    def attach(self, name: str, item: Any, turn: str) -> None:
        """Attach ``item`` under ``name``. It gets values of an earlier process when the steps of ``turn`` begin.

        Until then the script may still build the object: ``meters.add_meter("lr", ...)``.

        Args:
            name: name of the object in the session.
            item: the object.
            turn: key of the open epoch or phase.

        Raises:
            UsageError: the object holds a value that is not plain.
        """
        _values_of(name, item)
        self._objects[name] = (turn, item)
        if name in self._waiting and self._waiting[name]["turn"] != turn:
            del self._waiting[name]

    def put(self) -> None:
        """Put saved values into the attached objects. Raises: UsageError: an object has another form than before."""
        for name in self._waiting.keys() & self._objects.keys():
            _put(name, self._objects[name][1], self._waiting.pop(name)["values"])

    def entries(self, attached: Mapping[str, Any]) -> dict[str, Plain]:
        """Return a dict for the rank-local values: ``own`` (a copy of ``Session.own``) and ``attached``.

        A key without values is left out.

        Args:
            attached: the turns and values of the attached objects, from :meth:`attached`.
        """
        own: dict[str, Plain] = {} if self.own is None else {"own": copy.deepcopy(self.own)}
        return {**own, **({"attached": dict(attached)} if attached else {})}

    def attached(self) -> dict[str, Any]:
        """Return turn and present values of each attached object, by name. Raises: UsageError: a value is not plain."""
        now = {
            name: {"turn": turn, "values": _values_of(name, item)}
            for name, (turn, item) in self._objects.items()
        }
        return {**now, **self._waiting}

    def go_back(self, entries: Mapping[str, Plain]) -> None:
        """Take over the saved result of :meth:`entries`. Values wait here until the script attaches their object."""
        self.own = copy.deepcopy(entries.get("own"))
        attached: Any = entries.get("attached", {})
        turns = {name: turn for name, (turn, _) in self._objects.items()}
        self._waiting = {
            name: each for name, each in attached.items() if turns.get(name, each["turn"]) == each["turn"]
        }
        self.put()


def _values_of(name: str, item: Any) -> Any:
    try:
        return plain_copy(item, objects=True)
    except NotPlainError as error:
        raise UsageError(
            f"attach({name!r}, ...): {error}; it can keep numbers and texts, in lists, dicts and objects",
            hint="put plain numbers into it (value.item()), or give what has a state_dict to session(state={...})",
        ) from None


def _put(name: str, item: Any, values: Any) -> None:
    try:
        put_back(item, values)
    except NotPlainError as error:
        raise UsageError(
            f"attach({name!r}, ...): {error}, so the values of the process before cannot be put into it",
            hint="attach an object that is built in the same way at each start",
        ) from None
