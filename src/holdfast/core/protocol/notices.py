"""Notices that a node will leave: the messages about them, and what an agent keeps of them.

Part of the vocabulary of ``core/protocol/messages.py``, under the same rules. A notice stands until its source takes
it back or the node has left. Times are sent as what is left of them: clocks of nodes differ.

Invariants:
1. A notice that stands is sent to every new controller.
2. A node has one notice of each source; the newest one counts.
"""

from __future__ import annotations

import msgspec

from holdfast.core.ids import Generation, MemberId, NodeId
from holdfast.core.protocol.messages import Assignment, Message

NO_DEADLINE = -1.0
BY_HAND = "holdfast drain"
"""Source of the notices of the command line."""


class Notice(Message, frozen=True):
    """A node will leave (agent to controller). ``node_id`` empty: the whole job ends then.

    ``left_s``: seconds until then, NO_DEADLINE: none is known. ``withdrawn``: its source has taken it back.
    """

    node_id: NodeId
    source: str
    left_s: float = NO_DEADLINE
    withdrawn: bool = False


class NoticeOver(Message, frozen=True):
    """To every agent: notices of this node, of one source or (empty) of all, are over."""

    node_id: NodeId
    source: str = ""


class DrainNode(Message, frozen=True):
    """``holdfast drain`` to an agent of the job: a notice by hand. Answered by an ``Ack``."""

    node_id: NodeId
    left_s: float = NO_DEADLINE
    withdrawn: bool = False

    def as_notice(self) -> Notice:
        """What the agent tells of it."""
        return Notice(node_id=self.node_id, source=BY_HAND, left_s=self.left_s, withdrawn=self.withdrawn)


class PrepareSeats(Message, frozen=True):
    """To the agent that will start newcomers for these ranks: build them beforehand; empty: they are not needed."""

    node_id: NodeId
    generation: Generation
    world_size: int
    members: tuple[Assignment, ...]


class SeatsPrepared(Message, frozen=True):
    """These ranks have a process built beforehand here. ``failed``: why one could not be built."""

    node_id: NodeId
    ranks: tuple[int, ...]
    failed: str = ""


class HoldOrder(Message, frozen=True):
    """To one worker: ask in the next vote that all ranks stop at the end of that step, for a change of seats."""

    member_id: MemberId
    generation: Generation


class HoldReached(Message, frozen=True):
    """Answer to :class:`HoldOrder`: all ranks have voted so, and this one stands before ``step``, for a short time."""

    member_id: MemberId
    generation: Generation
    step: int


class Notices:
    """Those that one agent has to tell."""

    def __init__(self) -> None:
        self._standing: dict[tuple[NodeId, str], tuple[Notice, float]] = {}

    def note(self, now: float, notice: Notice) -> bool:
        """Keep it, or forget the one that it takes back; False when that is no news."""
        key = (notice.node_id, notice.source)
        known = self._standing.get(key)
        if notice.withdrawn:
            self._standing.pop(key, None)
            return (
                known is not None or notice.source == BY_HAND
            )  # given by hand, it may stand with another agent
        due_s = now + notice.left_s
        if known is not None and (known[0].left_s < 0) == (notice.left_s < 0):
            if notice.left_s < 0 or abs(due_s - known[1]) < 1.0:
                return False
        self._standing[key] = (notice, due_s)
        return True

    def over(self, order: NoticeOver) -> None:
        """They need not be sent again."""
        for node_id, source in list(self._standing):
            if node_id == order.node_id and order.source in ("", source):
                del self._standing[node_id, source]

    def standing(self, now: float) -> list[Notice]:
        """All, with what is left of their time."""
        return [
            notice if notice.left_s < 0 else msgspec.structs.replace(notice, left_s=max(0.0, due_s - now))
            for _, (notice, due_s) in sorted(self._standing.items())
        ]
