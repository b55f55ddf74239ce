"""The step protocol of one rank.

Theory. A step is two-phase commit with one tiny all-reduce as its first phase: a rank that entered the vote
has complete gradients and has promised to apply them if the job says so. Who saw the vote break, or saw it
pass after it was fenced, is IN_DOUBT and may not decide alone; the controller decides from all reports. A
*fence* (a new generation exists) freezes the rank at the next boundary: READY and COMPUTE at once, VOTING
when its vote ends or breaks, UPDATING at its block end. The whole protocol is the table ``TRANSITIONS``;
``docs/protocol.md`` shows the same rows and a test compares them.

The machine is not thread-safe: main thread and client thread share it under the lock of its owner.

Invariants:
1. UPDATING(s) is entered only from VOTING(s) by a passed vote while free, or from IN_DOUBT(s) by a decision.
2. ``step`` grows by one at block end and never otherwise; it shrinks by a rewind only.
3. A fenced rank does not begin a step, does not enter a vote and does not act on a vote that passed.
4. TORN is left by nothing but the end of the process.
5. A rank goes back only while fenced and out of its block, to a step that all ranks go back to.
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
"""States that a fenced rank cannot leave without a decision."""

Decision = Literal["apply", "discard", "stay"]


class StepEvent(StrEnum):
    """What happens to a rank. The first five are made by the main thread in the course of user code."""

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
    """One row: in ``state``, when free or fenced, ``event`` leads to ``target``."""

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
    """Where one rank stands in the step protocol.

    Args:
        generation: the generation in which the rank was started.
        observe: called with (old state, new state, step after) after each transition, under the owner's lock.

    Every method returns at once. A method that user code can call at a wrong time raises :class:`StepError`,
    any other transition outside the table raises :class:`InternalError`; both carry the last events.
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
        """State of the step protocol."""
        return self._state

    @property
    def step(self) -> int:
        """Number of updates done before the current step."""
        return self._step

    @property
    def generation(self) -> Generation:
        """The generation whose collectives this rank may use."""
        return self._generation

    @property
    def fenced(self) -> Generation | None:
        """The newest generation that fenced this rank out, or None while it is free."""
        return self._fenced

    @property
    def settled(self) -> bool:
        """Fenced, and in a state that changes by a decision only: time to answer the fence."""
        return self._fenced is not None and self._state in SETTLED

    @property
    def story(self) -> tuple[str, ...]:
        """The last transitions, oldest first."""
        return tuple(self._story)

    def open(self, step: int) -> None:
        """A session exists and stands at ``step`` updates. STARTING -> READY(step)."""
        if self._state == "starting":
            self._step = step
        self._apply(E.OPEN)

    def begin(self) -> bool:
        """Enter the block. False when fenced: the rank stays READY and has to wait for the decision."""
        return self._apply(E.BEGIN) == "compute"

    def enter_vote(self) -> bool:
        """Promise to apply the gradients. False when the step was aborted (fenced) meanwhile."""
        return self._apply(E.VOTE) == "voting"

    def vote_passed(self) -> RankState:
        """Every rank voted yes. Returns ``updating``, or ``in_doubt`` when fenced meanwhile."""
        return self._apply(E.PASSED)

    def vote_refused(self) -> RankState:
        """The vote completed and at least one rank said no. Returns ``aborted``."""
        return self._apply(E.REFUSED)

    def vote_broken(self) -> RankState:
        """The vote did not complete here; it may have elsewhere. Returns ``in_doubt``."""
        return self._apply(E.BROKEN)

    def end_block(self) -> RankState:
        """The block ended, scheduler and scaler included: UPDATING(s) -> READY(s+1)."""
        return self._apply(E.END)

    def fail(self) -> RankState:
        """The block raised. COMPUTE is aborted, VOTING in doubt, UPDATING torn; elsewhere nothing changes."""
        return self._apply(E.FAIL)

    def finish(self) -> None:
        """No more steps: READY(s) -> FINISHED(s)."""
        self._apply(E.FINISH)

    def fence(self, generation: Generation) -> bool:
        """A newer ``generation`` exists. False when this is not news (stale or repeated)."""
        if generation <= max(self._generation, self._fenced or self._generation):
            return False
        self._fenced = generation
        self._apply(E.FENCE, fenced=False if self._state == "compute" else None)
        return True

    def decide(self, step: int) -> Decision:
        """The job stands at ``step``. ``apply``: IN_DOUBT -> UPDATING, the caller runs the update and ends
        the block; ``discard``: IN_DOUBT -> ABORTED; ``stay``: nothing to do. May be told twice.

        Raises:
            InternalError: the decision contradicts what this rank knows.
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
        """This rank holds its state of an earlier ``step`` again, as the decision says for all."""
        if step > self._step:
            raise self._error(InternalError, f"back to step {step}, which is ahead")
        self._apply(E.REWIND, step=step)

    def retry(self, generation: Generation) -> bool:
        """Run the step again in ``generation``: the fence is lifted. False when a newer fence stands."""
        if generation < max(self._generation, self._fenced or self._generation):
            return False
        self._apply(E.RETRY)
        self._generation = generation
        self._fenced = None
        return True

    def check(self) -> None:
        """Raise InternalError when an invariant is broken."""
        if self._fenced is not None and self._fenced <= self._generation:
            raise self._error(InternalError, f"fenced by {self._fenced} but in {self._generation}")
        if self._fenced is not None and self._state == "compute":
            raise self._error(InternalError, "computing while fenced")

    def snapshot(self) -> dict[str, str | int]:
        """Plain data, for reports and the simulator."""
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
