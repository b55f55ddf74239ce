"""Nodes and processes of the job: which process ran on which node, which came back and which are lost.

Theory. An agent's reports about the processes of its node count as facts. Its hello lists the living processes.
Next it repeats the last messages of each worker (exits, layouts and others). Then its heartbeats begin. So the first
heartbeat after a hello closes the list. A member that was seated before the hello, is not in the list and was not
reported dead is lost, and has left no status page. A controller of a later term seats the members of the event log and
waits for these lists ("adopting"). Then it either leaves all workers undisturbed or starts a recovery. A recovery that
a fault starts during this wait makes its decision after the wait: before, a state in memory or the last words of a
rank may not be known yet.

Invariants:
1. A member is declared dead once: by its agent, by absence from a closed list, with its node, or because it survives
   SIGKILL.
2. A process that is not a member is ordered to leave, whatever it reports.
3. If an agent returns within the adoption limit with all its members, no fault is counted.
4. No new member is seated while a later controller waits for the lists.
"""

from __future__ import annotations

from holdfast.core.decide.decision import RankReport, committed_floor
from holdfast.core.decide.recovery_phases import NO_PAGE
from holdfast.core.decide.stop_policy import HANG, Failure
from holdfast.core.ids import MemberId, NodeId
from holdfast.core.job.fault import LEFT_FOR_RESTART, Fault, FaultKind, death_of
from holdfast.core.job.job_state import Job
from holdfast.core.job.log_replay import ReplayedState
from holdfast.core.job.membership import Member
from holdfast.core.job.node_faults import announce, count_loss
from holdfast.core.job.recovery import Recovery
from holdfast.core.job.shutdown import Shutdown
from holdfast.core.protocol.messages import (
    AgentHello,
    KillMember,
    Leave,
    MemberExited,
    MemberStarted,
    Rolled,
    WorkerHello,
)
from holdfast.exit_codes import Exit


