"""The position of the user's script, and the state that a survivor can give or save at each position.

Theory. When a rank is lost, each survivor gives its state to the replacement or saves it. The position of the
survivor's script determines which state it can give. Code after a block belongs to the step that the block committed.
Code after a loop is run again from the state of the end of the loop. Code before a block is not a part of the state
before that block. Three facts describe the script:

- its *position*: the code that runs now. ``TABLE`` has the transitions by events;
- its *attendance*: whether the script is expected at the next step. ``ATTENDANCES`` has its transitions;
- facts about the loop and the process: the step to which the loop can go back, whether the loop is at its end, whether
  another library drives the loop, whether this process still has to join.

Every other property of the script follows from these facts: ``RULES`` has one row per position. ``docs/protocol.md``
shows the three tables, and a test compares them.

The state machine is not thread-safe: main thread, client thread and task thread share it under the lock of its owner.

Invariants:
1. The script has three different positions: before a block, in the block, and after the block.
2. A survivor gives its present state in three cases only: the script waits at its block, the block was aborted, or
   another library drives the loop. Otherwise it gives the state of the last boundary between two steps.
3. A recovery waits for the script only in a position in which the script may change the state.
4. A loop cannot go back once its script has taken the next step, and never after the script has left the loop.
5. A section is open exactly while the attendance is ``in_section`` or ``steps_in_section``.
6. The events ``loop_left`` and ``loop_over`` are allowed at any time after the first loop has opened. Python closes a
   generator when its last reference is gone, even in the block of a later loop. The event ``block_ended`` of that block
   is still allowed after that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import StrEnum
from typing import Literal, NamedTuple

from holdfast.errors import HoldfastError, InternalError, StepError

STORY_LENGTH = 24


class ScriptPosition(StrEnum):
    """The part of the user's script that runs now, relative to its loops over steps and the blocks of its steps."""

    OUTSIDE = "outside"  # the session is open, and no loop has begun
    # Before the loop of an epoch or phase, or after the last one; a recovery does not wait for this code.
    BETWEEN_LOOPS = "between_loops"
    BOUNDARY = "boundary"  # the code of the session runs, between two steps of a loop
    AT_STEP = "at_step"  # the next step is fixed; no code of the script runs before its block
    BEFORE_BLOCK = "before_block"  # the script has received the step, and runs code before its block
    AT_BLOCK = "at_block"  # the code before the block is done; the script waits in the session for its block
    IN_BLOCK = "in_block"
    AFTER_BLOCK = "after_block"  # the block has committed, and the loop has not been asked for the next step
    LEFT_LOOP = "left_loop"  # the script has left the loop before its end
    AFTER_LOOP = "after_loop"  # the loop has come to its end
    NEXT_LOOP = "next_loop"  # a loop opens after another one; the code of the session runs


class ScriptEvent(StrEnum):
    """An event of the main thread in its loops over steps.

    ``block_begun``, ``turn_done``, ``strayed`` and the events of sections change the attendance.
    """

    LOOP_AHEAD = "loop_ahead"  # an epoch or phase begins, or a loop that is done already was skipped
    LOOP_OPENED = "loop_opened"
    RETURNED = "returned"  # the script has called the session: its changes are a part of the state
    STEP_TAKEN = "step_taken"  # the loop has fixed its next step
    STEP_GIVEN = "step_given"  # the script receives the step
    # Another library drives the loop, and has done the work before the block.
    FRAMEWORK_DONE = "framework_done"
    HELD = "held"  # the block cannot begin: the script waits for the job
    BLOCK_BEGUN = "block_begun"
    BLOCK_ENDED = "block_ended"  # the block ended, and the step counts
    BLOCK_LEFT = "block_left"  # an abort or an exception ended the block
    LOOP_LEFT = "loop_left"  # the script left the loop before its end
    LOOP_OVER = "loop_over"  # the loop has come to its end
    TURN_ENDED = "turn_ended"  # the script is at the end of an epoch or phase, and the ranks vote on it
    TURN_DONE = "turn_done"  # all ranks have done the epoch or phase
    SECTION_BEGUN = "section_begun"
    SECTION_ENDED = "section_ended"
    SECTION_CUT = "section_cut"  # an exception ended the section
    STRAYED = "strayed"  # the script does not return to its loop


