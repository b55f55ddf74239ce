"""Facts read from the script's bytecode: whether a call is in a ``for`` loop or ``zip``, and how a loop is left.

Theory. The bytecode of a Python function shows its ``for`` loops: the instruction ``FOR_ITER`` is at the head of a
loop, and its jump target is after the loop. A frame has the offset of its current instruction, so a comparison shows
whether the frame is in a loop. Frames are inspected from the caller up to the frame that entered the session. A loop
around the session itself is ignored, because it makes a new session in each pass.

A generator is closed when the iterator of its loop is dropped. After ``break`` and ``return`` a separate instruction
drops it; after an exception the current instruction is the one that raised. Each instruction also has its range in the
source text. If the range of one call contains the range of another, the outer call takes the result of the inner one.
This shows an ``enumerate``, ``zip`` or ``islice`` around the steps.
"""

from __future__ import annotations

import ast
import dis
import inspect
from collections.abc import Collection, Mapping
from functools import cache
from types import CodeType, FrameType
from typing import NamedTuple

from holdfast.runtime.worker.script_frames import place_of
from holdfast.session.variables.called_functions import definition

COUNTERS = ("enumerate", "zip", "islice")
"""Functions that count the items of an iterator, or take another item with each of them."""


def enclosed(caller: FrameType, entered_by: tuple[FrameType, int] | None) -> bool:
    """Return whether the current call of ``caller`` is in a ``for`` loop of the script.

    Args:
        caller: the frame that calls a method of the session.
        entered_by: the frame that has entered the session, and the offset of its instruction at that time; None if
            this is not known. The result is False if it is not known, or if that frame is not among the callers of
            ``caller``.
    """
    if entered_by is None:
        return False
    entered, entered_at = entered_by
    found = False
    frame: FrameType | None = caller
    while frame is not None:
        inside = frame is entered
        for first, behind in _loops(frame):
            around = inside and first < entered_at < behind
            found = found or (first < frame.f_lasti < behind and not around)
        if inside:
            return found
        frame = frame.f_back
    return False


def counter_around(caller: FrameType) -> str:
    """Return the name in ``COUNTERS`` whose call is the current call of ``caller``, or has it in its arguments.

    The result is empty if there is none. Examples are ``zip(range(9), steps)`` and ``zip(range(9), s.steps(loader))``.
    It is also empty for an ``enumerate`` in a generator that yields the items without the count: a helper that prints
    a line for some of them (``log_every(steps)``).
    """
    code = list(dis.get_instructions(caller.f_code))
    begun = [each for each in code if each.offset <= caller.f_lasti]
    first, last = _extent(begun[-1])  # the call itself: ``f_lasti`` may also be in a cache entry after it
    around = {begin for begin, end in map(_extent, code) if begin <= first and last <= end}
    found = next((each.argval for each in code if each.argval in COUNTERS and _extent(each)[0] in around), "")
    return "" if found == "enumerate" and _keeps_its_count(caller.f_code) else found


def _keeps_its_count(code: CodeType) -> bool:
    """Return whether ``code`` is a generator that yields none of the counts of its loops over ``enumerate``."""
    source = definition(code) if code.co_flags & inspect.CO_GENERATOR else None
    if source is None:
        return False
    counts = {
        name.id
        for loop in ast.walk(source)
        if isinstance(loop, ast.For) and isinstance(loop.target, ast.Tuple)
        for name in ast.walk(loop.target.elts[0])
        if isinstance(name, ast.Name)
    }
    yields = (node for node in ast.walk(source) if isinstance(node, ast.Yield))
    yielded = {name.id for node in yields for name in ast.walk(node) if isinstance(name, ast.Name)}
    return bool(counts) and counts.isdisjoint(yielded)


def leaves(caller: FrameType) -> bool:
    """Return True if ``break`` or ``return`` ends a loop over a generator.

    The result is False if an exception ends it, or if it is not known.

    Args:
        caller: the frame with the loop, which is now closing the generator.
    """
    code = dis.get_instructions(caller.f_code)
    return any(each.offset == caller.f_lasti and each.opname in ("POP_TOP", "POP_ITER") for each in code)


