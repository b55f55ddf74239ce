"""Announced work between two steps, and which of it a fault has cut off.

Theory. A ``with`` statement cannot run its body again: what a fault cuts off after a step is run again only where the
script comes by once more, before the block of the next step or behind the loop. A save that is made meanwhile notes
the name; whoever goes on from there says so when the next step is committed, or the training over, without it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from holdfast.core.protocol.status_page import Phase
from holdfast.session.steps.participant import StepParticipant

log = logging.getLogger("holdfast")


class Sections:
    """All sections of one session, one at a time.

    Attributes:
        open: name of the section that the script is in.
    """

    def __init__(self, rank: StepParticipant) -> None:
        self.open = ""
        self._rank = rank
        self._left = ""  # since the last committed step, by an exception
        self._owed = ""  # cut off in the life before this one, and not run again yet

    @property
    def unfinished(self) -> str:
        """For a save: name of a section that has not come to its end."""
        return self._left or self._owed

    def stand_at(self, session: Mapping[str, Any]) -> None:
        """The session's plain values that were loaded."""
        self._owed = str(session.get("section", ""))

    @contextmanager
    def run(self, name: str) -> Iterator[None]:
        """The body of a section."""
        rank = self._rank
        self.open = self._left = name
        rank.away = rank.in_section = True
        rank.announce(name)
        try:
            yield
            rank.away = False
            self._left = ""
            self._owed = "" if self._owed == name else self._owed
        except BaseException:
            if rank.client is not None:
                rank.client.page.announce("")  # how long it takes is not known yet
            raise
        finally:
            self.open, rank.in_section = "", False
            if not rank.fenced:
                rank.enter(Phase.READY)

    def pass_by(self, step: int, *, tell: bool) -> None:
        """Training goes on after ``step``, or ends there: what was cut off before it is not run again."""
        if self._owed and tell:
            log.warning(
                'holdfast: section "%s" after step %d was cut off and is not run again; to have it run again, put it '
                "before the block of the next step (if ... and not step.again: with s.section(...)), and the last one "
                "after the loop",
                self._owed,
                step,
            )
        self._left = self._owed = ""
