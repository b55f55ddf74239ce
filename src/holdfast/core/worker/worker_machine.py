"""The state machine of one rank: its reaction to each order of the controller.

Theory. A rank is a step machine (``step.py``), the position of its script (``position.py``) and the orders that it has
received. The controller fences a rank, decides, and orders it to continue. ``WorkerMachine.handle`` takes these
messages and the reports of the shell, and returns commands. The session executes the commands with threads and sockets,
the simulator with a virtual clock. Both use the same rules, so a schedule of the simulator tests the rules of a real
rank.

A step is the hot path. Its transitions are methods of the step machine and of the position, which the shell calls
directly; only a fenced rank reports them with ``Advanced``.

A wait is data of this machine, not a blocked thread. An order of a decision waits in ``decision_orders.py``. The order
to continue waits until the script also waits (``WaitReached``). The shell blocks only to execute commands.

The reactions to the main events are:

- ``Fence``, newer than the generation of this rank: collectives are broken, orders are dropped, the fence is answered.
- ``Settle``, of the fence in force: an in-doubt step is applied or discarded, and the orders of the decision wait.
- ``ResumeInPlace``, of another generation than the rank's own: the state is no longer served, then the script may
  continue.
- ``WaitReached``, after an order to continue: the script goes back if that is ordered, and the process groups are built
  again.
- ``Advanced``, while fenced: the fence is answered, and orders whose conditions hold are carried out.

The state machine is not thread-safe: the threads of a rank share it under one lock.

Invariants:
1. A fence is answered once per settled (state, step), and again when the script leaves its loop. No answer is given
   while a state is restored.
2. An order to continue counts once. After this rank has joined its generation, a repeated order is ignored.
3. The script continues only after the state of this rank is no longer served.
4. A rank goes back to an earlier step only if its script can go back. Otherwise it waits for the fence that its new
   answer causes.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.core.ids import Generation, MemberId
from holdfast.core.protocol.messages import (
    Command,
    Fence,
    Message,
    RankState,
    Receive,
    ResumeInPlace,
    Settle,
    Settled,
    Tick,
)
from holdfast.core.worker.decision_orders import OrderBook, Standing, orders_of
from holdfast.core.worker.position import REPORTED, ScriptEvent, ScriptMachine
from holdfast.core.worker.step import StepMachine
from holdfast.errors import InternalError

# ---------------------------------------------------------------- reports of the shell


class Advanced(Message, frozen=True):
    """Report of a fenced rank that its step or its script has advanced.

    ``event``: the event of the script; None if only the step has advanced.
    """

    event: ScriptEvent | None = None


class WeightsSeen(Message, frozen=True):
    """Report of the shell whether the model holds the trained weights."""

    trained: bool


class OrderEnded(Message, frozen=True):
    """Report of the shell that it carried out an order or failed to. The controller already has the result."""

    generation: Generation


class ServingEnded(Message, frozen=True):
    """Report of the shell that the state of this rank is no longer served to replacements."""

    generation: Generation


class WaitReached(Message, frozen=True):
    """Report of the shell: the script waits for the job to continue, and an order to continue has arrived."""


class StateRestored(Message, frozen=True):
    """Report of the shell that the kept state of an earlier ``step`` is restored."""

    step: int
    generation: Generation


class GroupsBuilt(Message, frozen=True):
    """Report of the shell that the process groups of a generation are built.

    ``error``: why they could not be built. ``differ``: because the ranks hold different groups.
    """

    generation: Generation
    error: str = ""
    differ: bool = False


# ---------------------------------------------------------------- commands to the shell


class AnswerFence(Command, frozen=True):
    """Command to send ``answer`` to a fence. The shell first adds the facts that only the shell knows.

    These are for example the steps of the kept states.
    """

    answer: Settled


class BreakCollectives(Command, frozen=True):
    """Command to break every collective of the old generation, so that no thread waits in one."""

    reason: str


class EndServing(Command, frozen=True):
    """Command to stop serving the state to replacements, and to report ``ServingEnded``."""

    generation: Generation


class ApplyUpdate(Command, frozen=True):
    """Command to run the update of a step that was in doubt."""


class RestoreState(Command, frozen=True):
    """Command to restore the state of ``step`` that is kept in memory, and to report ``StateRestored``."""

    step: int
    generation: Generation


class BuildGroups(Command, frozen=True):
    """Command to build the process groups of a generation, and to report ``GroupsBuilt``."""

    generation: Generation


class ReportBroken(Command, frozen=True):
    """Command to report to the controller that the process groups of a generation could not be built.

    ``differ``: the ranks hold different groups, so they cannot continue in their processes.
    """

    generation: Generation
    reason: str
    differ: bool = False


class ContinueStep(Command, frozen=True):
    """Command to let the script continue, because this rank has joined ``generation``."""

    generation: Generation


ADVANCED = Advanced()
WAIT_REACHED = WaitReached()
Commands = tuple[Command, ...]


class WorkerMachine:
    """The state machine of one rank, which turns messages of the controller and reports of the shell into commands.

    Args:
        member_id: id of this process.
        generation: the generation in which the process was started.
        joining: the process takes the seat of a lost rank.
        observe: called after each transition of the step machine with (old state, new state, step after the
            transition).

    Example:
        >>> machine = WorkerMachine(MemberId(1), Generation(1, 1))
        >>> machine.steps.open(0)
        >>> fence = Fence(member_id=MemberId(1), generation=Generation(1, 2), reason="a rank is lost")
        >>> [type(command).__name__ for command in machine.handle(0.0, fence)]
        ['BreakCollectives', 'AnswerFence']
    """

    def __init__(
        self,
        member_id: MemberId,
        generation: Generation,
        *,
        joining: bool = False,
        observe: Callable[[RankState, RankState, int], None] | None = None,
    ) -> None:
        self._member_id = member_id
        self._observe = observe
        self._steps = StepMachine(generation, observe)
        self._script = ScriptMachine(joining=joining)
        self._orders = OrderBook()
        self._told: Settled | None = None
        self._settled_in: Generation | None = None
        self._ordered: ResumeInPlace | None = None  # the state may still be served
        self._resume: ResumeInPlace | None = None
        self._resumed_in: Generation | None = None
        self._receive: Receive | None = None
        self._turns = self._decided_turns = 0
        self._reached = False

    # ------------------------------------------------------------------ the parts

    @property
    def steps(self) -> StepMachine:
        """The step machine of this rank."""
        return self._steps

    @property
    def script(self) -> ScriptMachine:
        """The state machine of the script's position on this rank."""
        return self._script

    @property
    def orders(self) -> OrderBook:
        """The orders of the decision in force."""
        return self._orders

    def take_place(self, member_id: MemberId, generation: Generation) -> None:
        """Give this process, a spare that was called, the id and generation of a new member."""
        self._member_id = member_id
        self._steps = StepMachine(generation, self._observe)

    # ------------------------------------------------------------------ facts for the main thread

    @property
    def resume(self) -> ResumeInPlace | None:
        """The order to continue, or None if the script may not continue yet."""
        return self._resume

    @property
    def receive(self) -> Receive | None:
        """The order to this replacement to receive its state, or None."""
        return self._receive

    @property
    def turns(self) -> int:
        """Number of epochs and phases that all ranks have finished, as known to this rank."""
        return self._turns

    @property
    def knows_turns(self) -> bool:
        """True if this rank knows the decided number of finished epochs and phases, see :meth:`adopt_turns`."""
        return self._resume is not None or self._settled_in == self._steps.fenced

    def stand_at_turn(self, turns: int) -> None:
        """Record the number of epochs and phases that are finished, as the loaded state says."""
        self._turns = turns

    def pass_turn(self) -> bool:
        """Count an epoch or phase that all ranks have finished.

        If this rank is fenced, return False and count nothing.
        """
        self._turns += self._steps.fenced is None
        return self._steps.fenced is None

    def adopt_turns(self) -> int:
        """Take over the number of finished epochs and phases from the decision, and return it."""
        self._turns = max(self._turns, self._decided_turns)
        return self._turns

    @property
    def reached(self) -> bool:
        """True if this rank, and therefore every rank, has committed a step in the present generation."""
        return self._reached

    def reaches(self) -> bool:
        """Return True at the first call per generation while this rank is not fenced.

        The caller asks after each committed step, and reports the first step of a generation.
        """
        first = not self._reached and self._steps.fenced is None
        self._reached = self._reached or first
        return first

    # ------------------------------------------------------------------ what happens

    def handle(self, now_s: float, event: Message) -> Commands:
        """Apply a message of the controller or a report of the shell. Return the commands for the shell, in order.

        Raises:
            InternalError: a decision contradicts the state of this rank, or the kind of the event is unknown.
        """
        found: list[Command] = []
        match event:
            case Advanced():
                if event.event is None or event.event in REPORTED:
                    self._answer(found)
            case Fence():
                self._fence(event, found)
            case Settle():
                self._settle(event, found)
            case ResumeInPlace():
                self._order_to_continue(event, found)
            case ServingEnded():
                if self._ordered is not None and self._ordered.generation == event.generation:
                    self._resume, self._ordered = self._ordered, None
            case WaitReached():
                self._continue(found)
            case StateRestored():
                self._restored(event, found)
            case GroupsBuilt():
                self._built(event, found)
            case Receive():
                self._receive = event
            case OrderEnded():
                self._orders.end()
                if event.generation != self._steps.fenced:  # the state was served for a recovery that is over
                    found.append(EndServing(generation=event.generation))
            case WeightsSeen():
                self._orders.saw_weights(event.trained)
            case Tick():
                self._orders.look_again(event.name)
            case _:
                raise InternalError(f"a rank does not know {event}", hint="please report this line")
        return (*found, *self._advance(now_s))

    def _advance(self, now_s: float) -> list[Command]:
        """Return the commands for orders whose conditions hold.

        If the script has strayed, the new answer to the fence comes first.
        """
        attendance = self._script.attendance
        found = self._orders.advance(Standing(now_s, self._steps, self._script))
        answers: list[Command] = []
        if self._script.attendance is not attendance:
            self._answer(answers)
        return [*answers, *found]

    def _answer(self, found: list[Command]) -> None:
        """Append the answer to the fence if the rank has settled and has not given the same answer before."""
        steps, script = self._steps, self._script
        fenced = steps.fenced
        if fenced is None or not steps.settled or script.restoring:
            return
        answer = Settled(
            member_id=self._member_id,
            generation=fenced,
            state=steps.state,
            step=steps.step,
            away=script.away,
            rewind=script.offers_rewind,
            turns=self._turns,
        )
        if answer != self._told:
            self._told = answer
            found.append(AnswerFence(answer=answer))

    def _fence(self, fence: Fence, found: list[Command]) -> None:
        if self._steps.fence(fence.generation):
            self._resume = self._ordered = None
            self._orders.drop()
            found.append(BreakCollectives(reason=fence.reason))
            self._answer(found)

    def _settle(self, settle: Settle, found: list[Command]) -> None:
        if self._steps.fenced != settle.generation:
            return
        self._settled_in, self._decided_turns = settle.generation, settle.turns
        match self._steps.decide(settle.step):
            case "apply":
                found.append(ApplyUpdate())
            case "discard":
                self._answer(found)
            case "stay":
                pass
        self._orders.add(orders_of(settle))

    # ------------------------------------------------------------------ to continue

    def _order_to_continue(self, resume: ResumeInPlace, found: list[Command]) -> None:
        if resume.generation == self._resumed_in or self._is_overtaken(resume.generation):
            return
        self._orders.drop()
        self._reached = False
        self._ordered = resume
        found.append(EndServing(generation=resume.generation))

    def _continue(self, found: list[Command]) -> None:
        resume, self._resume = self._resume, None
        if resume is None or self._is_overtaken(resume.generation):
            return
        if resume.step >= self._steps.step:
            found.append(BuildGroups(generation=resume.generation))
        elif 0 <= self._script.rewinds_to <= resume.step:
            self._script.begin_restore()
            found.append(RestoreState(step=resume.step, generation=resume.generation))
        # Otherwise the script has left its loop since the order, and has reported so: all ranks are fenced again.

    def _restored(self, event: StateRestored, found: list[Command]) -> None:
        self._script.end_restore()
        self._steps.rewind(event.step)
        self._answer(found)
        if not self._is_overtaken(event.generation):
            found.append(BuildGroups(generation=event.generation))

    def _built(self, event: GroupsBuilt, found: list[Command]) -> None:
        generation = event.generation
        if event.error:
            # Another fault came while the groups were built, or they cannot be built in this process.
            if not self._is_overtaken(generation):
                found.append(ReportBroken(generation=generation, reason=event.error, differ=event.differ))
        elif self._steps.retry(generation):
            self._resumed_in = generation
            self._resume = self._ordered = (
                None  # the order may have been repeated while the groups were built
            )
            self._script.join()
            found.append(ContinueStep(generation=generation))

    def _is_overtaken(self, generation: Generation) -> bool:
        """Return True if a fence newer than ``generation`` is in force."""
        fenced = self._steps.fenced
        return fenced is not None and fenced > generation
