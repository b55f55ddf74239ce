"""What a rank's side of the step protocol asks of its session."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from holdfast.core.protocol.messages import Settle


class ParticipantCalls(NamedTuple):
    """Into the session."""

    settle: Callable[[Settle], None] = lambda settle: None  # client thread: the machine took a decision
    resume: Callable[[], None] = lambda: None  # client thread: the job goes on in place
    rewind: Callable[[int], None] = lambda step: None  # main thread: go back to the kept state of this step
    kept: Callable[[], tuple[int, ...]] = tuple  # steps of which the memory tier has this rank's state
    joined: Callable[[int], object] = lambda step: None  # main thread of a newcomer: it waits for this step
