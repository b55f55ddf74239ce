"""The functions of a session that :class:`StepParticipant` calls, the rank's side of the step protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from holdfast.core.protocol.messages import LoopPlace, OutsideCollectives
from holdfast.core.worker.decision_orders import CarryOut, RefuseOrder


class ParticipantCalls(NamedTuple):
    """The functions of a session that ``StepParticipant`` calls. The defaults do nothing."""

    carry_out: Callable[[CarryOut], None] = lambda command: None  # task thread: an order of a decision
    refuse: Callable[[RefuseOrder], None] = lambda command: (
        None
    )  # task thread: an order that cannot be carried out
    trained: Callable[[], bool] = lambda: True  # task thread: the model holds the trained weights
    end_serving: Callable[[], None] = lambda: (
        None
    )  # client or task thread: the job continues, the state changes
    rewind: Callable[[int], None] = lambda step: None  # main thread: go back to the kept state of this step
    kept: Callable[[], tuple[int, ...]] = tuple  # steps whose state of this rank is in the memory tier
    # The collectives that the script has made since the last block, outside of blocks; None: it has made none.
    outside: Callable[[], OutsideCollectives | None] = lambda: None
    loop: Callable[[], LoopPlace | None] = lambda: (
        None
    )  # the place in the newest loop; None: it has begun none
    joined: Callable[[int], object] = lambda step: None  # main thread of a newcomer: it joins at this step
