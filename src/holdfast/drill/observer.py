"""An observer of a run that uses only the run's status pages and its event log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from holdfast import event_log
from holdfast.core.protocol.status_page import Phase, Word
from holdfast.history.run_history import RunHistory
from holdfast.runtime.node.process_info import alive
from holdfast.runtime.node.rundir import PAGE
from holdfast.runtime.node.status_page import each_page

GONE = (Phase.FINISHED, Phase.AFTER, Phase.LEFT)


class PageSeen(msgspec.Struct, frozen=True):
    """The status page of one living worker."""

    path: Path
    member: int
    rank: int
    pid: int


class ObservedRun:
    """The observer of one run.

    Args:
        directory: directory of the run.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._follower = event_log.Follower(directory / "events.jsonl")
        self.events: list[event_log.Event] = []
        self._history = RunHistory()

    def poll(self) -> None:
        """Read the events that are new in the event log."""
        for event in self._follower.poll():
            self.events.append(event)
            self._history.take(event)

    def all_of(self, kind: str) -> list[event_log.Event]:
        """Return all events of one kind that were read so far."""
        return [event for event in self.events if event.kind == kind]

    @property
    def ended(self) -> bool:
        """True if the event log has the end of the run."""
        return self._history.ended is not None

    def workers(self) -> dict[int, PageSeen]:
        """Return the status page of each living worker, by rank."""
        found: dict[int, PageSeen] = {}
        for page in each_page(self.directory / "pages", PAGE):
            seen = PageSeen(page.path, page[Word.MEMBER], page[Word.RANK], page[Word.PID])
            newer = seen.rank not in found or seen.member > found[seen.rank].member
            if newer and seen.pid > 0 and alive(seen.pid) and page.state()[1] not in GONE:
                found[seen.rank] = seen
        return found

    def broken(self) -> list[str]:
        """Return the errors of controllers and agents that broke.

        The job itself does not show these errors, because successors took over.
        """
        self.poll()
        return broken(self.events)

    def committed_step(self) -> int:
        """Return the highest step that any status page shows.

        A step's number is the number of updates before the step.
        """
        return max((page.state()[0] for page in each_page(self.directory / "pages", PAGE)), default=0)


def broken(events: Sequence[event_log.Event]) -> list[str]:
    """Return the errors with which controllers and agents ended, one text per error."""
    return [f"{e.kind}: {e.data['error']}" for e in events if e.kind in ("controller_broken", "agent_broken")]