class Attendance(StrEnum):
    """Whether the session can expect the script at its next step, or whether the script is away from its loop."""

    EXPECTED = "expected"
    IN_SECTION = "in_section"  # in an announced section: expected only if the section began after a block
    STEPS_IN_SECTION = "steps_in_section"  # in a section around whole steps
    STRAYED = "strayed"  # not expected: the script does not return to its loop


P, E, A = ScriptPosition, ScriptEvent, Attendance


class Moves(NamedTuple):
    """Rows of the transition table: from each of the positions ``sources``, ``event`` leads to the position ``target``.

    If ``target`` is None, the position does not change.
    """

    event: ScriptEvent
    sources: tuple[ScriptPosition, ...]
    target: ScriptPosition | None


BESIDE_BLOCK = (P.BEFORE_BLOCK, P.AFTER_BLOCK)
"""The positions in the body of a loop over steps, outside of the block."""
_OUT_OF_BLOCK = tuple(p for p in P if p is not P.IN_BLOCK)
_SINCE_A_LOOP = tuple(p for p in P if p is not P.OUTSIDE)

MOVES: tuple[Moves, ...] = (
    Moves(E.LOOP_AHEAD, (P.OUTSIDE, P.BETWEEN_LOOPS, P.BOUNDARY), P.BETWEEN_LOOPS),
    Moves(E.LOOP_AHEAD, (P.AT_STEP, P.BEFORE_BLOCK), P.BEFORE_BLOCK),
    Moves(E.LOOP_AHEAD, (P.AFTER_BLOCK, P.LEFT_LOOP), P.LEFT_LOOP),
    Moves(E.LOOP_AHEAD, (P.AFTER_LOOP, P.NEXT_LOOP), P.AFTER_LOOP),
    Moves(E.LOOP_AHEAD, (P.AT_BLOCK,), None),
    Moves(E.LOOP_OPENED, (P.OUTSIDE, P.BETWEEN_LOOPS, P.BOUNDARY), P.BOUNDARY),
    Moves(E.LOOP_OPENED, (P.AT_STEP, P.BEFORE_BLOCK), P.AT_STEP),
    Moves(E.LOOP_OPENED, (P.AFTER_BLOCK, P.LEFT_LOOP), P.AFTER_BLOCK),
    Moves(E.LOOP_OPENED, (P.AFTER_LOOP, P.NEXT_LOOP), P.NEXT_LOOP),
    Moves(E.LOOP_OPENED, (P.AT_BLOCK,), None),
    Moves(E.RETURNED, (P.BETWEEN_LOOPS, P.BEFORE_BLOCK, P.LEFT_LOOP, P.AFTER_LOOP), P.BETWEEN_LOOPS),
    Moves(E.RETURNED, (P.BOUNDARY, P.AT_STEP, P.AT_BLOCK, P.AFTER_BLOCK, P.NEXT_LOOP), P.BOUNDARY),
    Moves(E.RETURNED, (P.OUTSIDE,), None),
    Moves(E.STEP_TAKEN, tuple(p for p in _SINCE_A_LOOP if p is not P.IN_BLOCK), P.AT_STEP),
    Moves(E.STEP_GIVEN, (P.AT_STEP,), P.BEFORE_BLOCK),
    Moves(E.FRAMEWORK_DONE, (P.BETWEEN_LOOPS, P.BOUNDARY), P.BOUNDARY),
    Moves(E.FRAMEWORK_DONE, (P.AT_STEP, P.BEFORE_BLOCK), P.AT_STEP),
    Moves(E.FRAMEWORK_DONE, (P.AFTER_BLOCK, P.LEFT_LOOP), P.AFTER_BLOCK),
    Moves(E.FRAMEWORK_DONE, (P.AFTER_LOOP, P.NEXT_LOOP), P.NEXT_LOOP),
    Moves(E.FRAMEWORK_DONE, (P.OUTSIDE, P.AT_BLOCK, P.IN_BLOCK), None),
    Moves(E.HELD, (P.AT_STEP, P.BEFORE_BLOCK, P.AT_BLOCK), P.AT_BLOCK),
    Moves(E.HELD, (P.BOUNDARY, P.AFTER_BLOCK, P.NEXT_LOOP), P.BOUNDARY),
    Moves(E.HELD, (P.BETWEEN_LOOPS, P.LEFT_LOOP, P.AFTER_LOOP), P.BETWEEN_LOOPS),
    Moves(E.HELD, (P.OUTSIDE,), None),
    Moves(E.BLOCK_BEGUN, _OUT_OF_BLOCK, P.IN_BLOCK),
    Moves(E.BLOCK_ENDED, (P.IN_BLOCK, P.LEFT_LOOP, P.AFTER_LOOP), P.AFTER_BLOCK),  # see invariant 6
    Moves(E.BLOCK_LEFT, (P.IN_BLOCK,), P.BOUNDARY),
    Moves(E.BLOCK_LEFT, _OUT_OF_BLOCK, None),
    Moves(E.LOOP_LEFT, _SINCE_A_LOOP, P.LEFT_LOOP),
    Moves(E.LOOP_OVER, _SINCE_A_LOOP, P.AFTER_LOOP),
    Moves(E.TURN_ENDED, _OUT_OF_BLOCK, P.AFTER_LOOP),
)

