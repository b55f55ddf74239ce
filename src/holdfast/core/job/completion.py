"""A fast test whether a condition holds for all members, run after each event of a job of thousands of ranks.

Theory. Answers arrive in about the order in which orders were sent. A test that starts at the first rank each time
costs the square of the number of ranks. This test starts at the member for which the condition did not hold last time.

Invariants:
1. The answer is always equal to that of Python's ``all``.
2. If the condition stays true for a member once it is true, all tests together find it true at most twice per member.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from holdfast.core.job.membership import Member


class AllOf:
    """A fast test whether a condition holds for all members.

    One object may test several conditions, one after the other.
    """

    def __init__(self) -> None:
        self._missing = 0  # index of the member that was missing the last time, at which the next test starts

    def all(self, members: Sequence[Member], is_there: Callable[[Member], object]) -> bool:
        """Return True if ``is_there`` holds for every one of ``members``."""
        begin = self._missing if self._missing < len(members) else 0
        for place in chain(range(begin, len(members)), range(begin)):
            if not is_there(members[place]):
                self._missing = place
                return False
        return True


class SessionOpenings:
    """The test whether all sessions have opened after a start of all members."""

    def __init__(self) -> None:
        self.complete = False
        self._open = AllOf()

    def begin(self, *, complete: bool = False) -> None:
        """Forget the last start: all members start again. ``complete``: an earlier controller saw all sessions open."""
        self.complete = complete

    def check(self, members: Sequence[Member], world_size: int) -> bool:
        """Return True once per start: at the first call that finds all sessions open."""
        if self.complete or len(members) < world_size:
            return False
        self.complete = self._open.all(members, lambda m: m.opened_step is not None)
        return self.complete
