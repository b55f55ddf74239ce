"""The replacement of dead ranks by newcomers, while the survivors keep process, weights and connections.

Theory. A newcomer builds its model without peers, asks for its state, receives it from the sources (the survivors that
serve their state), and joins. Newcomer and sources work at the same time. No newcomer fetches state before all sources
have offered their state, so that the load is spread over all of them. A newcomer that has not joined is not evidence in
a decision. The evidence of its seat is still the status page of the previous full member. Rank-local values are plain
values that belong to one rank only, such as its position in the data.

Invariants:
1. A newcomer is ordered to receive only when every source of the decision has offered the state of the decided step.
2. The page of a replaced member counts as evidence until the job has resumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from holdfast.core.decide.decision import Decision, RankReport
from holdfast.core.decide.ladder import Ladder
from holdfast.core.decide.recovery_phases import NO_PAGE
from holdfast.core.ids import MemberId
from holdfast.core.job.failed_devices import FAILURES_MAX
from holdfast.core.job.job_state import Job
from holdfast.core.job.membership import Member
from holdfast.core.job.recovery_plan import RecoveryPlan
from holdfast.core.job.wait_bounds import Bounds
from holdfast.core.protocol.messages import Joined, MemberExited, Receive, Settled, StateOffered
from holdfast.text import plural


class Replacement:
    """The part of :class:`~holdfast.core.job.recovery.Recovery` that starts newcomers.

    It shares the facts of the run (``job``) with the recovery.
    """

    def __init__(self, job: Job, bounds: Bounds) -> None:
        self.job = job
        self.bounds = bounds
        self.lost = 0  # newcomers of this recovery that were lost before they joined
        self.refusal = ""  # why a newcomer cannot join; empty: no rank has reported a reason
        self._awaited: set[int] = set()  # sources that have not offered
        self._offers: dict[int, StateOffered] = {}
        self._addresses: dict[str, tuple[str, int]] | None = None  # of the offers, computed on demand
        self._pages: dict[
            int, MemberExited
        ] = {}  # by rank: last status page of the last full member of the seat
        self._former: dict[MemberId, int] = {}  # ranks of members that an earlier controller has replaced

    def why_not(self, decided: Decision) -> str:
        """Return why the lost ranks cannot be replaced, wherever their boxes are held; empty if they can be."""
        job = self.job
        living = job.roster.living
        if reason := self.barred(living):
            return reason
        if not living or not decided.sound:
            return "not every living rank is at the step, inside its loop"
        dead = [m for m in job.roster.members if not m.alive]
        places = job.places(dead)
        homeless = next((m for m in dead if m.rank not in places), None)
        if homeless is not None:
            gone = str(homeless.node_id) not in job.heard()
            what = f"{homeless.node_id} of rank {homeless.rank} is gone" if gone else self._broken(homeless)
            return f"{what}, and no other node has a free slot"
        return ""

    def _broken(self, member: Member) -> str:
        return f"device {member.local_rank} of {member.node_id} has failed {FAILURES_MAX} times"

    def barred(self, living: Sequence[Member]) -> str:
        """Return why no rank can be replaced, whichever ranks are lost; empty if ranks can be replaced."""
        config = self.job.config
        if config.library:
            return "the workers belong to another launcher"
        if config.alone:
            return "a minority of the nodes only saves"
        if not Ladder.parse(config.on_fault).tries("replace", "node", "memory"):
            return "all workers are restarted on request"
        if not all(m.live and m.opened_step is not None for m in living):
            return "the groups of the living cannot be rebuilt in place"
        if self.refusal:
            return self.refusal
        if self.lost >= config.replacements_max:
            return (
                f"{plural(self.lost, 'newcomer')} {'was' if self.lost == 1 else 'were'} lost before joining"
            )
        return ""

    def remove(self, torn: Sequence[Member]) -> bool:
        """Kill living ranks whose update broke off (``torn``). Their state is useless, and newcomers replace them.

        Returns: False if no rank was killed: none is torn, all living ranks are torn, or no rank can be replaced.
        """
        living = self.job.roster.living
        if not torn or len(torn) == len(living) or self.barred(living):
            return False
        for member in torn:
            self.job.kill(member, "its update broke", excused=True)
        return True

    def start(self, plan: RecoveryPlan) -> None:
        """Start a newcomer in the seat of each dead rank."""
        dead = [m for m in self.job.roster.members if not m.alive]
        for member in dead:
            if member.exited is not None and not member.joining:
                self._pages[member.rank] = member.exited
        self._awaited = set(plan.decided.sources)
        self._offers, self._addresses = {}, None
        self._seat(dead)
        # With ``takes_kept`` the sources first read the state that was kept in memory, which may take long.
        config = self.job.config
        offer_s = config.offer_s + self.job.settle_s - config.quiesce_s
        self.bounds.begin("offer", self.job.gasp_s if plan.takes_kept else offer_s, reads=plan.takes_kept)

    def adopt(self, former: Mapping[MemberId, int]) -> None:
        """Record the ranks of the members that an earlier controller has replaced, by member id.

        The last status pages of these members are still to come from their agents.
        """
        self._former = dict(former)

    def replaced_exited(self, event: MemberExited) -> None:
        """Record the last status page of a replaced member as evidence of its seat.

        If a seat has had several full members, the newest one counts.
        """
        rank = self._former.get(event.member_id)
        if rank is None or event.detail == NO_PAGE or event.state == "starting":
            return
        known = self._pages.get(rank)
        if known is None or known.member_id < event.member_id:
            self._pages[rank] = event

    def awaits(self, survivor: Member) -> bool:
        """Return whether the survivor has not yet offered its state."""
        return survivor.rank in self._awaited

    @property
    def is_offered(self) -> bool:
        """True if all sources have offered their state, so that newcomers can receive it."""
        return not self._awaited

    def again(self, newcomer: Member) -> bool:
        """Start another newcomer in the seat of a newcomer that died before it had joined.

        Return False if that is not allowed.
        """
        job = self.job
        if newcomer.alive or self.lost >= job.config.replacements_max or not job.places([newcomer]):
            return False
        self._seat([newcomer])
        return True

    def _seat(self, dead: Sequence[Member]) -> None:
        job = self.job
        job.replace_members(dead)
        job.timer("startup", job.config.startup_s)
        self.bounds.begin("join", job.join_s, reads=True)

    def offered(self, member: Member, offer: StateOffered) -> bool:
        """Record the offer of a survivor to serve its state.

        Return True if all sources have offered. The newcomers must then be sent the order to receive, perhaps again.
        """
        self._offers[member.rank] = offer
        self._addresses = None
        self._awaited.discard(member.rank)
        return not self._awaited

    def receive(self, member: Member, plan: RecoveryPlan, turns: int) -> Receive | None:
        """Return the order to receive; None while a source has not offered its state or the newcomer has not asked.

        Args:
            member: the newcomer.
            plan: the plan of the recovery.
            turns: number of epochs and phases that the whole job has finished.
        """
        job = self.job
        if not member.asked or self._awaited:
            return None
        if self._addresses is None:
            self._addresses = {str(rank): (o.host, o.port) for rank, o in sorted(self._offers.items())}
        return Receive(
            member_id=member.member_id,
            generation=job.generation,
            step=job.step,
            sources=self._addresses,
            layouts=job.roster.all_layouts(),
            version=job.roster.agreed(job.world_size),
            local=self.local_of(member),
            kept=plan.takes_kept,
            replays=plan.verdict.replays,
            turns=turns,
        )

    def holds(self, member: Member) -> bool:
        """Return True if the member holds its state, and is therefore a full member.

        A newcomer with an open session holds its state, so this call makes the newcomer a full member.
        """
        if member.joining and member.opened_step is not None:
            self._join(member, member.opened_step)
        return not member.joining

    def _join(self, member: Member, step: int) -> None:
        member.joining = False
        self.job.record(
            "joined",
            rank=member.rank,
            member_id=int(member.member_id),
            step=step,
            generation=str(self.job.generation),
        )

    def joined(self, member: Member, message: Joined) -> Settled:
        """Make a newcomer that holds its state a full member.

        Return the answer that the newcomer would give to a fence.
        """
        self._join(member, message.step)
        return Settled(
            member_id=member.member_id, generation=message.generation, state="ready", step=message.step
        )

    def local_of(self, member: Member) -> bytes:
        """Return the rank-local values (JSON) of a lost rank at the decided step; empty if no page has them.

        The values come from the last status page of the rank, or of the previous full member of its seat. The page of a
        rank that died in its update or in doubt holds the values of two steps.
        """
        left = (self._pages.get(member.rank), None if member.joining else member.exited)
        known = {step: local for page in left if page is not None for step, local in page.locals.items()}
        return known[max(steps)] if (steps := [step for step in known if step <= self.job.step]) else b""

    def reports(self) -> list[RankReport]:
        """Return the state and step of each replaced member, from its last status page."""
        return [RankReport(rank, page.state, page.step, False) for rank, page in sorted(self._pages.items())]

    def went_back(self, step: int) -> None:
        """Lower the steps in the last pages of replaced members to ``step``: all ranks were ordered back to it."""
        self._pages = {
            rank: msgspec.structs.replace(page, state="ready", step=min(page.step, step))
            for rank, page in self._pages.items()
        }

    @property
    def staged(self) -> bool:
        """True if a replaced member had passed its share of a save to its writer process before it died."""
        return any(page.staged_step > 0 for page in self._pages.values())

    def clear(self) -> None:
        """Forget all newcomers, offers and status pages, because the job has resumed or starts again."""
        self.lost = 0
        self.refusal = ""
        self._pages, self._former = {}, {}
        self._offers, self._addresses = {}, None
