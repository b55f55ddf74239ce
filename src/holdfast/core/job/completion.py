"""Have all of them done it? Asked after each event of a job that may have thousands of ranks.

Theory. Answers come in about the order in which orders went out, so a look that begins with the first rank each time
costs the square of their number. This one begins with who was missing the last time.

Invariants:
1. The answer is that of ``all``, whatever was asked before.
2. While nobody takes back what he has done, all looks together pass over each member twice at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from holdfast.core.job.membership import Member


class AllOf:
    """See the module. One may serve several questions, one after the other."""

    def __init__(self) -> None:
        self._missing = 0  # place of who was missing the last time: where to begin, no more

    def all(self, members: Sequence[Member], is_there: Callable[[Member], object]) -> bool:
        """``is_there`` holds for every one of ``members``."""
        begin = self._missing if self._missing < len(members) else 0
        for place in chain(range(begin, len(members)), range(begin)):
            if not is_there(members[place]):
                self._missing = place
                return False
        return True


class SessionOpenings:
    """Whether all sessions of the newest start have opened."""

    def __init__(self) -> None:
        self.complete = False
        self._open = AllOf()

    def begin(self, *, complete: bool = False) -> None:
        """All members start; ``complete``: an earlier controller has seen all sessions open."""
        self.complete = complete

    def check(self, members: Sequence[Member], world_size: int) -> bool:
        """Return True when, for the first time since the start, all sessions are open."""
        if self.complete or len(members) < world_size:
            return False
        self.complete = self._open.all(members, lambda m: m.opened_step is not None)
        return self.complete
