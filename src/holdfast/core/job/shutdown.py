"""The end of a run: by a graceful exit, by an immediate stop, or because all its ranks are done.

Theory. A graceful exit is a flag in the vote, so the request has to reach only one rank. The controller still sends the
request to all ranks, keeps it across recoveries, and enforces the deadline. The agent that forwarded the request
repeats it to the next controller, because the first one may die before it has read the request. A session that is done
waits for the order ``Release``: while one rank still works, any other rank may be needed to recover it. After
``Release`` the script may run a final evaluation or an export. If one rank fails in that code, all ranks run it again:
their sessions start at the last step and have no steps left.

Invariants:
1. ``Release`` is sent only when every rank of the generation has finished.
2. A run that was asked to exit ends with the exit code REQUEUE (start the job again) only if a checkpoint of its last
   step is sealed.
3. A rank that is lost after the request is not replaced if the other ranks hold its state: they save that state and
   leave.
4. A process that dies after ``Release`` is a fault if a checkpoint of the last step is sealed: all ranks restart from
   this checkpoint.
5. Once the run is being ended (``stopping`` is set), every death is expected, and no process is started.
6. A leader that hears no majority of the voters takes no request and ends nothing: the request waits for a majority, or
   for the next leader, to which the agents repeat it.
7. A controller that is alone asks no rank for the exit. Its ranks may still be in a process group with ranks of the
   majority, where one flag in one vote ends the whole job.
"""

from __future__ import annotations

from holdfast.core.job.completion import AllOf
from holdfast.core.job.job_state import Job
from holdfast.core.job.membership import Member, node_order
from holdfast.core.job.recovery import Recovery
from holdfast.core.job.situation import CONSEQUENCES
from holdfast.core.protocol.messages import ExitCancelled, ExitOrder, Finished, MemberExited, Release
from holdfast.core.protocol.status_page import Phase
from holdfast.exit_codes import Exit

EXPECTED_CODES = frozenset({0, int(Exit.REQUEUE), int(Exit.UNSAVED)})