TABLE: Mapping[tuple[ScriptPosition, ScriptEvent], ScriptPosition] = {
    (source, moves.event): source if moves.target is None else moves.target
    for moves in MOVES
    for source in moves.sources
}
"""(position, event) -> next position. A pair that is missing cannot happen."""

ATTENDANCES: Mapping[tuple[Attendance, ScriptEvent], Attendance] = {
    (A.EXPECTED, E.SECTION_BEGUN): A.IN_SECTION,
    (A.STRAYED, E.SECTION_BEGUN): A.IN_SECTION,
    (A.IN_SECTION, E.SECTION_ENDED): A.EXPECTED,
    (A.STEPS_IN_SECTION, E.SECTION_ENDED): A.EXPECTED,
    (A.IN_SECTION, E.SECTION_CUT): A.STRAYED,
    (A.STEPS_IN_SECTION, E.SECTION_CUT): A.EXPECTED,
    (A.EXPECTED, E.STRAYED): A.STRAYED,
    (A.IN_SECTION, E.STRAYED): A.IN_SECTION,
    (A.STEPS_IN_SECTION, E.STRAYED): A.IN_SECTION,
    (A.STRAYED, E.STRAYED): A.STRAYED,
    (A.EXPECTED, E.BLOCK_BEGUN): A.EXPECTED,
    (A.IN_SECTION, E.BLOCK_BEGUN): A.STEPS_IN_SECTION,
    (A.STEPS_IN_SECTION, E.BLOCK_BEGUN): A.STEPS_IN_SECTION,
    (A.STRAYED, E.BLOCK_BEGUN): A.EXPECTED,
    (A.EXPECTED, E.TURN_DONE): A.EXPECTED,
    (A.IN_SECTION, E.TURN_DONE): A.STEPS_IN_SECTION,
    (A.STEPS_IN_SECTION, E.TURN_DONE): A.STEPS_IN_SECTION,
    (A.STRAYED, E.TURN_DONE): A.EXPECTED,
}
"""(attendance, event) -> next attendance. An event without a row does not change the attendance, or cannot happen."""

_OF_ATTENDANCE = frozenset({E.SECTION_BEGUN, E.SECTION_ENDED, E.SECTION_CUT, E.STRAYED, E.TURN_DONE})
_MISUSE = frozenset(
    {
        E.LOOP_AHEAD, E.LOOP_OPENED, E.RETURNED, E.STEP_TAKEN, E.HELD, E.BLOCK_BEGUN, E.TURN_ENDED,
        E.SECTION_BEGUN,
    }
)  # fmt: skip
"""Events that a script can cause at a wrong time."""

REPORTED = frozenset({E.LOOP_LEFT, E.LOOP_OVER, E.STRAYED})
"""Events after which a fenced rank answers its fence again, because its first answer no longer holds."""

Awaited = Literal["", "step", "block", "loop"]
Moment = Literal["now", "boundary"]


class PositionRules(NamedTuple):
    """The rules of recovery for one position of the script.

    Attributes:
        awaited: the code of the script that a recovery may wait for, because the state is complete only after it:
            code before the block (``step``), after the block (``block``) or after the loop (``loop``). Until that
            code ends, the model may hold other weights. Empty if a recovery waits for nothing.
        gives: the state that a survivor gives: the present one (``now``), or that of the last boundary between two
            steps (``boundary``).
        can_rewind: the loop can take the script back to an earlier step, if the loop allows it.
        guarded: a replacement that has not joined must not run a collective at this position.
    """

    awaited: Awaited
    gives: Moment
    can_rewind: bool
    guarded: bool


