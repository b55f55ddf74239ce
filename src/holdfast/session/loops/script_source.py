"""Facts read from the code of the script: whether a call is in a ``for`` loop or counted, and how a loop is left.

Theory. The code of a Python function shows its loops: ``FOR_ITER`` is at the head of a loop, and its target is after
the loop. A frame shows its current instruction. Only frames up to the one that entered the session are inspected, and
no loop around the session itself: such a loop makes a session in each turn. A generator is closed where the iterator of
its loop is dropped. After ``break`` and ``return`` a separate instruction does this, after an exception the raising
instruction. An instruction also has its position in the source: a call whose position includes that of another call
takes the result of the other one.
"""

from __future__ import annotations

import dis
from types import FrameType


def enclosed(caller: FrameType, entered_by: tuple[FrameType, int] | None) -> bool:
    """Return whether ``caller`` makes its call in a loop.

    Args:
        entered_by: the frame that has entered the session, and its instruction at that time; None: not known. False is
            returned if that frame does not call ``caller``.
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


def counted(caller: FrameType) -> bool:
    """Return whether ``caller`` gives the result of the call that it makes to ``enumerate``, or to a call in it."""
    code = list(dis.get_instructions(caller.f_code))
    begun = [each for each in code if each.offset <= caller.f_lasti]
    first, last = _extent(begun[-1])  # the call itself: a frame can also show one of the caches behind it
    counters = {_extent(each)[0] for each in code if each.argval == "enumerate"}
    return any(begin in counters and begin < first and last < end for begin, end in map(_extent, code))


def leaves(caller: FrameType) -> bool:
    """Return True if ``break`` or ``return`` ends the loop over a generator; False after an exception, or if unknown.

    Args:
        caller: the frame with the loop, which is just closing the generator.
    """
    code = dis.get_instructions(caller.f_code)
    return any(each.offset == caller.f_lasti and each.opname in ("POP_TOP", "POP_ITER") for each in code)


def _loops(frame: FrameType) -> list[tuple[int, int]]:
    code = dis.get_instructions(frame.f_code)
    return [(each.offset, each.argval) for each in code if each.opname == "FOR_ITER"]


_Place = tuple[int, int]  # line and column


def _extent(instruction: dis.Instruction) -> tuple[_Place, _Place]:
    """Return the first and last place of an instruction in the source; Python can be set to keep no columns."""
    at = instruction.positions
    if at is None or None in at:
        return (0, 0), (0, 0)
    return (at.lineno or 0, at.col_offset or 0), (at.end_lineno or 0, at.end_col_offset or 0)