class Helper(NamedTuple):
    """A generator of the script around the steps (``MetricLogger.log_every``), when it asks for a step.

    Attributes:
        code: its code.
        place: its file and line.
        numbers: its variables that are whole numbers.
        counters: those that may be counts of turns.
    """

    code: CodeType
    place: str
    numbers: Mapping[str, int]
    counters: Collection[str]

    def has_counted(self, first: int, turns: int, steps: int) -> str:
        """Return, in words, the variable with which this generator has counted the turns of its loop.

        The result is empty if there is none. The text also names the variable that holds the limit of the count, and
        the place of the generator. A block that runs again takes one more turn of the loop. So a generator that counts
        turns ends the loop before the last step.

        Args:
            first: step at which this process began the loop.
            turns: turns that the loop has taken in this process.
            steps: steps that this process has committed in the loop.
        """
        if turns == steps:
            return ""
        # The last turn is not counted yet.
        counts = {begin + turns - late for begin in (0, first) for late in (1, 2)}
        for name in self.counters:
            value = self.numbers[name]
            limits = [
                other for other, limit in self.numbers.items() if other != name and 0 <= limit - value <= 2
            ]
            if value in counts and limits:
                return f"{name} and {limits[0]} ({self.place})"
        return ""


def helper(caller: FrameType) -> Helper | None:
    """Return the generator of the script that now asks for a step, if ``caller`` is the frame of such a generator.

    The result is None if ``caller`` is not a generator. The variables of a loop that takes the steps by ``next()``
    (``for i in range(n): yield next(steps)``) count turns. Any other variable may count turns, or steps if the code
    uses ``committed`` or ``number`` of a step. It is then left out.
    """
    code = caller.f_code
    if not code.co_flags & inspect.CO_GENERATOR:
        return None
    numbers = {name: value for name, value in caller.f_locals.items() if type(value) is int}
    sure = [name for name in _counted_by_loops(code) if name in numbers]
    knows_steps = not {"committed", "number"}.isdisjoint(code.co_names)
    counters = sure + ([] if knows_steps else [name for name in numbers if name not in sure])
    return Helper(code, place_of(caller), numbers, counters) if counters else None


@cache
def _counted_by_loops(code: CodeType) -> tuple[str, ...]:
    """Return the variables of the innermost loops of ``code`` around a call of ``next``."""
    source = definition(code) if "next" in code.co_names else None
    loops = (
        [] if source is None else [node for node in ast.walk(source) if isinstance(node, ast.For | ast.While)]
    )
    innermost: dict[ast.Call, ast.For | ast.While] = {}
    for loop in loops:  # from the outside to the inside
        for call in (node for part in loop.body for node in ast.walk(part) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Name) and call.func.id == "next":
                innermost[call] = loop
    targets = [loop.target for loop in innermost.values() if isinstance(loop, ast.For)]
    return tuple(name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))


def has_ended(helper: Helper, caller: FrameType) -> bool:
    """Return whether the generator ``helper`` has ended its loop over the steps itself.

    Called when the generator of the steps is closed.

    Args:
        caller: the frame that closes the generator of the steps: the frame of ``helper``, or that of the loop over
            ``helper``.
    """
    if caller.f_code is helper.code:
        return leaves(caller)
    return any(offset == caller.f_lasti for offset, _ in _loops(caller))


def _loops(frame: FrameType) -> list[tuple[int, int]]:
    code = dis.get_instructions(frame.f_code)
    return [(each.offset, each.argval) for each in code if each.opname == "FOR_ITER"]


_Place = tuple[int, int]  # line and column


def _extent(instruction: dis.Instruction) -> tuple[_Place, _Place]:
    """Return start and end of an instruction in the source. Both are (0, 0) if Python was set to keep no columns."""
    at = instruction.positions
    if at is None or None in at:
        return (0, 0), (0, 0)
    return (at.lineno or 0, at.col_offset or 0), (at.end_lineno or 0, at.end_col_offset or 0)
