"""One rank's side of the step protocol: state machines, lock, status page and connection to the agent.

Theory. Three threads act on a rank. The main thread runs user code. The client thread receives the messages of the
agent, even while the main thread waits in a collective. The task thread carries out the orders of a decision. All three
use one state machine (``core.worker.worker_machine.WorkerMachine``, called *the machine* here) under one lock. The
machine has the state of the step, the position of the script and the orders that wait. Only the machine is
authoritative; the status page shows its state to other processes. This module makes no decision of the protocol: it
passes messages and events to the machine, and executes the resulting commands. The main thread blocks until the machine
lets it continue.

Invariants:
1. The status page shows UPDATE(s), the update of step s, before a weight changes. It shows READY(s+1) only after the
   block has ended.
2. Commands that send a message are executed under the lock, so messages are sent in the order of the commands.
3. Each wait of the main thread for the control plane ends. Either an order comes, or agent and launcher are gone and
   the process ends.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import NoReturn

import msgspec

from holdfast.core.ids import NO_GENERATION, NO_VERSION, Generation, MemberId
from holdfast.core.protocol.layout_messages import Layout
from holdfast.core.protocol.messages import (
    Catalogued,
    Command,
    ExitAsked,
    ExitOrder,
    FaultSeen,
    Fence,
    Finished,
    JoinAsked,
    Joined,
    Message,
    RankState,
    Receive,
    Release,
    ResumeInPlace,
    Settle,
    StateRefused,
    StepReached,
)
from holdfast.core.protocol.status_page import PageFlag, Phase, Word
from holdfast.core.worker.position import ScriptEvent
from holdfast.core.worker.vote import Tally
from holdfast.core.worker.worker_machine import (
    ADVANCED,
    WAIT_REACHED,
    Advanced,
    AnswerFence,
    BreakCollectives,
    BuildGroups,
    ContinueStep,
    GroupsBuilt,
    ReportBroken,
    RestoreState,
    StateRestored,
    WorkerMachine,
)
from holdfast.errors import CheckpointInvalid, GroupError
from holdfast.exit_codes import Exit
from holdfast.frameworks.common.adapter import GroupAdapter, GroupsDiffer, Unsevered
from holdfast.runtime.worker.worker_client import WorkerClient, leave_process
from holdfast.session.steps.block_timer import BlockTimer
from holdfast.session.steps.order_tasks import POLL_S, OrderTasks
from holdfast.session.steps.participant_calls import ParticipantCalls

log = logging.getLogger("holdfast")

TEXT_LENGTH_MAX = 1000
NO_MEMBER = MemberId(0)


class StepParticipant:
    """One rank's side of the step protocol: it executes the commands of the rank's state machine.

    Args:
        adapter: the framework, which breaks and rebuilds collectives.
        client: the connection to the agent; None in a process without an agent, which no controller can fence.

    Attributes:
        machine: the state machine of the step, which only this object changes.
        script: the position of the script. Call its methods with the lock held.
        changed: the lock, a condition that is notified after each change.
        exit_source: name of the signal or file that asks this rank to leave; empty if there is none.
        orphaned: launcher and agent are gone. released: all ranks have finished.
        catalogue_version, layouts: the newest known layouts of all ranks, by rank, and their version.
        timer: the times of the open block.
    """

    def __init__(self, adapter: GroupAdapter, client: WorkerClient | None) -> None:
        generation = NO_GENERATION if client is None else client.generation
        joining = client is not None and client.joining
        member_id = NO_MEMBER if client is None else client.member_id
        self._worker = WorkerMachine(member_id, generation, joining=joining)
        self.machine, self.script = self._worker.steps, self._worker.script
        self.changed = threading.Condition(threading.RLock())
        self.client = client
        self.exit_source = ""
        self.orphaned = False
        self.released = False
        self.catalogue_version = NO_VERSION
        self.layouts: Mapping[int, Layout] = {}
        self._adapter = adapter
        self._tasks = OrderTasks(self._worker, self.changed, self._report)
        self._known = client is None or client.stand_in is None or client.stand_in.called
        self._waiting_since_ns = 0  # when the main thread began to wait for the control plane; 0: it does not
        self.timer = BlockTimer()
        self._collectives = self._collectives_before = 0

    # ------------------------------------------------------------------ all threads

    @property
    def turns(self) -> int:
        """Number of epochs and phases that the whole job has finished, as known to this rank."""
        return self._worker.turns

    @property
    def state(self) -> RankState:
        """State of this rank in the step protocol."""
        return self.machine.state

    @property
    def step(self) -> int:
        """Number of committed updates."""
        return self.machine.step

    @property
    def fenced(self) -> bool:
        """True while a newer generation exists that this rank has not joined."""
        return self.machine.fenced is not None

    @property
    def reached(self) -> bool:
        """True if every rank has committed a step in the generation of this rank."""
        return self._worker.reached

    @property
    def joining(self) -> bool:
        """True while this process, which replaces a lost rank, has not joined the job."""
        return self.script.joining

    @property
    def member_id(self) -> MemberId:
        """Id of this process, which is never used again in the job."""
        return NO_MEMBER if self.client is None else self.client.member_id

    def take_place(self, generation: Generation) -> None:
        """Make this process, a called spare, a newcomer that starts in ``generation``."""
        with self.changed:
            self._worker.take_place(self.member_id, generation)
            self.machine = self._worker.steps
            self._known = True

    def open(self, step: int) -> None:
        """Open the session after ``step`` committed updates (STARTING -> READY)."""
        with self.changed:
            self.machine.open(step)
            self._advanced()

    def stand_at_turn(self, turns: int) -> None:
        """Record ``turns``, the number of epochs and phases that were finished in the loaded state."""
        with self.changed:
            self._worker.stand_at_turn(turns)

    def _where(self) -> tuple[RankState, int]:
        return (self.machine.state, self.machine.step) if self._known else ("starting", 0)

    def ask_exit(self, source: str) -> None:
        """Ask the job to leave, for ``source`` (a signal or file). The next vote carries the request to all ranks."""
        with self.changed:
            if self.exit_source:
                return
            self.exit_source = source
        if self.client is not None:
            self.client.send(
                ExitAsked(member_id=self.member_id, generation=self.machine.generation, source=source)
            )

    def fault_seen(self, what: str) -> None:
        """Report that a collective broke with error ``what``. The controller waits for a death that explains this."""
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
        """If this rank is fenced, write once to the status page when this process had left its collectives."""
        if self.client is not None and self.fenced and not self.client.page[Word.FREED_NS]:
            self.client.page[Word.FREED_NS] = time.monotonic_ns()

    def count_collective(self, count: int) -> None:
        """Write ``count``, the number of collectives started in this process, to the status page. Hot path."""
        if self.client is not None:
            self._collectives = count
            page = self.client.page
            page[Word.COLLECTIVES] = count
            page[Word.SEQUENCE] = count - self._collectives_before
            if self.machine.fenced is not None:
                self.freed()

    def flag(self, what: PageFlag, on: bool) -> None:
        """Set or clear a flag of the status page: the reason why this rank may show no progress (a compilation)."""
        if self.client is not None:
            flags = self.client.page[Word.FLAGS]
            self.client.page[Word.FLAGS] = flags | what if on else flags & ~what

    def _advanced(self, event: ScriptEvent | None = None) -> None:
        """Wake all waiting threads after a change of the step or script. If the rank is fenced, report the change.

        The caller holds the lock. Hot path. ``event``: the event of the script; None if the step has changed.
        """
        self.changed.notify_all()
        if self.machine.fenced is not None:
            self._report(ADVANCED if event is None else Advanced(event))

    def moved(self, event: ScriptEvent, *, again: bool = False) -> None:
        """Apply ``event`` to the position of the script; ``again``: the code before the block has already run."""
        with self.changed:
            self.script.handle(event, again=again)
            self._advanced(event)

    # ------------------------------------------------------------------ the machine

    def _report(self, event: Message) -> tuple[Command, ...]:
        """Pass an event to the state machine. Execute short commands, queue long ones, and return all commands."""
        with self.changed:
            commands = self._worker.handle(time.monotonic(), event)
            for command in commands:
                self._execute(command)
            self.changed.notify_all()
        return commands

    def _execute(self, command: Command) -> None:
        match command:
            case AnswerFence() if self.client is not None:
                freed_ns = self.client.page[Word.FREED_NS]
                answer = msgspec.structs.replace(
                    command.answer,
                    freed_ns=freed_ns,
                    kept=self._tasks.calls.kept(),
                    outside=self._tasks.calls.outside(),
                    loop=self._tasks.calls.loop(),
                )
                self.client.send(answer)
            case BreakCollectives() if self.client is not None:
                self.client.page[Word.FREED_NS] = self._waiting_since_ns
                if self.machine.state == "aborted":
                    self.client.page.place(self.step, Phase.ABORTED)
            case ReportBroken() if command.differ:
                self.refuse(command.generation, self.step, command.reason, alone=True)
            case ReportBroken():
                self._tell_fault(command.generation, command.reason)
            case ContinueStep() if self.client is not None:
                self.client.resumed(command.generation)
            case _:
                self._tasks.take(command)

    # ------------------------------------------------------------------ client thread

    def connect(self, calls: ParticipantCalls) -> None:
        """Register the handlers for messages of the agent.

        The handlers and the task thread call the session's functions in ``calls``.
        """
        self._tasks.calls = calls
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
        """Follow an order to leave the old generation: break all collectives, and answer when the step has settled."""
        for command in self._report(fence):
            if isinstance(command, BreakCollectives):
                self._adapter.poison(f"fenced: {command.reason}")
                if self.client is not None and self.client.page.flight.rests():
                    self.freed()  # the main thread computes; the rest of its step needs no peers

    def on_settle(self, settle: Settle) -> None:
        """Apply a decision of the controller. The task thread carries out the orders of the decision."""
        self._report(settle)
        if self.client is not None and self._tasks.any:
            self.client.run_task(self._tasks.run)

    def on_resume(self, resume: ResumeInPlace) -> None:
        """Stop serving this rank's state, and let the main thread build the groups of the new generation."""
        self._tasks.end_serving(self._report(resume))

    def on_receive(self, receive: Receive) -> None:
        """Record that the survivors now serve their state to this newcomer."""
        self._report(receive)

    def on_release(self, release: Release) -> None:
        """Record that every rank has finished, so that this process may end."""
        with self.changed:
            self.released = True
            self.changed.notify_all()

    def on_exit_order(self, order: ExitOrder) -> None:
        """Set the exit request of this rank, or clear it if ``order.cancel``. An agreed exit cannot be cleared."""
        with self.changed:
            self.exit_source = "" if order.cancel else order.source
            self.changed.notify_all()

    def on_catalogued(self, message: Catalogued) -> None:
        """Take over the layouts of all ranks from ``message`` if they are newer than the known ones."""
        with self.changed:
            if message.version > self.catalogue_version:
                self.catalogue_version = message.version
                self.layouts = message.layouts.by_rank()
                if self.client is not None:
                    self.client.repeat(message)
            self.changed.notify_all()

    def on_orphaned(self) -> None:
        """Ask the job to leave, because launcher and agent are gone. The ranks agree on the exit by a vote alone."""
        with self.changed:
            self.orphaned = True
            self.exit_source = self.exit_source or "launcher and agent are lost"
            self.changed.notify_all()

    # ------------------------------------------------------------------ main thread

    def enter(self, phase: Phase) -> None:
        """Show ``phase`` on the status page. A drill can make the process stop, end or fail at this point."""
        if self.client is not None:
            self.client.page.enter(phase, self.machine.step)

    def end_epoch(self) -> None:
        """Let a drill make the process stop, end or fail after the last block of an epoch."""
        if self.client is not None:
            self.client.page.end_epoch(self.machine.step)

    def announce(self, section: str) -> None:
        """Show on the status page that a section begins. In a section, a long time without progress is not a hang."""
        if self.client is not None:
            self.client.page.announce(section)
            if not self.fenced:
                self.enter(Phase.SECTION)

    def begin(self) -> bool:
        """Begin the block of the step (READY -> COMPUTE). Return False if the rank is fenced: the block must wait."""
        with self.changed:
            begun = self.machine.begin()
            event = ScriptEvent.BLOCK_BEGUN if begun else ScriptEvent.HELD
            self.script.handle(event)
            self._advanced(event)
        if begun:
            self.timer.begin()
            self._collectives_before = self._collectives
            if self.client is not None:
                self.client.page[Word.SEQUENCE] = 0
        return begun

    def enter_vote(self) -> bool:
        """Enter the vote of the step (COMPUTE -> VOTING). Return False if the step has been aborted."""
        with self.changed:
            entered = self.machine.enter_vote()
            self._advanced()
            return entered

    def computed(self, at_ns: int) -> None:
        """Write to the status page how long this block took to compute its gradients, less its waits for other ranks.

        Args:
            at_ns: CLOCK_MONOTONIC, in nanoseconds, when the gradients were complete.
        """
        if self.client is not None:
            page = self.client.page
            page[Word.BUSY_NS] = self.timer.busy_ns(at_ns)
            page[Word.USUAL_SEQUENCE] = page[Word.SEQUENCE]

    def voted(self, tally: Tally) -> RankState:
        """Apply the result of a completed vote to the state machine of the step. Return the new state."""
        with self.changed:
            state = self.machine.vote_passed() if tally.passed else self.machine.vote_refused()
            self._advanced()
        if not (tally.passed or tally.explained):
            self.fault_seen(f"step {self.step}: {tally.reason}")
        return state

    def vote_broken(self) -> RankState:
        """Record that the vote of the step broke on this rank. Return the new state of the step."""
        with self.changed:
            state = self.machine.vote_broken()
            self._advanced()
            return state

    def fail(self) -> RankState:
        """Record that an exception has left the block. Return the new state of the step."""
        with self.changed:
            state = self.machine.fail()
            self._advanced()
            return state

    def note_local(self, payload: bytes | None, step: int) -> None:
        """Write ``payload``, encoded rank-local values of ``step``, to the status page.

        None leaves the page unchanged.
        """
        if self.client is not None and payload is not None:
            self.client.page.write_local(step, payload)

    def commit(self, payload: bytes | None) -> None:
        """Commit step s (UPDATING(s) -> READY(s+1)).

        Args:
            payload: encoded rank-local values of step s+1, first written to the status page; None leaves the page
                unchanged.
        """
        page = None if self.client is None else self.client.page
        self.note_local(payload, self.step + 1)
        with self.changed:
            self.script.handle(ScriptEvent.BLOCK_ENDED)
            self.machine.end_block()
            self._advanced()
        if page is not None:
            page[Word.COMMITTED] = self.step
            page[Word.DONE] += 1
            page[Word.STEP_NS] = self.timer.since_begin_ns()
        self.enter(Phase.READY)
        if self.client is not None and self._worker.reaches():
            self.client.send(
                StepReached(member_id=self.member_id, generation=self.machine.generation, step=self.step)
            )

    def copy(self, make: Callable[[], None]) -> bool:
        """Copy the state that a tentative update changes (``OrderTasks.copy``). Return False under a fence."""
        return self._tasks.copy(make)

    def retry_now(self) -> bool:
        """Let an aborted step run again in the same generation (ABORTED -> READY). Return False if a fence came."""
        with self.changed:
            retried = not self.fenced and self.machine.retry(self.machine.generation)
            self._advanced()
            return retried

    def await_decision(self) -> bool:
        """Wait for the controller's decision on a step in doubt. Return True if its update must be applied."""
        self.enter(Phase.IN_DOUBT)
        self.freed()
        with self.changed:
            self._advanced()
            self._wait(lambda: self.machine.state != "in_doubt")
            return self.machine.state == "updating"

    def await_resume(self) -> None:
        """Wait for the order to continue in a new generation, and join it. If this is impossible, end the process."""
        self.freed()
        self._waiting_since_ns = time.monotonic_ns()
        while True:
            with self.changed:
                self._wait(lambda: self._worker.resume is not None)
                self._waiting_since_ns = 0
                if self.client is not None:
                    # The time belongs to this fault; the next fault sets its own.
                    self.client.page[Word.FREED_NS] = 0
                commands = self._report(WAIT_REACHED)
            if self._follow(commands):
                return

    def _follow(self, commands: tuple[Command, ...]) -> bool:
        """Execute commands that follow from an order to continue. Return True if this rank continues, else False."""
        for command in commands:
            match command:
                case RestoreState():
                    try:
                        self._tasks.calls.rewind(command.step)
                    except CheckpointInvalid:
                        leave_process(Exit.RESTART)  # the state is a mix of two steps: this process is lost
                    following = self._report(StateRestored(command.step, command.generation))
                    self.enter(Phase.READY)
                    return self._follow(following)
                case BuildGroups():
                    return self._follow(self._report(self._build(command.generation)))
                case ContinueStep():
                    return True
        return False

    def _build(self, generation: Generation) -> GroupsBuilt:
        try:
            self._adapter.reconfigure(generation)
        except Unsevered:
            leave_process(Exit.RESTART)
        except GroupsDiffer as error:
            log.warning(
                "holdfast: %s: all ranks start again at step %d; %s", error.message, self.step, error.hint
            )
            return GroupsBuilt(generation, error=error.message, differ=True)
        except GroupError as error:
            return GroupsBuilt(generation, error=str(error))
        return GroupsBuilt(generation)

    def refuse(self, generation: Generation, step: int, reason: str, *, alone: bool = False) -> None:
        """Report that this rank's state of ``step`` in the memory tier is damaged. A new decision follows.

        With ``alone`` the state is sound, and the ranks cannot continue in their processes.
        """
        if self.client is not None:
            self.client.send(
                StateRefused(
                    member_id=self.member_id,
                    generation=generation,
                    step=step,
                    reason=reason[:TEXT_LENGTH_MAX],
                    alone=alone,
                )
            )

    def await_receive(self) -> Receive:
        """Request the state of the lost rank, and wait. Return the order that says where the state is served."""
        assert self.client is not None
        self.client.send(JoinAsked(member_id=self.member_id, generation=self.machine.generation))
        with self.changed:
            self._wait(lambda: self._worker.receive is not None)
            assert self._worker.receive is not None
            return self._worker.receive

    def join(self) -> None:
        """If this process has not joined the job, report that it is ready to join, and wait until the job continues."""
        if not self.joining or self.client is None:
            return
        with self.changed:
            self.script.join()
            self.script.handle(ScriptEvent.HELD)  # at its block: if fenced, it gives its present state
            self._advanced(ScriptEvent.HELD)
        self.client.send(Joined(member_id=self.member_id, generation=self.machine.generation, step=self.step))
        self._tasks.calls.joined(self.step)
        self.await_resume()

    def take_step(self) -> bool:
        """Record that the script takes the next step. If a recovery came first, wait for its end and return False.

        The next step may then have another number.
        """
        with self.changed:
            if not self.fenced:
                self.script.handle(ScriptEvent.STEP_TAKEN)
                return True
        self.await_resume()
        return False

    def leave_loop(self) -> bool:
        """Record that the loop over steps ends. If a recovery came first, wait for its end and return False.

        The loop may then have to continue, at an earlier step.
        """
        with self.changed:
            if self.script.rewinds_to < 0 or not self.fenced:
                self.script.forbid_rewind()
                return True
        self.await_resume()
        return False

    def await_end(self, phase: Phase | None = None) -> NoReturn:
        """Wait until an order or a kill ends this process, while other threads serve its state.

        Args:
            phase: the phase to show on the status page; None leaves the phase unchanged.
        """
        if phase is not None:
            self.enter(phase)
        self.freed()
        with self.changed:
            self._advanced()
            while True:
                self._wait(lambda: False)

    def await_word(self, limit_s: float) -> None:
        """After an error in user code, wait while other threads serve this rank's state.

        The wait ends when all ranks have finished, or after ``limit_s`` seconds without a fence.
        """
        if self.state == "aborted":
            self.enter(Phase.ABORTED)
        self.freed()
        self._await_release(limit_s)

    def await_fence(self) -> None:
        """Wait for the controller's fence, which follows because a vote between two steps broke."""
        self.freed()
        with self.changed:
            self._wait(lambda: self.fenced)

    def pass_turn(self) -> bool:
        """Count one finished turn (epoch or phase). Return False, without counting, if a fence came first."""
        with self.changed:
            return self._worker.pass_turn()

    def await_turns(self) -> int:
        """Wait for the decision on a fence at the end of a turn. Return the number of turns finished by the job."""
        self.freed()
        with self.changed:
            self._wait(lambda: self._worker.knows_turns)
            return self._worker.adopt_turns()

    def staged(self, step: int) -> None:
        """Write to the status page that the writer process has this rank's share of the save of ``step``."""
        if self.client is not None:
            self.client.page[Word.STAGED] = step

    def repeated(self) -> None:
        """Count, on the status page, one aborted run of a block that will run again."""
        if self.client is not None:
            self.client.page[Word.REPEATED] += 1

    def finish(self, reason: str, sealed: bool) -> bool:
        """Finish (READY -> FINISHED), and wait for all ranks. Return False if a fence came: a recovery needs this rank.

        Args:
            reason: ``exit`` after an agreed exit, otherwise ``done``.
            sealed: the final checkpoint is sealed.
        """
        with self.changed:
            if self.fenced and not self.orphaned:
                return False
            self.machine.finish()
            self._advanced()
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
