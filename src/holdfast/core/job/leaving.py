"""The answer about a node that will leave: move its ranks, continue with fewer, save and end, or wait.

Theory. The answer is a pure function of the present facts, computed again whenever they may have changed. An
irreversible answer is made as late as possible, because a notice may be withdrawn and a spare node may come. So a
possible move is prepared at once, during training. Every act that costs the job steps or ranks waits for the last
moment at which it can still end before the deadline.

Invariants:
1. An act that costs work or ranks is done as late as possible. The exception is a node whose launcher was asked to
   end (``at_once``).
2. The job is saved and ended only if the remaining nodes cannot hold it or its state, and a deadline is near.
"""

from __future__ import annotations

from typing import Literal

import msgspec

LeavingAnswer = Literal["wait", "prepare", "move", "shrink", "leave", "save"]


class LeavingFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a node with a notice and about the job. Times are in seconds.

    Attributes:
        left_s: time until the deadline; None if there is no deadline.
        move_s, save_s: longest time for a change of seats, and for a save of the whole job.
        at_once: the launcher of the node was asked to end. A job that cannot continue without the node does not wait.
        stands: the remaining nodes are a majority, and hold the whole state.
        fits: the remaining nodes have room for all ranks.
        fits_fewer: the remaining nodes have room for fewer ranks only, and fewer ranks are allowed.
        holds_ranks: the node has ranks.
        prepared: the move need not wait for new processes any longer: they are built, or cannot be built, or the time
            limit is over.
        only_ranks: the node does not leave, but had too many faults and is left out. Its ranks move only if all ranks
            have room on other nodes. Its agent stays in the job.
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
    only_ranks: bool = False


def answer_notice(facts: LeavingFacts) -> LeavingAnswer:
    """Return the answer to a notice, given these facts, by the table of docs/design/0036-leaving.md."""
    left_s = facts.left_s
    late = left_s is not None and left_s <= facts.move_s
    if facts.only_ranks and not (facts.stands and facts.fits and facts.holds_ranks):
        return "wait"
    if facts.stands and not facts.holds_ranks:
        return "leave"
    if facts.stands and facts.fits:
        return "move" if facts.prepared or late else "prepare"
    if facts.stands and facts.fits_fewer:
        return "shrink" if late or left_s is None or facts.at_once else "wait"
    if facts.at_once or (left_s is not None and left_s <= facts.save_s):
        return "save"
    return "wait"
