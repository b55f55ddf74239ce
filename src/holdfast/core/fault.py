"""One disturbance of the job and when it passed which phase.

Theory. All six times are measured from the same moment, when the fault happened as far as anyone can tell, so
they grow from phase to phase. A fault that is overtaken by a second one keeps its first detection and fence
and takes the last value of everything later: what counts for the user is when the job was whole again.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from holdfast.core.membership import Member
from holdfast.core.messages import Field
from holdfast.core.policy import Failure

Seen = Literal["detected", "fenced", "quiesced", "planned", "restored", "resumed"]
SEEN: tuple[Seen, ...] = get_args(Seen)
"""The phases of a recovery that users see, in their order."""
FaultKind = Literal[
    "signal", "exit", "exception", "silent", "hang", "collective", "startup", "controller", "corruption"
]


class Fault(msgspec.Struct, kw_only=True):
    """One disturbance; times in seconds on the controller's clock."""

    rank: int
    member_id: int
    kind: FaultKind
    what: str
    step: int
    at_s: float  # when it happened, as far as anyone can tell
    phase: str = ""  # where the worker was
    failure: Failure | None = None
    passed: dict[Seen, float] = {}
    steps_lost: int = 0
    freed_s: float = 0.0  # until the last survivor was out of its collective; 0: unknown

    @staticmethod
    def of(member: Member, kind: FaultKind, what: str, now: float, failure: Failure | None = None) -> Fault:
        """A fault of one member, dated by its death if it is dead."""
        exited = member.exited
        died_s = exited.died_ns / 1e9 if exited is not None and exited.died_ns else now
        died_s = member.hung_at_s or died_s
        return Fault(
            rank=member.rank,
            member_id=member.member_id,
            kind=kind,
            what=what,
            step=exited.step if exited else failure.step if failure else member.step,
            at_s=min(died_s, now),
            phase=exited.detail if exited else "",
            failure=failure,
        )

    def passes(self, phase: Seen, now: float) -> None:
        """The job has reached ``phase`` of this fault's recovery."""
        if phase in ("detected", "fenced"):
            self.passed.setdefault(phase, now)
        else:
            self.passed[phase] = now

    def freed(self, freed_ns: int, now: float) -> None:
        """A survivor was out of its collective at ``freed_ns`` (CLOCK_MONOTONIC); nonsense is ignored."""
        freed_s = freed_ns / 1e9 - self.at_s
        if 0.0 < freed_s <= now - self.at_s:
            self.freed_s = max(self.freed_s, freed_s)

    def identity(self) -> dict[str, Field]:
        """The fields that name the fault in the event log."""
        return {
            "rank": self.rank,
            "member_id": self.member_id,
            "kind": self.kind,
            "step": self.step,
            "phase": self.phase,
        }

    def summary(self) -> dict[str, Field]:
        """The fields of its ``recovered`` record: identity, losses and seconds until each phase, never
        shrinking."""
        fields = self.identity()
        fields["steps_lost"] = self.steps_lost
        fields["freed_s"] = round(self.freed_s, 6)
        latest = 0.0
        for phase in SEEN:
            latest = max(latest, self.passed.get(phase, self.at_s) - self.at_s)
            fields[f"{phase}_s"] = round(latest, 6)
        return fields
