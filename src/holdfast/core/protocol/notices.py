"""Notices that a node will leave: the messages about them, and the notices that an agent keeps.

These messages follow the rules of ``core/protocol/messages.py``. A notice is in force until its source withdraws it or
the node has left. Times are sent as remaining seconds, because the clocks of nodes differ.

Invariants:
1. A notice in force is sent to every new controller.
2. A node has one notice of each source; the newest one counts.
"""

from __future__ import annotations

import msgspec

from holdfast.core.ids import Generation, MemberId, NodeId
from holdfast.core.protocol.messages import Assignment, Message

NO_DEADLINE = -1.0
BY_HAND = "holdfast drain"
"""Source of the notices that ``holdfast drain`` gives."""


class Notice(Message, frozen=True):
    """Report of an agent that a node will leave. With an empty ``node_id`` the whole job will end.

    Attributes:
        source: the origin of the notice, for example a command or an event of the cloud.
        left_s: seconds until the node leaves; NO_DEADLINE if unknown.
        withdrawn: the source has withdrawn the notice.
    """

    node_id: NodeId
    source: str
    left_s: float = NO_DEADLINE
    withdrawn: bool = False


class NoticeOver(Message, frozen=True):
    """Message to every agent that notices about a node are over.

    The notices of ``source`` are meant, or those of all sources if it is empty.
    """

    node_id: NodeId
    source: str = ""


class DrainNode(Message, frozen=True):
    """Request of ``holdfast drain`` to an agent to give or withdraw a notice about a node. The answer is an ``Ack``."""

    node_id: NodeId
    left_s: float = NO_DEADLINE
    withdrawn: bool = False

    def as_notice(self) -> Notice:
        """Return this request as the notice that the agent sends to the controller."""
        return Notice(node_id=self.node_id, source=BY_HAND, left_s=self.left_s, withdrawn=self.withdrawn)


class PrepareSeats(Message, frozen=True):
    """Order to an agent: build processes for the ranks of ``members``, which will move to its node.

    With no members: end the processes that were built for an earlier order.
    """

    node_id: NodeId
    generation: Generation
    world_size: int
    members: tuple[Assignment, ...]


class SeatsPrepared(Message, frozen=True):
    """Report of an agent: ``ranks`` have a prepared process on its node. ``failed``: why one could not be built."""

    node_id: NodeId
    ranks: tuple[int, ...]
    failed: str = ""


class HoldOrder(Message, frozen=True):
    """Order to one worker: in the next vote, request that all ranks stop after that step for a change of seats."""

    member_id: MemberId
    generation: Generation


class HoldReached(Message, frozen=True):
    """Answer to :class:`HoldOrder`: a vote has carried the request, and all ranks stop.

    This rank waits before ``step`` for a short time. The controller answers with a fence or with :class:`HoldOver`.
    """

    member_id: MemberId
    generation: Generation
    step: int


class HoldOver(Message, frozen=True):
    """Order to one worker: no seats are changed, so do not wait before ``step`` any longer.

    An order to wait before a later step stays in force.
    """

    member_id: MemberId
    generation: Generation
    step: int


class Notices:
    """The notices in force that one agent keeps and sends to each controller."""

    def __init__(self) -> None:
        self._standing: dict[tuple[NodeId, str], tuple[Notice, float]] = {}

    def note(self, now: float, notice: Notice) -> bool:
        """Keep a notice, or remove a withdrawn one. Return True if the controller must receive ``notice``."""
        key = (notice.node_id, notice.source)
        known = self._standing.get(key)
        if notice.withdrawn:
            self._standing.pop(key, None)
            # Given by hand, it may be in force at another agent.
            return known is not None or notice.source == BY_HAND
        due_s = now + notice.left_s
        if known is not None and (known[0].left_s < 0) == (notice.left_s < 0):
            if notice.left_s < 0 or abs(due_s - known[1]) < 1.0:
                return False
        self._standing[key] = (notice, due_s)
        return True

    def over(self, order: NoticeOver) -> None:
        """Remove the notices that have ended according to ``order``, so that they are not sent again."""
        for node_id, source in list(self._standing):
            if node_id == order.node_id and order.source in ("", source):
                del self._standing[node_id, source]

    def standing(self, now: float) -> list[Notice]:
        """Return all notices in force, each with its remaining seconds at ``now``."""
        return [
            notice if notice.left_s < 0 else msgspec.structs.replace(notice, left_s=max(0.0, due_s - now))
            for _, (notice, due_s) in sorted(self._standing.items())
        ]
