"""The state machine of one rank: its reaction to each order of the controller.

Theory. A rank is a step machine (``step.py``), the position of its script (``position.py``) and the orders that it has
received. The controller fences a rank, decides, and orders it to continue. ``WorkerMachine.handle`` takes these
messages and what the shell reports, and returns commands. The session executes them with threads and sockets, the
simulator with a virtual clock. Both have the same rules, so a schedule of the simulator tests the rules of a real rank.

A step is the hot path. Its transitions are methods of the step machine and of the position, which the shell calls
directly; only a fenced rank reports them with ``Advanced``.

A wait is data here. An order of a decision waits in ``decision_orders.py``. The order to continue waits here until the
script reaches its wait (``WaitReached``). The shell blocks only to execute.

- ``Fence``, newer than the generation of this rank: collectives are broken, orders are dropped, the fence is answered.
- ``Settle``, of the fence in force: an in-doubt step is applied or discarded, and the orders of the decision wait.
- ``ResumeInPlace``, not of the generation of this rank: the state is no longer served, then the script may continue.
- ``WaitReached``, after an order to continue: the script goes back if that is ordered, and its groups are built again.
- ``Advanced``, while fenced: the fence is answered, and orders whose conditions hold are carried out.

The state machine is not thread-safe: the threads of a rank share it under one lock.

Invariants:
1. A fence is answered once per settled (state, step), and again when the script leaves its loop. No answer is given
   while a state is restored.
2. An order to continue counts once. After this rank has joined its generation, a repeated order is ignored.
3. The script continues only after the state of this rank is no longer served.
4. A rank goes back only if its script can: otherwise it waits for the fence that its new answer causes.
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
    """Report that the step or the script of a fenced rank has advanced. ``event``: the script's event, if any."""

    event: ScriptEvent | None = None


class WeightsSeen(Message, frozen=True):
    """Report whether the model holds the trained weights."""

    trained: bool


class OrderEnded(Message, frozen=True):
    """Report that an order was carried out, or failed. The shell has already sent the result to the controller."""

    generation: Generation


class ServingEnded(Message, frozen=True):
    """Report that the state of this rank is no longer served."""

    generation: Generation


class WaitReached(Message, frozen=True):
    """Report that the script waits for the job to continue, and an order to continue is there."""


class StateRestored(Message, frozen=True):
    """Report that the state of an earlier ``step`` is restored."""

    step: int
    generation: Generation


class GroupsBuilt(Message, frozen=True):
    """Report that the groups of a generation are built. ``error``: why they are not."""

    generation: Generation
    error: str = ""


# ---------------------------------------------------------------- commands to the shell


class AnswerFence(Command, frozen=True):
    """Command to send the answer to a fence, after adding the facts that only the shell knows (kept steps, a time)."""

    answer: Settled


class BreakCollectives(Command, frozen=True):
    """Command to break every collective of the old generation."""

    reason: str


class EndServing(Command, frozen=True):
    """Command to stop serving the state, and to report ``ServingEnded``."""

    generation: Generation


class ApplyUpdate(Command, frozen=True):
    """Command to run the update of a step that was in doubt."""


class RestoreState(Command, frozen=True):
    """Command to restore the kept state of ``step``, and to report ``StateRestored``."""

    step: int
    generation: Generation


class BuildGroups(Command, frozen=True):
    """Command to build the groups of a generation, and to report ``GroupsBuilt``."""

    generation: Generation


class ReportBroken(Command, frozen=True):
    """Command to report that the groups of a generation could not be built."""

    generation: Generation
    reason: str


class ContinueStep(Command, frozen=True):
    """Command to let the script continue: this rank is in ``generation``."""

    generation: Generation


ADVANCED = Advanced()
WAIT_REACHED = WaitReached()
Commands = tuple[Command, ...]


class WorkerMachine:
    """The state machine of one rank. See the module.

    Args:
        member_id: id of this process.
        generation: the generation in which the process was started.
        joining: the process takes the place of a lost rank.
        observe: called with (old state, new state, step after) after each transition of the step machine.

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
        """The position of the script."""
        return self._script

    @property
    def orders(self) -> OrderBook:
        """The orders of the decision in force."""
        return self._orders

    def take_place(self, member_id: MemberId, generation: Generation) -> None:
        """Make a called spare a newcomer that has just started."""
        self._member_id = member_id
        self._steps = StepMachine(generation, self._observe)

    # ------------------------------------------------------------------ facts for the main thread

    @property
    def resume(self) -> ResumeInPlace | None:
        """The order to continue, if the script may follow it now."""
        return self._resume

    @property
    def receive(self) -> Receive | None:
        """The order to a replacement to take its state."""
        return self._receive

    @property
    def turns(self) -> int:
        """Number of epochs and phases that the whole job has finished, as far as this rank knows."""
        return self._turns

    @property
    def knows_turns(self) -> bool:
        """True if the fence in force was decided, or is lifted: :meth:`adopt_turns` then returns the job's number."""
        return self._resume is not None or self._settled_in == self._steps.fenced

    def stand_at_turn(self, turns: int) -> None:
        """Record the number of turns in the state that this rank has loaded."""
        self._turns = turns

    def pass_turn(self) -> bool:
        """Count a turn that all ranks have finished. Return False without counting if a fence came first."""
        self._turns += self._steps.fenced is None
        return self._steps.fenced is None

    def adopt_turns(self) -> int:
        """Take over the number of turns of the decision. Return the number."""
        self._turns = max(self._turns, self._decided_turns)
        return self._turns

    def reaches(self) -> bool:
        """Return True once per generation, after the first step that this rank has committed in it."""
        first = not self._reached and self._steps.fenced is None
        self._reached = self._reached or first
        return first

    # ------------------------------------------------------------------ what happens

    def handle(self, now_s: float, event: Message) -> Commands:
        """Apply a message of the control plane or a report of the shell. Return the commands for the shell, in order.

        Raises:
            InternalError: a decision contradicts the state of this rank, or the event is of no kind known here.
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
                if (
                    event.generation != self._steps.fenced
                ):  # what it serves was ordered for a recovery that is over
                    found.append(EndServing(generation=event.generation))
            case WeightsSeen():
                self._orders.saw_weights(event.trained)
            case Tick():
                self._orders.look_again(event.name)
            case _:
                raise InternalError(f"a rank does not know {event}", hint="please report this line")
        return (*found, *self._advance(now_s))

    def _advance(self, now_s: float) -> list[Command]:
        """Return the commands for orders whose conditions hold. A script that strays is reported first."""
        attendance = self._script.attendance
        found = self._orders.advance(Standing(now_s, self._steps, self._script))
        answers: list[Command] = []
        if self._script.attendance is not attendance:
            self._answer(answers)
        return [*answers, *found]

    def _answer(self, found: list[Command]) -> None:
        """Answer the fence when the step machine has settled, unless this answer was given."""
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
        # Otherwise the script has left that loop since, and has reported that: all ranks are fenced again.

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
                found.append(ReportBroken(generation=generation, reason=event.error))
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