RULES: Mapping[ScriptPosition, PositionRules] = {
    P.OUTSIDE: PositionRules("", "boundary", True, False),
    P.BETWEEN_LOOPS: PositionRules("", "boundary", True, True),
    P.BOUNDARY: PositionRules("", "boundary", True, False),
    P.AT_STEP: PositionRules("step", "boundary", False, False),
    P.BEFORE_BLOCK: PositionRules("step", "boundary", False, True),
    P.AT_BLOCK: PositionRules("", "now", False, False),
    P.IN_BLOCK: PositionRules("", "boundary", True, False),
    P.AFTER_BLOCK: PositionRules("block", "boundary", True, False),
    P.LEFT_LOOP: PositionRules("block", "boundary", True, True),
    P.AFTER_LOOP: PositionRules("loop", "boundary", True, True),
    P.NEXT_LOOP: PositionRules("loop", "boundary", True, False),
}

NO_REWIND = -1


def comes_back(position: ScriptPosition, attendance: Attendance) -> bool:
    """Return True if a recovery may wait for the code that the script runs, and its next step can be expected."""
    awaited = RULES[position].awaited
    if attendance in (A.EXPECTED, A.STEPS_IN_SECTION):
        return awaited != ""
    return attendance is A.IN_SECTION and awaited == "block"


