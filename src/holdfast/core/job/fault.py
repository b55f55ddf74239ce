"""One fault of the job, with the time at which its recovery reached each phase.

Theory. All six times (one for each phase) count from the moment of the fault, or from the best estimate of that moment.
So they grow from phase to phase. When a second fault interrupts the recovery, a fault keeps its own times of the first
four phases (detected, fenced, quiesced, planned). Its last two times (restored, resumed) are set again, because they
show the user when the job was whole.
"""

from __future__ import annotations

from typing import Literal, TypeVar, get_args

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
"""The phases whose last time counts if another fault comes before the job has resumed."""
P = TypeVar("P", bound=str)
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
"""Age of a process in seconds below which its death counts as a death in its start."""
OUTSIDE_SIGNALS = frozenset({1, 2, 9, 15})  # SIGHUP, SIGINT, SIGKILL, SIGTERM
OUTSIDE_TIMES_MAX = 4
PLACES = {"starting": "in its start", "left": "after its script had ended"}
LEFT_FOR_RESTART = "left for a restart"
"""Text for a member that left because of another member's fault, so that its exit does not show the cause."""


def reach(times: dict[P, float], phase: P, at_s: float) -> None:
    """Record the time at which a recovery reached ``phase``.

    For the phases ``restored`` and ``resumed`` the newest call counts, for all other phases the first call.
    """
    if phase in UNTIL_WHOLE:
        times[phase] = at_s
    else:
        times.setdefault(phase, at_s)


class Fault(msgspec.Struct, kw_only=True):
    """One fault of the job. Times are in seconds on the controller's clock."""

    rank: int
    member_id: int
    kind: FaultKind
    what: str
    step: int
    at_s: float  # time of the fault, as well as it is known
    phase: str = ""  # phase of the worker at that time
    failure: Failure | None = None
    follows: bool = False  # the member left because the generation was fenced: it is never the cause
    sure: bool = True  # False: another rank may be the cause
    passed: dict[Seen, float] = {}
    steps_lost: int = 0
    freed_s: float = 0.0  # until the last survivor was out of its collective; 0: unknown

    @staticmethod
    def of(member: Member, kind: FaultKind, what: str, now: float, failure: Failure | None = None) -> Fault:
        """Return a new fault of one member.

        Its time is the time of the member's death or hang, if known; otherwise ``now``.
        """
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
        """Record that the recovery of this fault has reached ``phase``."""
        reach(self.passed, phase, now)

    def identity(self) -> dict[str, Field]:
        """Return the fields that identify the fault in the event log."""
        return {
            "rank": self.rank,
            "member_id": self.member_id,
            "kind": self.kind,
            "step": self.step,
            "phase": self.phase,
        }

    def summary(self) -> dict[str, Field]:
        """Return the fields of the ``recovered`` record of this fault: identity, losses, seconds until each phase."""
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
    """Return the failure that identifies a death: its signal or exit code, and the phase in which the process died.

    Returns: None if the death was ordered, or if its phase is not known.

    Signals that are also sent from outside (SIGKILL, SIGTERM, ...) may hit one phase twice by chance. So such a death
    may repeat more often before it counts as the script's, unless the kernel killed the process for lack of memory.
    """
    place = exited.detail
    if member.kill_reason or exited.code == Exit.RESTART or place in ("", NO_PAGE):
        return None
    if exited.state == "starting" and (not member.started_s or now - member.started_s > START_S):
        return None  # without a session it may be anywhere in its script
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
    """The faults of one recovery. All ranks may raise at once, so no event costs a pass over all faults."""

    def __init__(self) -> None:
        self.all: list[Fault] = []  # oldest first
        self.suspected: Fault | None = None  # the last broken collective, whose cause is not known
        self._of: dict[int, list[Fault]] = {}  # by member
        self._freed_ns = 0

    def suspect(self, member: Member, seen: FaultSeen, now: float) -> None:
        """Keep a broken collective as a suspected fault: it becomes a fault if no death explains it."""
        self.suspected = Fault.of(member, "collective", seen.what, now)
        self.suspected.step = seen.step

    def add(self, fault: Fault, now: float) -> None:
        """Add a fault that was detected at ``now``."""
        self.all.append(fault)
        self._of.setdefault(fault.member_id, []).append(fault)
        fault.passes("detected", now)

    def blames(self, member: Member) -> bool:
        """Return True if one of the faults is a fault of this member."""
        return member.member_id in self._of

    def passes(self, phase: Seen, now: float) -> None:
        """Record that the recovery of all faults has reached ``phase``."""
        for fault in self.all:
            fault.passes(phase, now)

    def exited(self, member: Member) -> None:
        """Fill in the phase of a member's faults from the last status page of the member, whose process has ended."""
        for fault in self._of.get(member.member_id, ()):
            if member.exited is not None:
                fault.phase = fault.phase or member.exited.detail

    def freed(self, freed_ns: int, now: float) -> None:
        """Record that a survivor left its collective at ``freed_ns`` (CLOCK_MONOTONIC).

        A time after ``now`` (in seconds) is ignored.
        """
        if freed_ns / 1e9 <= now:
            self._freed_ns = max(self._freed_ns, freed_ns)

    def cost(self, steps: int) -> None:
        """Set the number of steps that were lost, for all faults."""
        for fault in self.all:
            fault.steps_lost = steps

    def end(self) -> list[dict[str, Field]]:
        """Return the fields of the ``recovered`` record of each fault, and forget the faults."""
        found, freed_s = self.all, self._freed_ns / 1e9
        for fault in found:
            fault.freed_s = max(0.0, freed_s - fault.at_s)
        self.all, self._of, self._freed_ns = [], {}, 0
        return [fault.summary() for fault in found]
