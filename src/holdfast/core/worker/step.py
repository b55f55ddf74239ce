"""The step protocol of one rank, as a state machine.

Theory. A step is two-phase commit with one tiny all-reduce (the vote) as its first phase. A rank that entered the vote
has complete gradients and has promised to apply them if the vote passes. A *fence* (a newer generation exists) stops
the rank: in READY or COMPUTE at once, in VOTING when the vote ends or breaks, in UPDATING at the end of the block. A
rank without a fence is *free*. A rank is IN_DOUBT if its vote broke, or passed after a fence had come. Such a rank may
not decide alone: the controller decides from the reports of all ranks. READY(s) is the state READY at step s, and so
on. The whole protocol is the table ``TRANSITIONS``. ``docs/protocol.md`` shows the same rows, and a test compares them.

The state machine is not thread-safe: main thread and client thread share it under the lock of its owner.

Invariants:
1. UPDATING(s) is entered only from VOTING(s) by a passed vote while free, or from IN_DOUBT(s) by a decision.
2. ``step`` grows by one at block end and never otherwise; only a rewind decreases it.
3. A fenced rank does not begin a step, does not enter a vote and does not act on a vote that passed.
4. Only the end of the process leaves TORN.
5. A rank returns to an earlier step only while it is fenced and outside of its block, together with all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import Literal, NamedTuple

from holdfast.core.ids import Generation
from holdfast.core.protocol.messages import RankState
from holdfast.errors import HoldfastError, InternalError, StepError

STORY_LENGTH = 24
SETTLED: frozenset[RankState] = frozenset({"starting", "ready", "aborted", "in_doubt", "torn", "finished"})
"""States that a fenced rank cannot leave before a decision of the controller."""

Decision = Literal["apply", "discard", "stay"]


class StepEvent(StrEnum):
    """An event in the step protocol of one rank.

    The main thread causes ``open``, ``begin``, ``vote``, ``end`` and ``finish`` by running user code.
    """

    OPEN = "open"
    BEGIN = "begin"
    VOTE = "vote"
    END = "end"
    FINISH = "finish"
    PASSED = "passed"
    REFUSED = "refused"
    BROKEN = "broken"
    FAIL = "fail"
    FENCE = "fence"
    APPLY = "apply"
    DISCARD = "discard"
    RETRY = "retry"
    REWIND = "rewind"


When = Literal["free", "fenced", "any"]


class Transition(NamedTuple):
    """One row of the transition table: ``event`` leads from ``state`` to ``target``.

    ``when``: the row holds for ranks that are free, for ranks that are fenced, or for any.
    """

    state: RankState
    event: StepEvent
    when: When
    target: RankState


E = StepEvent
TRANSITIONS: tuple[Transition, ...] = (
    Transition("starting", E.OPEN, "any", "ready"),
    Transition("starting", E.FAIL, "any", "starting"),
    Transition("starting", E.FENCE, "any", "starting"),
    Transition("starting", E.RETRY, "any", "starting"),
    Transition("ready", E.BEGIN, "free", "compute"),
    Transition("ready", E.BEGIN, "fenced", "ready"),
    Transition("ready", E.FAIL, "any", "ready"),
    Transition("ready", E.FENCE, "any", "ready"),
    Transition("ready", E.RETRY, "any", "ready"),
    Transition("ready", E.REWIND, "fenced", "ready"),
    Transition("ready", E.FINISH, "any", "finished"),
    Transition("compute", E.VOTE, "free", "voting"),
    Transition("compute", E.FAIL, "free", "aborted"),
    Transition("compute", E.FENCE, "free", "aborted"),
    Transition("voting", E.PASSED, "free", "updating"),
    Transition("voting", E.PASSED, "fenced", "in_doubt"),
    Transition("voting", E.REFUSED, "any", "aborted"),
    Transition("voting", E.BROKEN, "any", "in_doubt"),
    Transition("voting", E.FAIL, "any", "in_doubt"),
    Transition("voting", E.FENCE, "any", "voting"),
    Transition("updating", E.END, "any", "ready"),
    Transition("updating", E.FAIL, "any", "torn"),
    Transition("updating", E.FENCE, "any", "updating"),
    Transition("in_doubt", E.APPLY, "fenced", "updating"),
    Transition("in_doubt", E.DISCARD, "fenced", "aborted"),
    Transition("in_doubt", E.FAIL, "any", "in_doubt"),
    Transition("in_doubt", E.FENCE, "any", "in_doubt"),
    Transition("aborted", E.VOTE, "any", "aborted"),
    Transition("aborted", E.FAIL, "any", "aborted"),
    Transition("aborted", E.FENCE, "any", "aborted"),
    Transition("aborted", E.RETRY, "any", "ready"),
    Transition("aborted", E.REWIND, "fenced", "aborted"),
    Transition("torn", E.FAIL, "any", "torn"),
    Transition("torn", E.FENCE, "any", "torn"),
    Transition("finished", E.FAIL, "any", "finished"),
    Transition("finished", E.FENCE, "any", "finished"),
    Transition("finished", E.RETRY, "any", "finished"),
)

_USER_EVENTS = frozenset({E.OPEN, E.BEGIN, E.VOTE, E.END, E.FINISH})
_TARGETS: dict[tuple[RankState, StepEvent, bool], RankState] = {
    (row.state, row.event, fenced): row.target
    for row in TRANSITIONS
    for fenced in (False, True)
    if row.when == "any" or (row.when == "fenced") == fenced
}


class StepMachine:
    """The state of one rank in the step protocol.

    Args:
        generation: the generation in which the rank was started.
        observe: called after each transition with (old state, new state, step after the transition), under the owner's
            lock.

    Every method returns at once. A method that user code can call at a wrong time then raises :class:`StepError`. Any
    other transition outside of the table raises :class:`InternalError`. Both errors list the last transitions.
    """

    def __init__(
        self, generation: Generation, observe: Callable[[RankState, RankState, int], None] | None = None
    ) -> None:
        self._generation = generation
        self._state: RankState = "starting"
        self._step = 0
        self._fenced: Generation | None = None
        self._observe = observe
        self._story: deque[str] = deque(maxlen=STORY_LENGTH)

    @property
    def state(self) -> RankState:
        """The state of this rank in the step protocol, for example ``voting``."""
        return self._state

    @property
    def step(self) -> int:
        """Number of updates that this rank has made before its current step."""
        return self._step

    @property
    def generation(self) -> Generation:
        """The generation whose collectives this rank may use."""
        return self._generation

    @property
    def fenced(self) -> Generation | None:
        """The generation of the newest fence; None if this rank was never fenced, or has continued after each fence."""
        return self._fenced

    @property
    def settled(self) -> bool:
        """True if the rank is fenced and only a decision can change its state. The rank can then answer the fence."""
        return self._fenced is not None and self._state in SETTLED

    @property
    def story(self) -> tuple[str, ...]:
        """The last transitions of this rank as text, oldest first."""
        return tuple(self._story)

    def open(self, step: int) -> None:
        """Record that the session opens after ``step`` updates: STARTING -> READY(step)."""
        if self._state == "starting":
            self._step = step
        self._apply(E.OPEN)

    def begin(self) -> bool:
        """Enter the block of a step.

        Return False if the rank is fenced: it stays READY and must wait for the decision.
        """
        return self._apply(E.BEGIN) == "compute"

    def enter_vote(self) -> bool:
        """Enter the vote: this rank promises to apply the gradients. Return False when a fence has aborted the step."""
        return self._apply(E.VOTE) == "voting"

    def vote_passed(self) -> RankState:
        """Record that every rank voted yes. Return ``updating``, or ``in_doubt`` if a fence came during the vote."""
        return self._apply(E.PASSED)

    def vote_refused(self) -> RankState:
        """Record that the vote completed and at least one rank voted no. Return ``aborted``."""
        return self._apply(E.REFUSED)

    def vote_broken(self) -> RankState:
        """Record that the vote broke on this rank; it may have completed on other ranks. Return ``in_doubt``."""
        return self._apply(E.BROKEN)

    def end_block(self) -> RankState:
        """Record the end of the block, after the updates of optimizer, scheduler and scaler: UPDATING(s) -> READY(s+1).

        Return the new state.
        """
        return self._apply(E.END)

    def fail(self) -> RankState:
        """Record that the block of the step raised. Return the new state.

        COMPUTE becomes ABORTED, VOTING becomes IN_DOUBT, UPDATING becomes TORN. Other states do not change.
        """
        return self._apply(E.FAIL)

    def finish(self) -> None:
        """Record that this rank has no more steps: READY(s) -> FINISHED(s)."""
        self._apply(E.FINISH)

    def fence(self, generation: Generation) -> bool:
        """Fence the rank because ``generation`` exists.

        Return False if the rank already knows this generation or a newer one.
        """
        if generation <= max(self._generation, self._fenced or self._generation):
            return False
        self._fenced = generation
        self._apply(E.FENCE, fenced=False if self._state == "compute" else None)
        return True

    def decide(self, step: int) -> Decision:
        """Apply the decision that the job continues at ``step``. The same decision may arrive twice.

        Returns:
            ``apply``: IN_DOUBT -> UPDATING; the caller runs the update and ends the block. ``discard``: IN_DOUBT ->
            ABORTED. ``stay``: the state has not changed.

        Raises:
            InternalError: the decision contradicts the state of this rank.
        """
        ahead = step - self._step
        if self._fenced is not None:
            if self._state == "in_doubt" and ahead == 1:
                self._apply(E.APPLY)
                return "apply"
            if self._state == "in_doubt" and ahead == 0:
                self._apply(E.DISCARD)
                return "discard"
            expected = 1 if self._state in ("updating", "torn") else 0
            if ahead == expected and self._state not in ("compute", "voting", "in_doubt"):
                return "stay"
            if self._state == "starting":
                return "stay"
        raise self._error(InternalError, f"a decision for step {step} does not fit {self._where()}")

    def rewind(self, step: int) -> None:
        """Record that this rank has restored its state of an earlier ``step``, as decided for all ranks.

        Raises:
            InternalError: ``step`` is after the present step of this rank.
        """
        if step > self._step:
            raise self._error(InternalError, f"back to step {step}, which is ahead")
        self._apply(E.REWIND, step=step)

    def retry(self, generation: Generation) -> bool:
        """Lift the fence, so that the step can run again in ``generation``.

        Return False if a newer fence is in force.
        """
        if generation < max(self._generation, self._fenced or self._generation):
            return False
        self._apply(E.RETRY)
        self._generation = generation
        self._fenced = None
        return True

    def check(self) -> None:
        """Raise InternalError if the fence of this rank contradicts its generation or its state."""
        if self._fenced is not None and self._fenced <= self._generation:
            raise self._error(InternalError, f"fenced by {self._fenced} but in {self._generation}")
        if self._fenced is not None and self._state == "compute":
            raise self._error(InternalError, "computing while fenced")

    def snapshot(self) -> dict[str, str | int]:
        """Return state, step, generation and fence as plain data, for reports and the simulator."""
        return {
            "state": self._state,
            "step": self._step,
            "generation": str(self._generation),
            "fenced": str(self._fenced or ""),
        }

    def _apply(self, event: StepEvent, *, fenced: bool | None = None, step: int | None = None) -> RankState:
        is_fenced = self._fenced is not None if fenced is None else fenced
        target = _TARGETS.get((self._state, event, is_fenced))
        if target is None:
            kind = StepError if event in _USER_EVENTS else InternalError
            raise self._error(kind, f"{event.value!r} does not fit {self._where()}")
        before, where = self._state, self._where()
        self._state = target
        if event is E.END:
            self._step += 1
        if step is not None:
            self._step = step
        self._story.append(f"{where} -{event.value}-> {self._where()}")
        if self._observe is not None:
            self._observe(before, target, self._step)
        return target

    def _where(self) -> str:
        fence = f" fenced by {self._fenced}" if self._fenced is not None else ""
        return f"{self._state.upper()}({self._step}){fence}"

    def _error(self, kind: type[HoldfastError], what: str) -> HoldfastError:
        story = "\n    ".join(self._story) or "(nothing yet)"
        hint = (
            "one optimizer update per `with step:` block, blocks are not nested"
            if kind is StepError
            else "please report this with the lines above"
        )
        return kind(f"{what} (generation {self._generation}); the last events:\n    {story}", hint=hint)