class Shutdown:
    """The part of the controller that ends the run.

    It shares the facts of the run (``job``) with the controller.
    """

    def __init__(self, job: Job, recovery: Recovery) -> None:
        self.job = job
        self.recovery = recovery
        self.stopping: tuple[Exit, str] | None = None
        self._waiting: tuple[str, float] | None = (
            None  # source and deadline of a request that waits for a majority
        )
        self._rollcall = AllOf()

    def start(self) -> None:
        """Start the deadline of an exit request that an earlier controller took.

        The deadline starts in full, because the remaining time is lost with that controller. The agent that forwarded
        the request knows the remaining time and repeats the request with it.
        """
        if self.job.exit_source:
            self.job.timer("exit", self.job.config.grace_s)

    def request(self, now: float, source: str, grace_s: float) -> None:
        """Begin a graceful exit within ``grace_s`` seconds. A repeated request changes only the deadline."""
        job = self.job
        if self.stopping is not None or job.released:
            return
        if job.roster.members and not job.decides:
            self._waiting = (source, now + grace_s)
            return
        self._waiting = None
        first = not job.exit_source
        if first:
            job.exit_source = source
            job.record("exit_requested", source=source, grace_s=grace_s)
        job.timer("exit", grace_s)
        if not job.session:
            self._stop(Exit.UNSAVED, self._asked(), min(grace_s, job.config.term_grace_s))
            return
        if first and self.recovery.only_replaces:
            self.recovery.fence(now, self._asked())
        for member in job.roster.living:
            self.remind(member)

    def look(self, now: float) -> None:
        """Handle the exit request that waits for a majority of the voters, now that a majority is heard."""
        if self._waiting is not None:
            source, due_s = self._waiting
            self.request(now, source, max(0.0, due_s - now))

    def cancel(self, source: str) -> None:
        """Withdraw the exit request, unless the ranks have agreed to exit or the run is ending already."""
        job, self._waiting = self.job, None
        begun = job.agreed_step is not None or self.stopping is not None or self.recovery.ends
        done = bool(job.exit_source) and not begun
        job.record("exit_cancelled", source=source, done=done)
        if done or not job.exit_source:
            for node_id in sorted(job.slots, key=node_order):
                job.send_node(node_id, ExitCancelled(source=source))
        if not done:
            return
        job.exit_source = ""
        job.cancel("exit")
        for member in job.roster.living:
            order = ExitOrder(
                member_id=member.member_id, generation=job.generation, source=source, cancel=True
            )
            job.send(member, order)

    def agreed(self, step: int) -> None:
        """Record that a vote carried the exit request: all ranks save ``step`` and leave."""
        if self.job.config.alone:
            return  # the whole job voted, and its leader handles the result
        if self.job.agreed_step != step:  # after a fault the ranks may agree again, at another step
            self.job.agreed_step = step
            self.job.record("exit_agreed", step=step)
        if not self.job.exit_source:  # the request was lost with a controller: its source is not known
            self.job.exit_source = "vote"
            self.job.timer("exit", self.job.config.grace_s)

    def stop(self, reason: str) -> None:
        """End the run at once, without a save."""
        self._stop(Exit.INTERRUPTED, reason, 0.0)

    def deadline(self) -> None:
        """End the run, because the graceful exit took longer than its deadline."""
        if not self.job.decides:
            self.job.timer("exit", self.job.config.beat_s)
        elif self._is_saved():
            self._stop(Exit.REQUEUE, "the checkpoint is saved, but not every process left in time", 0.0)
        else:
            self._stop(Exit.UNSAVED, f"{self._asked()}: the deadline has passed", 0.0)

    def finished(self, member: Member, message: Finished) -> None:
        """Record that the session of one rank is done."""
        member.finished = message
        self.job.finished(message.step, sealed=message.sealed)

    def release(self) -> None:
        """Send ``Release`` (the session may end) to all ranks, if all ranks have finished."""
        job, members = self.job, self.job.roster.members
        if job.released or len(members) < job.world_size:
            return
        if not self._rollcall.all(members, lambda m: m.finished):
            return
        job.release(max(m.finished.step for m in members if m.finished))
        job.record("finished", step=job.step, reason=str(members[0].finished and members[0].finished.reason))
        for member in job.roster.living:
            self.remind(member)

    def remind(self, member: Member) -> None:
        """Send the message about the end again to a member that has reconnected or just opened its session.

        The message is :class:`Release` if the member may end. It is the exit order if an exit was requested. Otherwise
        nothing is sent.
        """
        job, who = self.job, member.member_id
        if job.released or member.may_end:
            job.send(member, Release(member_id=who, generation=job.generation))
        elif job.exit_source and job.session and not job.config.alone:
            job.send(member, ExitOrder(member_id=who, generation=job.generation, source=job.exit_source))

    def is_expected(self, member: Member, exited: MemberExited) -> bool:
        """Return True if the exit of this process is not a fault."""
        job, over = self.job, exited.detail == Phase.LEFT.name.lower()  # over: its script had ended
        if self.stopping is not None or (job.released and (over or not job.repeats)):
            return True
        done = member.finished is not None or not self.job.session
        return done and exited.code == 0 and exited.signal is None

    def exited(self) -> None:
        """End the run if no member is alive and all exits were expected."""
        job = self.job
        if job.roster.living:
            return
        if self.stopping is not None:
            job.finish(*self.stopping)
        elif all(m.finished or job.released for m in job.roster.members):
            job.finish(*self._outcome())
        elif not job.session and all(m.exited and m.exited.code == 0 for m in job.roster.members):
            job.finish(Exit.OK, "every process ended with code 0")

    def _outcome(self) -> tuple[Exit, str]:
        members = self.job.roster.members
        for member in sorted(members, key=lambda m: m.failed is not None and m.failed.kind in CONSEQUENCES):
            failed, exited = member.failed, member.exited
            if failed is not None:
                code = Exit.BAD_INPUT if failed.user_error else Exit.FAILED
                return code, f"rank {member.rank} failed after training: {failed.kind}: {failed.what}"
            if exited and (exited.signal or (exited.code or 0) not in EXPECTED_CODES):
                how = f"signal {exited.signal}" if exited.signal else f"code {exited.code}"
                return Exit.FAILED, f"rank {member.rank} ended with {how} after training"
        if any(m.finished and m.finished.reason == "exit" for m in self.job.roster.members):
            if self._is_saved():
                return Exit.REQUEUE, f"{self._asked()}: step {self.job.step} is saved"
            return Exit.UNSAVED, f"{self._asked()}: no checkpoint was saved"
        return Exit.OK, f"training is done at step {self.job.step}"

    def _asked(self) -> str:
        return f"asked to exit ({self.job.exit_source or 'by a worker'})"

    def _is_saved(self) -> bool:
        step = self.job.step if self.job.agreed_step is None else self.job.agreed_step
        return 0 <= step <= self.job.sealed_step

    def _stop(self, code: Exit, reason: str, grace_s: float) -> None:
        job = self.job
        if self.stopping is None or code is Exit.INTERRUPTED:
            self.stopping = (code, reason)
        self.recovery.stop()
        for member in job.roster.living:
            job.kill(member, reason, grace_s)
        if job.roster.members or job.is_assembled:
            self.exited()
        else:
            # Wait for nodes that have yet to join: they would not learn otherwise that the run is over.
            job.timer("together", job.config.rejoin_s)