class NodeTracker:
    """The part of the controller that tracks agents and processes.

    It shares the facts of the run (``job``) with the controller.
    """

    def __init__(self, job: Job, recovery: Recovery, ending: Shutdown, past: ReplayedState) -> None:
        self.job = job
        self.recovery = recovery
        self.ending = ending
        self._past = past
        # By node that has sent a hello and whose list is not closed yet: the members that the hello did not name.
        # Members that are seated after the hello are started by this agent.
        self._returning: dict[NodeId, frozenset[MemberId]] = {}
        job.roster.adopting = bool(past.seats) and (job.config.term > 1 or job.config.alone > 0)
        # Ranks of processes that a hello named before the start of the job (-1: not known to the agent yet). The log
        # does not have their start.
        self._unknown: dict[MemberId, int] = {}
        self._rolled: tuple[NodeId, ...] = ()  # the list of nodes last sent to the agents
        self._may_roll = False
        self._undecided_s: float | None = None  # start of the time without a majority; None: there is one

    def start(self) -> None:
        """Set the timers. In a later term, seat the members that had a seat in the last record of the event log."""
        job = self.job
        job.timer("beat", job.config.beat_s)
        job.timer("startup", job.config.startup_s)
        job.timer("roll", job.config.rejoin_s)
        if job.roster.adopting:
            # With one voter (the survivor of two hosts that a witness chose) members may still be on several nodes.
            if job.liveness.voters or job.config.alone or len({s.node_id for s in self._past.seats}) > 1:
                job.timer("rejoin", job.config.rejoin_s)
            # Dead members of the log whose seats were given away are no members. Their status pages are evidence.
            newest = {s.rank: s for s in (*self._past.seats, *self._past.newcomers)}
            joining = {s.member_id for s in self._past.newcomers}
            members = [
                Member(member_id=s.member_id, rank=s.rank, local_rank=s.local_rank, node_id=s.node_id,
                       joining=s.member_id in joining,
                       said_hello=self._past.opened and s.member_id not in joining)  # to the previous one
                for s in newest.values()
            ]  # fmt: skip
            job.roster.seat(self._past.seated, members)
            seated = {m.member_id for m in members}
            former = (*self._past.seats, *self._past.newcomers)
            self.recovery.replacement.adopt(
                {s.member_id: s.rank for s in former if s.member_id not in seated}
            )
            self.recovery.openings.begin(complete=self._past.opened)

    # ---------------------------------------------------------------- agents

    def agent_hello(self, now: float, event: AgentHello) -> None:
        """Handle the hello of an agent that joins or rejoins, with the list of its living members."""
        job = self.job
        self._back(event.node_id)
        job.slots[event.node_id] = event.slots
        if event.host:
            job.hosts[event.node_id] = (event.host, event.port)
        job.liveness.hello(event.node_id, now)
        job.record("agent_joined", node=str(event.node_id), pid=event.pid, slots=event.slots)
        self._rolled = ()  # this agent may be the successor of an agent that received the list
        self._roll()
        seen = {m.member_id: m for m in event.members}
        for member in job.roster.on_node(event.node_id):
            if member.member_id in seen:
                here = seen[member.member_id]
                member.started, member.pid = True, here.pid
                if here.state != "starting":
                    member.said_hello = True
                    member.report(here.state, here.step)
                if member.kill_reason:  # the order may have been lost with the previous agent
                    job.kill(member, member.kill_reason, 0.0 if job.session else job.config.term_grace_s)
        if not job.config.library:
            self._remove_unknown(event)
        if job.roster.members:
            seated = (member.member_id for member in job.roster.on_node(event.node_id))
            self._returning[event.node_id] = frozenset(each for each in seated if each not in seen)
        elif self.ending.stopping is not None:
            if job.is_assembled:
                self.ending.exited()
        elif not job.config.library and set(job.liveness.voters) <= set(job.slots):
            self._launch(now)
        else:
            # Wait for the other nodes, so that ranks are placed in the order of the nodes' numbers.
            job.timer("assemble", job.config.rejoin_s)
        self._launch_waiting(now)

    def _remove_unknown(self, event: AgentHello) -> None:
        """Kill the processes of a hello that are no members.

        If the event log does not have the start of the job, these processes may hold the newest steps: the host of this
        leader lost power before its copy of the log was written. The job cannot continue from these processes, because
        the log does not have their seats. The loss is recorded: now, or from the last status page of a process that its
        agent has not heard yet.
        """
        job = self.job
        unknown = [m for m in event.members if job.roster.get(m.member_id) is None]
        for member_id in sorted(m.member_id for m in unknown):
            reason = "a process from before a recovery"
            job.send_node(
                event.node_id, KillMember(member_id=member_id, node_id=event.node_id, reason=reason)
            )
        if not job.roster.members:
            self._unknown.update((m.member_id, m.rank) for m in unknown)
            reports = [RankReport(m.rank, m.state, m.step, alive=True) for m in unknown]
            self._forget(event.node_id, reports)

    def _forget(self, node_id: NodeId, reports: list[RankReport]) -> None:
        """Record the steps of processes from a start that the event log does not have, if they hold newer steps."""
        job = self.job
        held = max((committed_floor(report) or 0 for report in reports), default=0)
        if held > job.step:
            ranks = sorted(report.rank for report in reports if report.rank >= 0)
            job.record("start_forgotten", node=str(node_id), ranks=ranks, step=held)
            if not job.session:
                job.decide(held)

    def _roll(self) -> None:
        """Send the agents the list of present nodes. The leader adapts the electorate to it, one voter at a time.

        Nothing is sent until every voter has joined or its time to join is over. A list sent earlier would lack voters
        that are alive but have not joined yet, and these would lose their vote.
        """
        job, present = self.job, self.job.liveness.present
        self._may_roll = self._may_roll or set(job.liveness.voters) <= set(present)
        if job.hosts and self._may_roll and present != self._rolled:
            self._rolled = present
            for node_id in present:
                job.send_node(node_id, Rolled(up=present))

    def _launch(self, now: float) -> None:
        """Start the ranks of the job for the first time, if enough nodes have joined."""
        job = self.job
        idle = not job.roster.members and self.ending.stopping is None
        if idle and not job.config.library and len(job.slots) >= job.config.nnodes:
            self.recovery.launch(now)

    def _launch_waiting(self, now: float) -> None:
        """Start ranks that wait for nodes, if there is room now.

        Each heartbeat calls this, because a node that was only silent for a while sends no second hello.
        """
        if self.recovery.phase == "waiting" and self.job.fits:
            self.recovery.launch(now)

    def agent_beat(self, now: float, node_id: NodeId) -> None:
        """Handle a heartbeat. The first heartbeat after a hello closes the list of members of that node."""
        if self.job.liveness.is_suspected(node_id):
            self._back(node_id)
        self.job.liveness.beat(node_id, now)
        self._launch_waiting(now)
        missing = self._returning.pop(node_id, None)
        if missing is None:
            return
        gone = [m for m in self.job.roster.on_node(node_id) if m.member_id in missing]
        # An order to start may have been lost with the previous agent. A member that was to be killed is not
        # missed.
        unstarted = [m for m in gone if not (m.started or m.kill_reason or self.job.roster.adopting)]
        self.job.start_again(unstarted)
        for member in gone:
            if member not in unstarted:
                self._lose(now, member, "is not there any more")
        if self._adopt_if_closed(now):
            return
        for member in self.job.roster.on_node(node_id):
            self.recovery.remind(member)
            self.ending.remind(member)

    def _back(self, node_id: NodeId) -> None:
        """Start the time limits of a node's members from the beginning, because orders reach the node from now on."""
        for member in self.job.roster.on_node(node_id):
            self.recovery.bounds.moved(member.member_id)

    def agent_gone(self, now: float, node_id: NodeId) -> None:
        """Suspect a node whose agent closed its connection. The agent or its successor may come back."""
        event = self.job.liveness.gone(node_id, now)
        if event is not None:
            self.job.record("node_suspected", node=str(node_id), reason=event.reason)

    def node_lost(self, now: float, node_id: NodeId, reason: str) -> None:
        """Treat a node as lost, with all its members, if a majority of the agents is still connected.

        Without a majority this controller stands down.
        """
        job = self.job
        job.slots.pop(node_id, None)
        self._returning.pop(node_id, None)
        if not job.decides:
            heard = f"only {job.liveness.heard_voters} of {len(job.liveness.voters)} agents are heard"
            job.stand_down(f"{node_id} is lost ({reason}), {heard}")
            return
        self._roll()
        job.roster.lose_memory(node_id)
        for member in job.roster.on_node(node_id):
            self._lose(now, member, f"went with its node: {reason}")

    def _rejoin(self, now: float) -> None:
        """Declare as lost each node whose agent has not joined this new controller within ``rejoin_s`` seconds."""
        job = self.job
        if not job.roster.adopting:
            return
        for node_id in sorted(job.roster.nodes - job.slots.keys()):
            reason = f"its agent did not come within {job.config.rejoin_s:g} s of the controller's start"
            job.record("node_lost", node=str(node_id), reason=reason)
            count_loss(now, job, node_id)
            self.node_lost(now, node_id, reason)
        self._adopt_if_closed(now)

    def _lose(self, now: float, member: Member, what: str) -> None:
        exited = MemberExited(
            member_id=member.member_id,
            node_id=member.node_id,
            generation=self.job.roster.generation,
            code=None,
            signal=None,
            state=member.state,
            step=member.step,
            detail=NO_PAGE,
        )
        member.condemn(what)
        self.job.record("member_lost", member_id=int(member.member_id), rank=member.rank, what=what)
        self.member_exited(now, exited)

    def _adopt_if_closed(self, now: float) -> bool:
        """Adopt the living members once every node is lost or has closed its list. Return True if that happened now."""
        job, roster = self.job, self.job.roster
        if not roster.adopting or self._returning or job.ended or not roster.nodes <= job.slots.keys():
            return False
        self._adopt(now)
        return True

    def _adopt(self, now: float) -> None:
        """Leave the workers undisturbed. If a member was lost while the controller was replaced, start a recovery."""
        job, roster = self.job, self.job.roster
        roster.adopting = False
        dead = [m for m in roster.members if not m.alive]
        fenced = job.generation > roster.generation
        # For a fault that was reported before all lists were closed.
        fencing = self.recovery.phase == "fencing"
        job.record(
            "adopted", members=[m.rank for m in roster.living], dead=[m.rank for m in dead], fenced=fenced
        )
        self.recovery.adopt(now, in_place=self._past.in_place)
        faults = [
            self._fault_of(now, m, m.exited)
            for m in dead
            if m.exited and m.failed is None and not self.ending.is_expected(m, m.exited)
        ]
        if not roster.living and (job.released or all(m.finished for m in roster.members)):
            job.release(job.step)
            self.ending.exited()
        elif faults:
            self.recovery.fault(now, *faults)  # in one call: with no member alive the first restarts all
        elif fenced and not fencing:
            what = "the controller was replaced during a recovery"
            self.recovery.member_fault(now, roster.members[0], "controller", what)
        elif dead:
            self.ending.exited()
        if fencing or not (faults or fenced):
            for member in roster.living:  # members whose agents came last have received no order yet
                self.recovery.remind(member)
                self.ending.remind(member)
        if not job.ended:
            self.recovery.progress(now)  # a fault that was reported before has waited for these lists

    # ---------------------------------------------------------------- processes

    def worker_hello(self, now: float, event: WorkerHello) -> None:
        """Handle the hello of a worker that has connected, for the first time or again."""
        job = self.job
        member = job.roster.get(event.member_id)
        if member is None and job.config.library and self.ending.stopping is None:
            member = self._join_library(event)
        if member is None or not member.alive:
            job.send_process(
                event.member_id,
                Leave(
                    member_id=event.member_id,
                    generation=max(event.generation, job.generation),
                    code=int(Exit.RESTART),
                    reason="a process from before a recovery",
                ),
            )
            return
        member.started = member.said_hello = True
        member.pid = event.pid
        member.report(event.state, event.step)
        if not job.roster.adopting:
            self.recovery.remind(member)
            self.ending.remind(member)
            self.recovery.progress(now)

    def _join_library(self, event: WorkerHello) -> Member | None:
        """Seat a worker that another launcher started (library mode), with the member id that it brings.

        Consecutive ranks are on one node. Return None if the job has no free seat for this rank.
        """
        job = self.job
        per_node = job.config.world_size // job.config.nnodes
        node_id = (
            NodeId(f"node{event.rank // per_node}") if job.config.nnodes > 1 else min(job.slots, default=None)
        )
        if job.roster.at(event.rank) is not None or node_id is None or node_id not in job.slots:
            return None
        if not job.roster.members:
            job.join_generation(event.generation)
            self.recovery.join_started()
        member = Member(
            member_id=event.member_id,
            rank=event.rank,
            local_rank=event.rank % per_node,
            node_id=node_id,
        )
        job.roster.add(member)
        return member

    def member_started(self, now: float, event: MemberStarted) -> None:
        """Record the report of an agent that a worker process exists."""
        member = self.job.roster.get(event.member_id)
        if member is not None and not member.started:
            member.started, member.started_s, member.pid = True, now, event.pid
            self.job.record("member_started", member_id=int(event.member_id), rank=member.rank, pid=event.pid)
            self.recovery.progress(now)

    def member_exited(self, now: float, event: MemberExited) -> None:
        """Handle the end of a worker process: start a recovery if the exit was not expected."""
        job = self.job
        member = job.roster.get(event.member_id)
        if member is None:
            if event.member_id in self._unknown:
                rank = self._unknown.pop(event.member_id)
                self._forget(event.node_id, [RankReport(rank, event.state, event.step, alive=False)])
            self.recovery.replacement.replaced_exited(event)
            return
        if not member.alive:
            return
        job.roster.bury(member, event)
        for name in ("kill", "failing"):
            job.cancel(f"{name}:{member.member_id}")
        job.record(
            "member_exited",
            member_id=int(event.member_id),
            rank=member.rank,
            code=event.code,
            signal=event.signal,
            state=event.state,
            step=event.step,
            phase=event.detail,
            log_size_bytes=event.log_size_bytes,
        )
        if job.roster.adopting:
            return
        if self.ending.is_expected(member, event):
            if not member.is_excused or self.ending.stopping is not None:
                self.ending.exited()
        elif member.failed is None and not member.is_excused and not self._follows(event):
            self.recovery.fault(now, self._fault_of(now, member, event))
        if not job.ended:
            self.recovery.exited(now, member)

    def _follows(self, event: MemberExited) -> bool:
        """Return True if the member left because of a fault for which a recovery is already in progress."""
        known = self.recovery.phase == "fencing" and bool(self.recovery.faults.all)
        return known and event.code == Exit.RESTART

    def _fault_of(self, now: float, member: Member, event: MemberExited) -> Fault:
        if event.signal:
            kind: FaultKind = "signal"
            how = f"was killed by signal {event.signal}"
        elif event.code == Exit.RESTART:
            kind, how = "exit", LEFT_FOR_RESTART
        elif event.code is not None:
            kind, how = "exit", f"ended with code {event.code}"
        else:
            kind, how = "exit", "is gone"
        if member.kill_reason:
            kind, how = "hang" if member.hung_at_s else "silent", member.kill_reason
        job = self.job
        if event.oom_kills and not member.kill_reason:
            how += f", out of memory: oom_kill of its cgroup rose by {event.oom_kills}"
        failure = death_of(
            now, member, event, how, job.generation if member.joining else job.roster.generation
        )
        if member.hung_in:
            failure = Failure(
                rank=member.rank,
                step=event.step,
                kind=HANG,
                what=how,
                digest=f"hang in {member.hung_in}"[:200],
                occurrence=(job.generation if member.joining else job.roster.generation).pack(),
            )
        return Fault.of(member, kind, how, now, failure)

    # ---------------------------------------------------------------- time

    def tick(self, now: float, name: str) -> bool:
        """Handle one of the timers of this class. Return False if ``name`` belongs to another class."""
        kind, _, number = name.partition(":")
        if kind == "beat":
            self._beat(now)
        elif kind == "startup":
            self._startup(now)
        elif kind == "assemble":
            self._launch(now)
        elif kind == "rejoin":
            self._rejoin(now)
        elif kind == "roll":
            self._may_roll = True
            self._roll()
        elif kind in ("kill", "failing"):
            member = self.job.roster.get(MemberId(int(number)))
            if member is not None and member.alive and kind == "failing":
                if self.job.liveness.is_suspected(member.node_id):  # it may not have received the order
                    self.job.timer(name, self.job.config.failing_s)
                else:
                    self.job.time_out(member, "did not exit after its exception")
            elif member is not None and member.alive:
                self._give_up(now, member)
        else:
            return False
        return True

    def _give_up(self, now: float, member: Member) -> None:
        """Give up a member that survives SIGKILL, and ask its agent for the member's status page."""
        if member.given_up:  # the agent of the member has not answered either
            self._lose(now, member, "does not die; it is given up")
            return
        member.given_up = True
        reason = "does not die; it is given up"
        order = KillMember(member_id=member.member_id, node_id=member.node_id, reason=reason, given_up=True)
        self.job.record("member_given_up", member_id=int(member.member_id), rank=member.rank)
        self.job.send_node(member.node_id, order)
        self.job.timer(f"kill:{member.member_id}", self.job.config.leave_s)

    def _beat(self, now: float) -> None:
        job = self.job
        job.timer("beat", job.config.beat_s)
        for event in job.liveness.tick(now):
            job.record(f"node_{event.kind}", node=str(event.node_id), reason=event.reason)
            if event.kind == "lost":
                count_loss(now, job, event.node_id)
                self.node_lost(now, event.node_id, event.reason)
        self._adopt_if_closed(now)
        self._look_at_majority(now)
        # Before the adoption, a node with free slots may be about to join.
        if self._may_roll and not job.roster.adopting:
            announce(now, job)
        self.recovery.grow(now)

    def _look_at_majority(self, now: float) -> None:
        """Continue the work that waits for a majority of the voters.

        Stand down if no majority is heard for too long.
        """
        job = self.job
        if job.decides:
            self._undecided_s = None
            self.ending.look(now)
            if self.recovery.rules.until == "answered":
                self.recovery.progress(now)
        elif self._undecided_s is None:
            self._undecided_s = now
        elif job.roster.members and now - self._undecided_s >= job.config.lost_s + job.config.adoption_s:
            # Voters that have never joined are not reported as lost.
            job.stand_down(f"only {job.liveness.heard_voters} of {len(job.liveness.voters)} agents are heard")

    def _startup(self, now: float) -> None:
        """Remove the members that have not reported within the start-up time. If no agent has reported, end the run."""
        job = self.job
        bound = f"within {job.config.startup_s:g} s"
        if self.recovery.phase == "waiting" and not job.decides:
            # This side does not end the job of the others.
            job.timer("startup", job.config.beat_s)
            return
        if not job.roster.members or self.recovery.phase == "waiting":
            why = (
                f"{len(job.slots)} of {job.config.nnodes} agents joined {bound}: nowhere to run{job.left_out}"
            )
            known = job.sealed_step >= 0 or job.base_step > 0
            job.finish(Exit.REQUEUE if known else Exit.UNSAVED if job.roster.members else Exit.FAILED, why)
            return
        if job.roster.adopting:
            job.roster.adopting = False
            job.finish(Exit.INTERNAL, f"no agent reported its workers {bound}")
            return
        python = any(m.said_hello for m in job.roster.members)
        late = [m for m in job.roster.living if not m.started or (python and not m.said_hello)]
        if not late or job.config.library:
            return
        if any(job.liveness.is_suspected(m.node_id) for m in late):  # their reports may be on the way
            job.timer("startup", job.config.adoption_s)
            late = [m for m in late if not job.liveness.is_suspected(m.node_id)]
        job.record("startup_late", ranks=[m.rank for m in late])
        for member in late:
            if member.started:
                job.time_out(member, f"did not connect {bound}")
            else:
                self._lose(now, member, f"was not started {bound}")
