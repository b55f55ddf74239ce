"""Values that a script makes once per rank and run (``holdfast.once``): directory names, identifiers, times of day.

Theory. A replacement runs the script from its top and would make other values. So the first value of a rank is written
to the event log, and every later process of that rank receives it. The log is on all nodes and outlives controllers.
Nothing else has to be kept.

Invariants:
1. The first value that a rank sends under a name is its value to the end of the run.
2. A value is in the log before it is sent to a process.
3. A process may ask and send any number of times: the answer is the same.
"""

from __future__ import annotations

from holdfast.core.job.job_state import Job
from holdfast.core.job.log_replay import ReplayedState
from holdfast.core.job.membership import Member
from holdfast.core.protocol.messages import OnceAsked, OnceTold

NAME_LENGTH_MAX = 100
VALUE_LENGTH_MAX = 1000
NAMES_MAX = 100  # names per rank


class MadeOnce:
    """The values that ranks keep under names (``holdfast.once``), by rank and name."""

    def __init__(self, job: Job, past: ReplayedState) -> None:
        self._job = job
        self._kept = {(rank, name): value for rank, name, value in past.once}

    def asked(self, member: Member, event: OnceAsked) -> None:
        """Send a rank the value that is kept under ``event.name``.

        If no value is kept yet, first keep the value that ``event`` proposes.
        """
        place = member.rank, event.name
        full = False
        if event.value and place not in self._kept:
            full = sum(1 for rank, _ in self._kept if rank == member.rank) >= NAMES_MAX
            full = full or len(event.value) > VALUE_LENGTH_MAX or len(event.name) > NAME_LENGTH_MAX
            if not full:
                self._kept[place] = event.value
                self._job.record("made_once", rank=member.rank, name=event.name, value=event.value)
        told = OnceTold(
            member_id=member.member_id, name=event.name, value=self._kept.get(place, ""), full=full
        )
        self._job.send(member, told)
