"""What is done about a node that will leave: move its ranks, continue with fewer, save and end, or wait.

Theory. The answer is a pure function of what is known at the moment, asked again whenever that may have changed. The
later an irreversible answer is given the better: a notice may be withdrawn, and a spare may come. So a move that has a
place is prepared at once, beside the training, and everything that costs the job something waits for the last moment
at which it still fits before the deadline.

Invariants:
1. Nothing that costs work or ranks is done before it has to be, but for a request that says ``at_once``.
2. The job is saved and ended only where the nodes that stay cannot hold it, or its state, and a deadline is near.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Choice = Literal["wait", "prepare", "move", "shrink", "leave", "save"]


class Plight(msgspec.Struct, frozen=True, kw_only=True):
    """A node with a notice, and the job around it; times in seconds.

    Attributes:
        left_s: until the deadline; None: there is none.
        move_s, save_s: what a change of seats, and a save of the whole job, take at most.
        at_once: the launcher of the node was asked: a job that cannot do without the node does not wait.
        stands: those that stay are a majority, and hold the whole state.
        fits: they have room for all ranks.
        fits_fewer: they have room for fewer ranks, and that is allowed.
        holds_ranks: the node has some.
        prepared: the processes that will take them are built, or cannot be.
    """

    left_s: float | None
    move_s: float
    save_s: float
    at_once: bool
    stands: bool
    fits: bool
    fits_fewer: bool
    holds_ranks: bool
    prepared: bool


def choose(plight: Plight) -> Choice:
    """The table of docs/design/0036-leaving.md."""
    left_s = plight.left_s
    late = left_s is not None and left_s <= plight.move_s
    if plight.stands and not plight.holds_ranks:
        return "leave"
    if plight.stands and plight.fits:
        return "move" if plight.prepared or late else "prepare"
    if plight.stands and plight.fits_fewer:
        return "shrink" if late or left_s is None or plight.at_once else "wait"
    if plight.at_once or (left_s is not None and left_s <= plight.save_s):
        return "save"
    return "wait"
