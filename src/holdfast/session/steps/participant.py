"""One rank's side of the step protocol: state machines, lock, status page and connection to the control plane.

Theory. Two threads act on a rank. The main thread runs user code. The client thread receives faults while the main
thread waits in a collective. Both take one condition variable around ``core.worker.step.StepMachine`` (the state of the
step) and ``core.worker.position.ScriptMachine`` (the position of the script). Only the state of these machines under
that lock is authoritative; the status page (called the page below) shows it to other processes. The rank answers a
fence as soon as its step machine has settled. The main thread never decides an in-doubt step: it waits here for the
decision of the controller.

Invariants:
1. The page shows UPDATE(s) before a weight changes and READY(s+1) only after the block has ended.
2. ``Settled`` is sent once per settled (state, step) of a fence, in order, and again when the script leaves its loop.
3. A wait of the main thread for the control plane ends: by an order, or by leaving if agent and launcher are gone.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import NoReturn

import msgspec

from holdfast.core.ids import NO_GENERATION, NO_VERSION, Generation, LayoutVersion, MemberId
from holdfast.core.protocol.layout_messages import Layout
from holdfast.core.protocol.messages import (
    Catalogued,
    ExitAsked,
    ExitOrder,
    FaultSeen,
    Fence,
    Finished,
    JoinAsked,
    Joined,
    RankState,
    Receive,
    Release,
    ResumeInPlace,
    Settle,
    Settled,
    StateRefused,
    StepReached,
)
from holdfast.core.protocol.status_page import PageFlag, Phase, Word
from holdfast.core.worker.position import REPORTED, ScriptEvent, ScriptMachine
from holdfast.core.worker.step import StepMachine
from holdfast.core.worker.vote import Tally
from holdfast.errors import CheckpointInvalid, GroupError
from holdfast.exit_codes import Exit
from holdfast.frameworks.common.adapter import GroupAdapter, Unsevered
from holdfast.runtime.worker.worker_client import WorkerClient, leave_process
from holdfast.session.steps.participant_calls import ParticipantCalls

POLL_S = 0.5
TEXT_LENGTH_MAX = 1000


class StepParticipant:
    """The rank's part in the step protocol, see the module.

    Args:
        adapter: breaks and rebuilds collectives.
        client: the connection to the agent; None in a process without a launcher, which no controller can fence.

    Attributes:
        script: the position of the script. Call its methods with the lock held.
        turns: number of epochs and phases that the whole job has finished.
        catalogue_version, layouts: the newest layouts of all ranks, as the ranks sent them.
    """

    def __init__(self, adapter: GroupAdapter, client: WorkerClient | None) -> None:
        generation = NO_GENERATION if client is None else client.generation
        self.machine = StepMachine(generation, self._observe)
        self.changed = threading.Condition(threading.RLock())
        self.client = client
        self.exit_source = ""
        self.orphaned = False
        self.released = False
        self.turns = self._decided_turns = 0
        self._settled_in: Generation | None = None
        self.catalogue_version = NO_VERSION
        self.layouts: Mapping[int, Layout] = {}
        self._adapter = adapter
        self._calls = ParticipantCalls()
        self._told: Settled | None = None
        self._resume: ResumeInPlace | None = None
        self._resumed_in: Generation | None = None
        self._receive: Receive | None = None
        self.script = ScriptMachine(joining=client is not None and client.joining)
        self._known = client is None or client.stand_in is None or client.stand_in.called
        self._reached = False
        self._waiting_since_ns = 0  # when the main thread began to wait for the control plane; 0: it does not
        self._block_started_ns = 0
        self._waited_ns = 0
        self._collectives = self._collectives_before = 0

    # ------------------------------------------------------------------ both threads

    @property
    def state(self) -> RankState:
        """State of this rank in the step protocol."""
        return self.machine.state

    @property
    def step(self) -> int:
        """Number of updates done."""
        return self.machine.step

    @property
    def fenced(self) -> bool:
        """True while a newer generation exists that this rank has not joined."""
        return self.machine.fenced is not None

    @property
    def joining(self) -> bool:
        """True while this process, which replaces a lost rank, has not joined the job."""
        return self.script.joining

    @property
    def member_id(self) -> MemberId:
        """Id of this process, which no other process of the job ever has."""
        return MemberId(0) if self.client is None else self.client.member_id

    def take_place(self, generation: Generation) -> None:
        """Reset the step machine of a spare that was called: from now on it is a newcomer that has just started."""
        with self.changed:
            self.machine = StepMachine(generation, self._observe)
            self._known = True

    def _where(self) -> tuple[RankState, int]:
        return (self.machine.state, self.machine.step) if self._known else ("starting", 0)

    def ask_exit(self, source: str) -> None:
        """Set the exit flag of this rank, which the next vote carries to all ranks."""
        with self.changed:
            if self.exit_source:
                return
            self.exit_source = source
        if self.client is not None:
            self.client.send(
                ExitAsked(member_id=self.member_id, generation=self.machine.generation, source=source)
            )

    def fault_seen(self, what: str) -> None:
        """Report a collective that broke here. The controller waits for the death of a process that explains it."""
        with self.changed:
            if not self.fenced:
                self._tell_fault(self.machine.generation, what)

    def _tell_fault(self, generation: Generation, what: str) -> None:
        if self.client is not None:
            text = what[:TEXT_LENGTH_MAX]
            self.client.send(
                FaultSeen(member_id=self.member_id, generation=generation, step=self.step, what=text)
            )

    def freed(self) -> None:
        """Write to the page, once per fence, the time at which this process had left its collectives."""
        if self.client is not None and self.fenced and not self.client.page[Word.FREED_NS]:
            self.client.page[Word.FREED_NS] = time.monotonic_ns()

    def count_collective(self, count: int) -> None:
        """Write the number of collectives that have started to the page. Hot path."""
        if self.client is not None:
            self._collectives = count
            page = self.client.page
            page[Word.COLLECTIVES] = count
            page[Word.SEQUENCE] = count - self._collectives_before
            if self.machine.fenced is not None:
                self.freed()

    def waited(self, since_ns: int, until_ns: int) -> None:
        """Add the time that the main thread waited for peers in this block (CLOCK_MONOTONIC)."""
        self._waited_ns += max(0, until_ns - max(since_ns, self._block_started_ns))

    def flag(self, what: PageFlag, on: bool) -> None:
        """Set or clear a flag of the page. A flag says why the rank may show no progress, for example a compilation."""
        if self.client is not None:
            flags = self.client.page[Word.FLAGS]
            self.client.page[Word.FLAGS] = flags | what if on else flags & ~what

    def _observe(self, old: RankState, new: RankState, step: int) -> None:
        self.changed.notify_all()
        self._answer()

    def _answer(self) -> None:
        """Answer the fence when the machine has settled, and again after a decision or after an error in the script."""
        fenced = self.machine.fenced
        if self.client is None or fenced is None or not self.machine.settled or self.script.restoring:
            return
        now = Settled(
            member_id=self.member_id,
            generation=fenced,
            state=self.machine.state,
            step=self.machine.step,
            away=self.script.away,
            rewind=self.script.offers_rewind,
            turns=self.turns,
        )
        if now != self._told:
            self._told, freed_ns = now, self.client.page[Word.FREED_NS]
            self.client.send(msgspec.structs.replace(now, freed_ns=freed_ns, kept=self._calls.kept()))

    def moved(self, event: ScriptEvent, *, again: bool = False) -> None:
        """Apply an event of the script to its position. For arguments and errors see :meth:`ScriptMachine.handle`."""
        with self.changed:
            self.script.handle(event, again=again)
            self.changed.notify_all()
            if event in REPORTED:
                self._answer()

    # ------------------------------------------------------------------ client thread

    def connect(self, calls: ParticipantCalls) -> None:
        """Register the handlers of the client's messages; ``calls`` are the functions of the session that they use."""
        self._calls = calls
        client = self.client
        if client is None:
            return
        client.hello = self._where
        client.on(Fence, self.on_fence)
        client.on(Settle, self.on_settle)
        client.on(ResumeInPlace, self.on_resume)
        client.on(Receive, self.on_receive)
        client.on(Release, self.on_release)
        client.on(ExitOrder, self.on_exit_order)
        client.on(Catalogued, self.on_catalogued)
        client.on_orphaned(self.on_orphaned)

    def on_fence(self, fence: Fence) -> None:
        """Leave the old generation: stop at the next boundary of a step, break every collective, answer the fence."""
        with self.changed:
            if not self.machine.fence(fence.generation):
                return
            if self.client is not None:
                self.client.page[Word.FREED_NS] = self._waiting_since_ns
                if self.machine.state == "aborted":
                    self.client.page.place(self.step, Phase.ABORTED)
            self._resume = None
            self._answer()
        self._adapter.poison(f"fenced: {fence.reason}")
        if self.client is not None and self.client.page.flight.rests():
            self.freed()  # the main thread computes; the rest of its step needs no peers

    def on_settle(self, settle: Settle) -> None:
        """Apply the decision of the controller to the step machine."""
        with self.changed:
            if self.machine.fenced != settle.generation:
                return
            self._settled_in, self._decided_turns = settle.generation, settle.turns
            self.machine.decide(settle.step)
            self.changed.notify_all()
        self._calls.settle(settle)

    def on_resume(self, resume: ResumeInPlace) -> None:
        """Let the main thread rebuild the groups of the new generation.

        A new controller repeats this order, because it does not know which ranks have received it.
        """
        if resume.generation == self._resumed_in:
            return
        self._calls.resume()
        with self.changed:
            self._resume = resume
            self._reached = False
            self.changed.notify_all()

    def on_receive(self, receive: Receive) -> None:
        """Note that the survivors serve their state to this process."""
        with self.changed:
            self._receive = receive
            self.changed.notify_all()

    def on_release(self, release: Release) -> None:
        """Note that every rank has finished."""
        with self.changed:
            self.released = True
            self.changed.notify_all()

    def on_exit_order(self, order: ExitOrder) -> None:
        """Set the exit flag, or clear it; it can be cleared until the ranks have agreed to exit."""
        with self.changed:
            self.exit_source = "" if order.cancel else order.source
            self.changed.notify_all()

    def on_catalogued(self, message: Catalogued) -> None:
        """Keep the layouts of all ranks if they are newer than the known ones."""
        with self.changed:
            if message.version > self.catalogue_version:
                self.catalogue_version = message.version
                self.layouts = message.layouts.by_rank()
                if self.client is not None:
                    self.client.repeat(message)
            self.changed.notify_all()

    def on_orphaned(self) -> None:
        """Set the exit flag: launcher and agent are gone. The ranks can agree on the exit by their vote alone."""
        with self.changed:
            self.orphaned = True
            self.exit_source = self.exit_source or "launcher and agent are lost"
            self.changed.notify_all()

    # ------------------------------------------------------------------ main thread

    def enter(self, phase: Phase) -> None:
        """Show the phase on the page. A drill can make the process stop, end or fail here."""
        if self.client is not None:
            self.client.page.enter(phase, self.machine.step)

    def announce(self, section: str) -> None:
        """Show on the page that a section begins, in which a long time without progress is no hang."""
        if self.client is not None:
            self.client.page.announce(section)
            if not self.fenced:
                self.enter(Phase.SECTION)

    def begin(self) -> bool:
        """Begin the block (READY -> COMPUTE). Return False if a fence came first."""
        with self.changed:
            begun = self.machine.begin()
            self.script.handle(ScriptEvent.BLOCK_BEGUN if begun else ScriptEvent.HELD)
            self.changed.notify_all()
        if begun:
            self._block_started_ns = time.monotonic_ns()
            self._waited_ns = 0
            self._collectives_before = self._collectives
            if self.client is not None:
                self.client.page[Word.SEQUENCE] = 0
        return begun

    def enter_vote(self) -> bool:
        """Enter the vote (COMPUTE -> VOTING). Return False if the step has been aborted."""
        with self.changed:
            return self.machine.enter_vote()

    def computed(self, at_ns: int) -> None:
        """Write to the page how long this block took to compute its gradients, without the time of waiting for peers.

        Args:
            at_ns: CLOCK_MONOTONIC when the gradients were there.
        """
        busy_ns = at_ns - self._block_started_ns - self._waited_ns
        if self.client is not None:
            page = self.client.page
            page[Word.BUSY_NS] = max(busy_ns, 1)
            page[Word.USUAL_SEQUENCE] = page[Word.SEQUENCE]

    def voted(self, tally: Tally) -> RankState:
        """Apply a completed vote to the step machine. Return the new state."""
        with self.changed:
            state = self.machine.vote_passed() if tally.passed else self.machine.vote_refused()
        if not (tally.passed or tally.differ or tally.nonfinite):  # these are reported in detail elsewhere
            self.fault_seen(f"step {self.step}: {tally.reason}")
        return state

    def vote_broken(self) -> RankState:
        """Record that the vote did not complete on this rank. Return the new state."""
        with self.changed:
            return self.machine.vote_broken()

    def fail(self) -> RankState:
        """Record that an exception has left the block. Return the new state."""
        with self.changed:
            return self.machine.fail()

    def note_local(self, payload: bytes | None, step: int) -> None:
        """Write this rank's own values of ``step`` (data position, ``Session.own``) to the page; None: they stay."""
        if self.client is not None and payload is not None:
            self.client.page.write_local(step, payload)

    def commit(self, payload: bytes | None) -> None:
        """Commit (UPDATING(s) -> READY(s+1)), after writing this rank's own values of s+1 to the page."""
        page = None if self.client is None else self.client.page
        self.note_local(payload, self.step + 1)
        with self.changed:
            self.script.handle(ScriptEvent.BLOCK_ENDED)
            self.machine.end_block()
        if page is not None:
            page[Word.COMMITTED] = self.step
            page[Word.DONE] += 1
            page[Word.STEP_NS] = time.monotonic_ns() - self._block_started_ns
        self.enter(Phase.READY)
        if self.client is not None and not self._reached and not self.fenced:
            self._reached = True
            self.client.send(
                StepReached(member_id=self.member_id, generation=self.machine.generation, step=self.step)
            )

    def retry_now(self) -> bool:
        """Make an aborted step ready again (ABORTED -> READY), same generation. Return False if a fence came first."""
        with self.changed:
            return self.machine.retry(self.machine.generation) if not self.fenced else False

    def await_decision(self) -> bool:
        """Wait, IN_DOUBT, for the decision of the controller. Return True if the update is to be applied."""
        self.enter(Phase.IN_DOUBT)
        self.freed()
        with self.changed:
            self._answer()
            self._wait(lambda: self.machine.state != "in_doubt")
            return self.machine.state == "updating"

    def await_resume(self) -> None:
        """Wait for the order to continue in a new generation, and join it. Leave the process if it is ordered to."""
        self.freed()
        self._waiting_since_ns = time.monotonic_ns()
        while True:
            with self.changed:
                self._wait(lambda: self._resume is not None)
                self._waiting_since_ns = 0
                if self.client is not None:
                    self.client.page[Word.FREED_NS] = (
                        0  # the time belongs to this fault; the next fault sets its own
                    )
                resume = self._resume
                assert resume is not None
                self._resume = None
            if resume.step < self.step:
                if not 0 <= self.script.rewinds_to <= resume.step:
                    continue  # the script has left that loop since, and has reported that: all ranks are fenced again
                self._go_back(resume.step)
            with self.changed:
                if self.machine.fenced is not None and self.machine.fenced > resume.generation:
                    continue
            try:
                self._adapter.reconfigure(resume.generation)
            except Unsevered:
                leave_process(Exit.RESTART)
            except GroupError as error:
                # Another fault came while the groups were built, or the groups cannot be rebuilt in this process.
                fenced = self.machine.fenced
                if fenced is None or fenced <= resume.generation:
                    self._tell_fault(resume.generation, str(error))
                continue
            with self.changed:
                if self.machine.retry(resume.generation):
                    self._resumed_in = resume.generation
                    self.script.join()
                    if self.client is not None:
                        self.client.resumed(resume.generation)
                    return

    def _go_back(self, step: int) -> None:
        """Restore the kept state of ``step``, which was found intact. A fence that comes meanwhile is answered
        afterwards.
        """
        with self.changed:
            self.script.begin_restore()
        try:
            self._calls.rewind(step)
        except CheckpointInvalid:
            leave_process(Exit.RESTART)  # the state is a mix of two steps: this process is lost
        with self.changed:
            self.script.end_restore()
            self.machine.rewind(step)
        self.enter(Phase.READY)

    def refuse(self, generation: Generation, step: int, error: CheckpointInvalid) -> None:
        """Report that this rank's state in the memory tier is damaged. The controller then decides again."""
        if self.client is not None:
            why = error.message[:TEXT_LENGTH_MAX]
            self.client.send(
                StateRefused(member_id=self.member_id, generation=generation, step=step, reason=why)
            )

    def await_receive(self) -> Receive:
        """Ask for the state of the lost rank, and wait until the survivors serve it. Return their order."""
        assert self.client is not None
        self.client.send(JoinAsked(member_id=self.member_id, generation=self.machine.generation))
        with self.changed:
            self._wait(lambda: self._receive is not None)
            assert self._receive is not None
            return self._receive

    def join(self) -> None:
        """Report that this newcomer is ready for its first step, and wait until the job continues."""
        if not self.joining or self.client is None:
            return
        with self.changed:
            self.script.join()
            self.script.handle(ScriptEvent.HELD)  # at its block: when fenced, it gives its state
            self.changed.notify_all()
        self.client.send(Joined(member_id=self.member_id, generation=self.machine.generation, step=self.step))
        self._calls.joined(self.step)
        self.await_resume()

    def take_step(self) -> bool:
        """Determine the next step of the loop. Return False if a recovery came first: it may be another step now."""
        with self.changed:
            if not self.fenced:
                self.script.handle(ScriptEvent.STEP_TAKEN)
                return True
        self.await_resume()
        return False

    def leave_loop(self) -> bool:
        """Record that the loop of steps is over. Return False if a recovery came first: check the loop again."""
        with self.changed:
            if self.script.rewinds_to < 0 or not self.fenced:
                self.script.forbid_rewind()
                return True
        self.await_resume()
        return False

    def await_end(self, phase: Phase | None = None) -> NoReturn:
        """Serve the state of this process until an order or a kill ends it. Never returns."""
        if phase is not None:
            self.enter(phase)
        self.freed()
        with self.changed:
            self._answer()
            while True:
                self._wait(lambda: False)

    def await_word(self, limit_s: float) -> None:
        """Serve this rank's state after an error in user code, until no rank needs it or ``limit_s`` is over."""
        if self.state == "aborted":
            self.enter(Phase.ABORTED)
        self.freed()
        self._await_release(limit_s)

    def await_fence(self) -> None:
        """Wait for the fence that the controller sends to all ranks, because a vote between two steps broke."""
        self.freed()
        with self.changed:
            self._wait(lambda: self.fenced)

    def pass_turn(self) -> bool:
        """Count a turn that all ranks have finished. Return False without counting if a fence came first."""
        with self.changed:
            self.turns += not self.fenced
            return not self.fenced

    def await_turns(self) -> int:
        """Wait for the decision after a fence at the end of a turn. Return how many turns the job has finished."""
        self.freed()
        with self.changed:
            self._wait(lambda: self._resume is not None or self._settled_in == self.machine.fenced)
            self.turns = max(self.turns, self._decided_turns)
            return self.turns

    def staged(self, step: int) -> None:
        """Write to the page that a writer process has this rank's share of the save of ``step``."""
        if self.client is not None:
            self.client.page[Word.STAGED] = step

    def repeated(self) -> None:
        """Count on the page a run of a block that was aborted and will be repeated."""
        if self.client is not None:
            self.client.page[Word.REPEATED] += 1

    def finish(self, reason: str, sealed: bool) -> bool:
        """Finish (READY -> FINISHED) and wait for all ranks. Return False if a recovery that needs it came first."""
        with self.changed:
            if self.fenced and not self.orphaned:
                return False
            self.machine.finish()
        self.enter(Phase.FINISHED)
        if self.client is not None and not self.orphaned:
            self.client.send(
                Finished(
                    member_id=self.member_id,
                    generation=self.machine.generation,
                    step=self.step,
                    reason="exit" if reason == "exit" else "done",
                    sealed=sealed,
                )
            )
            self._await_release()
            self.enter(Phase.FINISHED if reason == "exit" else Phase.AFTER)
        return True

    def await_catalogue(self, version: LayoutVersion, timeout_s: float) -> None:
        """Wait for the layouts of all ranks at ``version``, until a fence comes or ``timeout_s`` is over."""
        deadline_s = time.monotonic() + timeout_s
        with self.changed:
            while self.catalogue_version < version:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or self.fenced or self.orphaned:
                    return
                self.changed.wait(min(left_s, POLL_S))

    def _await_release(self, limit_s: float = math.inf) -> None:
        deadline_s = time.monotonic() + limit_s
        with self.changed:
            while not (self.released or self.orphaned) and (self.fenced or time.monotonic() < deadline_s):
                self.changed.wait(POLL_S)

    def _wait(self, ready: Callable[[], bool]) -> None:
        while not ready():
            if self.orphaned:  # no controller is left: the newest sealed checkpoint counts
                leave_process(Exit.ORPHANED)
            self.changed.wait(POLL_S)
