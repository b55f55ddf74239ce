"""What the code of the script says: whether a call stands in a ``for`` loop, and whether a loop is left by ``break``.

Theory. The code of a Python function says where its loops are: ``FOR_ITER`` stands at the head of one, and its target
behind it. A frame says where it is. Only frames up to that which entered the session are looked at, and no loop around
the session itself: such a loop makes a session in each turn. A generator is closed where the iterator of its loop is
dropped: by an instruction of its own after ``break`` and ``return``, by whatever raised after an exception.
"""

from __future__ import annotations

import dis
from types import FrameType


def enclosed(caller: FrameType, entered_by: tuple[FrameType, int] | None) -> bool:
    """Whether ``caller`` makes its call in a loop.

    Args:
        entered_by: the frame that has entered the session, and where it was then; None: not known. When it does not
            call ``caller``, nothing is known.
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


def leaves(caller: FrameType) -> bool:
    """Whether the loop over a generator that is being closed ends by ``break`` or ``return``, as far as is known.

    Args:
        caller: the frame that closes it.
    """
    code = dis.get_instructions(caller.f_code)
    return any(each.offset == caller.f_lasti and each.opname in ("POP_TOP", "POP_ITER") for each in code)


def _loops(frame: FrameType) -> list[tuple[int, int]]:
    code = dis.get_instructions(frame.f_code)
    return [(each.offset, each.argval) for each in code if each.opname == "FOR_ITER"]