class ScriptMachine:
    """The state machine of the position of one script.

    Args:
        joining: this process replaces a lost rank, and has not joined the job.

    Every method returns at once. An event at a wrong time raises :class:`StepError` if a script can cause it, otherwise
    :class:`InternalError`. Both errors list the last events.

    Example:
        >>> machine = ScriptMachine()
        >>> machine.handle(ScriptEvent.LOOP_OPENED).value
        'boundary'
        >>> machine.handle(ScriptEvent.STEP_TAKEN).value
        'at_step'
        >>> machine.awaits(replaces=True)  # a replacement runs the code before this block, or has run it
        True
    """

    def __init__(self, *, joining: bool = False) -> None:
        self._position = P.OUTSIDE
        self._attendance = A.EXPECTED
        self._rules = RULES[P.OUTSIDE]
        self._joining = joining
        self._rewinds_to = NO_REWIND
        self._unfinished = False
        self._by_framework = False
        self._again = False
        self._restoring = False
        self._story: deque[tuple[ScriptEvent, ScriptPosition, Attendance]] = deque(maxlen=STORY_LENGTH)

    # ------------------------------------------------------------------ what happens

    def handle(self, event: ScriptEvent, *, again: bool = False) -> ScriptPosition:
        """Apply ``event`` and return the position that it leads to.

        Args:
            event: the event.
            again: with ``STEP_GIVEN`` (the script receives its step): the code before the block of this step has run
                before.

        Raises:
            StepError: the script caused ``event`` at a wrong time.
            InternalError: the session caused ``event`` at a wrong time.
        """
        position, attendance = self._position, self._attendance
        if event in _OF_ATTENDANCE:
            attendance = self._attendance_after(event)
        else:
            if event is E.BLOCK_BEGUN:  # a block also ends an absence
                attendance = self._attendance_after(event)
            position = self._position_after(event)
            self._again = again and event is E.STEP_GIVEN
        self._position, self._attendance, self._rules = position, attendance, RULES[position]
        self._story.append((event, position, attendance))
        if event is E.LOOP_LEFT or event is E.LOOP_OVER:
            self._rewinds_to = NO_REWIND
        elif event is E.FRAMEWORK_DONE:
            self._by_framework = True
        elif event is E.TURN_DONE:
            self._unfinished = False
        return position

    def require(self, event: ScriptEvent) -> None:
        """Raise an error if ``event`` is not allowed at the present position. The machine does not change.

        Raises:
            StepError: the script caused ``event`` at a wrong time.
            InternalError: the session caused ``event`` at a wrong time.
        """
        self._position_after(event)

    def run_loop(self, *, unfinished: bool) -> None:
        """Record that the script runs the open loop over steps.

        Args:
            unfinished: the loop ends at a step that the script has not reached; False for a loop without such a step.
        """
        self._unfinished = unfinished

    def end_loop(self) -> None:
        """Record that the loop has reached its end on all ranks, while the script is still in it."""
        self._unfinished = False

    def allow_rewind(self, step: int) -> None:
        """Record that the open loop can return, without a restart, to a kept state of ``step`` or later."""
        self._rewinds_to = step

    def forbid_rewind(self) -> None:
        """Record that the open loop is about to end and can no longer return to an earlier step."""
        self._rewinds_to = NO_REWIND

    def begin_restore(self) -> None:
        """Record that the main thread begins to restore an earlier state.

        Until :meth:`end_restore` the state mixes two steps and must not be read.
        """
        self._restoring = True

    def end_restore(self) -> None:
        """Record that the restored state is complete."""
        self._restoring = False

    def join(self) -> None:
        """Record that this process has joined the job."""
        self._joining = False

    # ------------------------------------------------------------------ what that means

    @property
    def position(self) -> ScriptPosition:
        """The part of the script that runs now."""
        return self._position

    @property
    def attendance(self) -> Attendance:
        """Whether the script is expected at its next step."""
        return self._attendance

    @property
    def rules(self) -> PositionRules:
        """The rules of recovery for the present position of the script."""
        return self._rules

    @property
    def story(self) -> tuple[str, ...]:
        """The last events of the script on this rank, as text for reports, oldest first."""
        return tuple(f"{event.value} -> {where.value}, {how.value}" for event, where, how in self._story)

    @property
    def joining(self) -> bool:
        """True if this process replaces a lost rank and has not joined the job."""
        return self._joining

    @property
    def restoring(self) -> bool:
        """True while an earlier state is being restored: the state in memory mixes two steps."""
        return self._restoring

    @property
    def by_framework(self) -> bool:
        """True if another library drives the loop over steps.

        Such a library does its own work between two steps, and brings a replacement to the right position in it.
        """
        return self._by_framework

    @property
    def unfinished(self) -> bool:
        """True if the newest loop has not reached its end. The script may have left this loop already."""
        return self._unfinished

    @property
    def in_section(self) -> bool:
        """True while a section of the script (``s.section``) is open."""
        return self._attendance in (A.IN_SECTION, A.STEPS_IN_SECTION)

    @property
    def away(self) -> bool:
        """True if no decision may rely on the script's next step: it is in a section or does not return to its loop."""
        return self._attendance in (A.IN_SECTION, A.STRAYED)

    @property
    def rewinds_to(self) -> int:
        """The earliest step to which the open loop can return; ``NO_REWIND`` if it cannot return to any."""
        return self._rewinds_to

    @property
    def offers_rewind(self) -> int:
        """The earliest step to which the loop can return from the script's present position, or ``NO_REWIND``."""
        return self._rewinds_to if self._rules.can_rewind else NO_REWIND

    @property
    def repeats(self) -> bool:
        """True if the script now repeats code before a block: it has already run this code before the same block."""
        return self._again and self._position is P.BEFORE_BLOCK

    @property
    def may_hold_other_weights(self) -> bool:
        """True if the script runs code outside of the block, which may temporarily replace the model's weights."""
        return self._rules.awaited != ""

    def awaits(self, *, replaces: bool) -> bool:
        """Return True if the state cannot be given or saved before the script has returned to the session.

        Args:
            replaces: the state goes to replacements. If False, all ranks start again before the block. They then run
                the code before the block again, so the state need not include the effects of this code.
        """
        if self._rules.awaited == "step" and (not replaces or self._by_framework):
            return False
        return comes_back(self._position, self._attendance)

    def gives(self, *, aborted: bool) -> Moment:
        """Return which state a survivor gives to a replacement: ``now`` (the present one) or ``boundary``.

        ``boundary`` is the state of the last boundary between two steps.

        Args:
            aborted: the block of the step was aborted, so the present state is the one from the start of that block.
        """
        return "now" if aborted or self._by_framework else self._rules.gives

    # ------------------------------------------------------------------ errors

    def _position_after(self, event: ScriptEvent) -> ScriptPosition:
        target = TABLE.get((self._position, event))
        if target is None:
            raise self._error(event)
        return target

    def _attendance_after(self, event: ScriptEvent) -> Attendance:
        target = ATTENDANCES.get((self._attendance, event))
        if target is None:
            raise self._error(event)
        return target

    def _error(self, event: ScriptEvent) -> HoldfastError:
        where = f"{self._position.value}, {self._attendance.value}"
        story = "\n    ".join(self.story) or "(nothing yet)"
        text = f"{event.value!r} does not fit a script that is {where}; the last events:\n    {story}"
        if event in _MISUSE:
            return StepError(
                text,
                hint="begin steps, loops, epochs and phases outside of the block of a step, one section at a time",
            )
        return InternalError(text, hint="please report this with the lines above")
