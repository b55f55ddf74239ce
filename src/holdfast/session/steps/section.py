"""Sections, the announced work between two steps: the section that runs now, and one that a fault has cut off.

Theory. A ``with`` statement cannot run its body again. A section that a fault cuts off runs again only where the
script reaches it again: before the block of the next step, or after the loop. A save that is made during the section
records its name. The process that resumes from that save expects the section. It logs a warning if the section has
not run before the next step is committed or the training ends.
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

    @property
    def unfinished(self) -> str:
        """Name of a section that has begun and not finished, for a save; empty if there is none."""
        return self._left or self._owed

    def stand_at(self, session: Mapping[str, Any]) -> None:
        """Take over the name of an unfinished section from ``session``, the loaded plain values."""
        self._owed = str(session.get("section", ""))

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
        """When the next step is committed, warn about a section that an earlier process has begun and not finished.

        Also called at the end of the training. Afterwards the section is forgotten.

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
        self._left = self._owed = ""
