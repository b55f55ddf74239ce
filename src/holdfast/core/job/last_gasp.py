"""The last-gasp checkpoint of one recovery: the ranks that write it, its result, and the ranks that failed to write.

Theory. Every source (a survivor that holds part of the state) writes its share of one plan. The source that finds all
shares on disk seals the checkpoint. A source that could not write is left out of the next attempt. Boxes that only this
source holds are then missing, and the recovery continues without a save.

Invariants:
1. Attempts are numbered within a recovery, so no directory is written twice.
2. A rank whose write failed is not a source of a later attempt of the same recovery.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from holdfast.core.decide.decision import Decision
from holdfast.core.ids import SaveId
from holdfast.core.job.job_state import Job
from holdfast.core.protocol.messages import SaveReported, SaveShare

Outcome = Literal["other", "writing", "sealed", "failed"]


class LastGaspSave:
    """The part of :class:`~holdfast.core.job.recovery.Recovery` that orders the last-gasp checkpoint.

    It shares the facts of the run (``job``) with the recovery.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.order: SaveShare | None = None  # the attempt in progress
        self.writing: set[int] = set()  # sources that have not reported
        self.error = ""  # the error of the last attempt that failed
        self.failures = 0
        self._attempts = 0
        self._excluded: set[int] = set()

    def sources(self, decided: Decision) -> tuple[int, ...]:
        """Return the ranks that can write the decided state."""
        return tuple(r for r in decided.sources if r not in self._excluded)

    def begin(self, sources: tuple[int, ...], dead_locals: dict[str, bytes]) -> None:
        """Begin an attempt: make the order to write a share, for the ranks ``sources``.

        ``dead_locals``: rank-local values (JSON) of the dead ranks, by rank (text).
        """
        job = self.job
        self._attempts += 1
        self.writing = set(sources)
        self.order = SaveShare(
            save_id=SaveId(
                run=job.config.run_id,
                generation=job.generation,
                step=job.step,
                attempt=self._attempts,
                kind="last-gasp",
            ),
            root=job.root,
            sources=sources,
            layouts=job.roster.all_layouts(),
            dead_locals=dead_locals,
        )

    def plan(self) -> None:
        """Put the newest layouts of all ranks into the order of this attempt.

        Every source has published its layout by now, so all sources plan with the same layouts.
        """
        if self.order is not None:
            self.order = msgspec.structs.replace(self.order, layouts=self.job.roster.all_layouts())

    def reported(self, rank: int, report: SaveReported) -> Outcome:
        """Handle the report of a source that it has written its share, or could not.

        Returns: the outcome of the attempt; ``other`` for a report of another attempt.
        """
        if self.order is None or report.save_id != self.order.save_id:
            return "other"
        if report.error:
            self._excluded.add(rank)
            return self._failed(f"rank {rank}: {report.error}")
        self.writing.discard(rank)
        if report.sealed:
            return "sealed"
        if self.writing:
            return "writing"
        return self._failed("all shares are written, but no rank could mark the checkpoint as whole")

    def _failed(self, why: str) -> Outcome:
        self.failures += 1
        self.error = why
        return "failed"

    def clear(self) -> None:
        """Forget the attempts and failures, because the job has resumed."""
        self._excluded = set()
        self._attempts = self.failures = 0
        self.error = ""
