"""What members that are gone leave in shared memory: their pages, and the files of their stacks.

They are read after a death, by this agent and by a successor that has to report the death again, until the recovery
that replaced the member is over. Left for longer they fill a small ``/dev/shm`` with a job that is restarted often. So
they stay for one more recovery, and are removed when the next one has ended.
"""

from __future__ import annotations

from holdfast.core.ids import NO_GENERATION, Generation, MemberId
from holdfast.runtime.evidence import stacks_path
from holdfast.runtime.rundir import RunDir


class Remains:
    """Those of one node."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._generation = NO_GENERATION
        self._newer: set[MemberId] = set()
        self._older: set[MemberId] = set()

    def add(self, member_id: MemberId) -> None:
        """This member has exited."""
        self._newer.add(member_id)

    def clear(self, generation: Generation) -> None:
        """The job goes on in ``generation``: remove what the recovery before this one has left. It may be repeated."""
        if generation <= self._generation:
            return
        self._generation = generation
        for member_id in self._older:
            self._run.page_path(member_id).unlink(missing_ok=True)
            stacks_path(self._run, member_id).unlink(missing_ok=True)
        self._older, self._newer = self._newer, set()
