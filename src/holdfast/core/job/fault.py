"""One disturbance of the job and when it passed which phase.

Theory. All six times are measured from the same moment, when the fault happened as far as anyone can tell, so
they grow from phase to phase. A fault that is overtaken by a second one keeps the times of its own detection,
fence, rest and decision, and takes the last value of what follows: what counts for the user is when the job was
whole again.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from holdfast.core.decide.recovery_phases import NO_PAGE
from holdfast.core.decide.stop_policy import DEATH, Failure
from holdfast.core.ids import Generation
from holdfast.core.job.membership import Member
from holdfast.core.protocol.messages import FaultSeen, Field, MemberExited
from holdfast.exit_codes import Exit

Seen = Literal["detected", "fenced", "quiesced", "planned", "restored", "resumed"]
SEEN: tuple[Seen, ...] = get_args(Seen)
"""The phases of a recovery that users see, in their order."""
UNTIL_WHOLE: tuple[Seen, ...] = ("restored", "resumed")
"""Those whose last time counts, where another fault comes before the job goes on."""
FaultKind = Literal[
    "signal",
    "exit",
    "exception",
    "device",
    "silent",
    "hang",
    "collective",
    "startup",
    "controller",
    "corruption",
    "leave",
]
START_S = 60.0
"""Deaths of a process younger than this happen in its start."""
OUTSIDE_SIGNALS = frozenset({1, 2, 9, 15})  # SIGHUP, SIGINT, SIGKILL, SIGTERM
OUTSIDE_TIMES_MAX = 4
PLACES = {"starting": "in its start", "left": "after its script had ended"}
LEFT_FOR_RESTART = "left for a restart"
"""What is said of a member that follows a fault: it has nothing of its own to tell."""


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
    follows: bool = False  # the member left because the generation was fenced: it is never the reason
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
            follows=exited is not None and exited.code == Exit.RESTART,
        )

    def passes(self, phase: Seen, now: float) -> None:
        """The job has reached ``phase`` of this fault's recovery."""
        if phase in UNTIL_WHOLE:
            self.passed[phase] = now
        else:
            self.passed.setdefault(phase, now)

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


def death_of(
    now: float, member: Member, exited: MemberExited, how: str, generation: Generation
) -> Failure | None:
    """What tells this death from others: its signal or code, and where it was. None: it was ordered, or nothing does.

    A signal that comes from outside as well, without want of memory, may be chance twice at the same place.
    """
    place = exited.detail
    if member.kill_reason or exited.code == Exit.RESTART or place in ("", NO_PAGE):
        return None
    if exited.state == "starting" and (not member.started_s or now - member.started_s > START_S):
        return None  # of a script without a session: it may be anywhere
    outside = exited.signal in OUTSIDE_SIGNALS and not exited.oom_kills
    what = f"signal {exited.signal}" if exited.signal else f"code {exited.code}"
    return Failure(
        rank=member.rank,
        step=exited.step,
        kind=DEATH,
        what=f"rank {member.rank} {how}, {PLACES.get(place, f'in {place}')}",
        digest=f"death of rank {member.rank} in {place} by {what}",
        occurrence=generation.pack(),
        times_max=OUTSIDE_TIMES_MAX if outside else 2,
    )


class Faults:
    """Those of one recovery. All ranks may raise at once, so nothing looks at all of them for the sake of one."""

    def __init__(self) -> None:
        self.all: list[Fault] = []  # oldest first
        self.suspected: Fault | None = None  # the last one that was seen without a cause
        self._of: dict[int, list[Fault]] = {}  # by member
        self._freed_ns = 0

    def suspect(self, member: Member, seen: FaultSeen, now: float) -> None:
        """Keep a broken collective: it is a fault if no death explains it."""
        self.suspected = Fault.of(member, "collective", seen.what, now)
        self.suspected.step = seen.step

    def add(self, fault: Fault, now: float) -> None:
        """One more is told."""
        self.all.append(fault)
        self._of.setdefault(fault.member_id, []).append(fault)
        fault.passes("detected", now)

    def blames(self, member: Member) -> bool:
        """One of them is of this member."""
        return member.member_id in self._of

    def passes(self, phase: Seen, now: float) -> None:
        """The job has reached ``phase`` of the recovery."""
        for fault in self.all:
            fault.passes(phase, now)

    def exited(self, member: Member) -> None:
        """A member is gone: its page says where it was."""
        for fault in self._of.get(member.member_id, ()):
            if member.exited is not None:
                fault.phase = fault.phase or member.exited.detail

    def freed(self, freed_ns: int, now: float) -> None:
        """A survivor was out of its collective at ``freed_ns`` (CLOCK_MONOTONIC); what is yet to come is nonsense."""
        if freed_ns / 1e9 <= now:
            self._freed_ns = max(self._freed_ns, freed_ns)

    def cost(self, steps: int) -> None:
        """So many steps are lost."""
        for fault in self.all:
            fault.steps_lost = steps

    def end(self) -> list[dict[str, Field]]:
        """The job is whole again: what is to be told of each, and no fault is left."""
        found, freed_s = self.all, self._freed_ns / 1e9
        for fault in found:
            fault.freed_s = max(0.0, freed_s - fault.at_s)
        self.all, self._of, self._freed_ns = [], {}, 0
        return [fault.summary() for fault in found]
