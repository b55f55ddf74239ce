"""The functions of a session that its side of the step protocol calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from holdfast.core.protocol.messages import Settle


class ParticipantCalls(NamedTuple):
    """The functions of a session that ``StepParticipant`` calls; by default they do nothing."""

    settle: Callable[[Settle], None] = lambda settle: None  # client thread: the controller has decided
    resume: Callable[[], None] = lambda: None  # client thread: the surviving processes continue
    rewind: Callable[[int], None] = lambda step: None  # main thread: go back to the kept state of this step
    kept: Callable[[], tuple[int, ...]] = tuple  # steps whose state of this rank is in the memory tier
    joined: Callable[[int], object] = lambda step: None  # main thread of a newcomer: it joins at this step
