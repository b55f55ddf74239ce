"""Work between two steps that a fault has cut off: an announced section, or the code after a block.

Theory. A ``with`` statement cannot run its body again. A section that a fault cuts off runs again only where the
script reaches it again: before the block of the next step, or after the loop. A save that is made during the section
records its name. The process that resumes from that save expects the section. It logs a warning if the section has
not run before the next step is committed or the training ends.

Code after a block that is no section is cut off as well, for example in a sum over the ranks. The state of the step is
then without the changes that the rest of this code makes. The process that resumes from this state logs a warning with
the line that was cut off.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from holdfast.core.protocol.status_page import Phase
from holdfast.core.worker.position import ScriptEvent
from holdfast.session.steps.participant import StepParticipant

log = logging.getLogger("holdfast")


class Sections:
    """The sections of one session. At most one section is open at a time."""

    def __init__(self, rank: StepParticipant) -> None:
        self._rank = rank
        self._left = ""  # section that an exception has left since the last committed step
        self._owed = ""  # section that was cut off in an earlier process, and has not run again yet
        self._line = ""  # line of the code after a block that an exception has cut off
        self._missed = ""  # this line of an earlier process

    @property
    def unfinished(self) -> str:
        """Name of a section that has begun and not finished, for a save; empty if there is none."""
        return self._left or self._owed

    @property
    def line(self) -> str:
        """Line of the code after a block that was cut off, for a save; empty if there is none."""
        return self._line or self._missed

    def cut_after_block(self, line: str) -> None:
        """Record that an exception has cut off the code after a block at ``line``, unless it was in a section."""
        if not self._left:
            self._line = line or "a line that is not known"

    def stand_at(self, session: Mapping[str, Any]) -> None:
        """Take over an unfinished section, or unfinished code after a block, from the loaded plain values."""
        self._owed, self._missed = str(session.get("section", "")), str(session.get("cut", ""))

    @contextmanager
    def run(self, name: str) -> Iterator[None]:
        """Announce section ``name`` while the ``with`` body runs, and record whether the body has finished."""
        rank = self._rank
        rank.moved(ScriptEvent.SECTION_BEGUN)
        self._left, end = name, ScriptEvent.SECTION_CUT
        rank.announce(name)
        try:
            yield
            end = ScriptEvent.SECTION_ENDED
            self._left = ""
            self._owed = "" if self._owed == name else self._owed
        except BaseException:
            if rank.client is not None:
                rank.client.page.announce("")  # the duration of a section that was cut off is not learned
            raise
        finally:
            rank.moved(end)
            if not rank.fenced:
                rank.enter(Phase.READY)

    def pass_by(self, step: int, *, tell: bool) -> None:
        """When the next step is committed, warn about work that an earlier process has begun and not finished.

        Also called at the end of the training. Afterwards this work is forgotten.

        Args:
            step: the last committed step.
            tell: this rank logs the warning.
        """
        if self._owed and tell:
            log.warning(
                'holdfast: section "%s" after step %d was cut off and is not run again; to have it run again, put it '
                "before the block of the next step (if ... and not step.again: with s.section(...)), and the last one "
                "after the loop",
                self._owed,
                step,
            )
        if self._missed and tell:
            log.warning(
                "holdfast: the code after the block of step %d was cut off (%s) and is not run again: what the rest of "
                "it logs or sets is missing. If the training depends on that, set it in the block, or before the next "
                "block (`if ... and not step.again`), where a sum or a broadcast over the ranks is repeated after a "
                "fault",
                step,
                self._missed,
            )
        self._left = self._owed = self._line = self._missed = ""
