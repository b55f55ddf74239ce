"""Detection of silent nodes: frequent heartbeats come in, rare events come out.

Theory. Heartbeats are the only frequent messages of the control plane, and this module consumes them. The resulting
events (a node is suspected or lost) are rare. So the code that handles them may be slow, and may write and replay a
journal. A closed connection makes a node suspected at once. Suspicion costs nothing: a successor agent that joins
within the adoption limit (``adoption_s``) finds its workers undisturbed. Only a *lost* node is a fault.

Invariants:
1. A node is suspected at most once before it is back or lost. A lost node stays lost until it sends a hello again.
2. This module reads no clock: ``now`` is an argument, in seconds.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from holdfast.core.config import Config
from holdfast.core.ids import NodeId


class NodeEvent(NamedTuple):
    """The event that a node is now suspected or lost."""

    node_id: NodeId
    kind: Literal["suspected", "lost"]
    reason: str


class _NodeWatch:
    def __init__(self, now: float) -> None:
        self.heard_at = now
        self.suspected_at: float | None = None


class Liveness:
    """The heartbeats of the agents, and the nodes that are suspected.

    Attributes:
        voters: the newest electorate that is known; empty if the job has no other node.
    """

    def __init__(self, config: Config) -> None:
        self.voters = tuple(NodeId(voter) for voter in config.voters)
        self._config = config
        self._watches: dict[NodeId, _NodeWatch] = {}

    def hello(self, node_id: NodeId, now: float) -> None:
        """Record that a node has joined or rejoined."""
        self._watches[node_id] = _NodeWatch(now)

    def beat(self, node_id: NodeId, now: float) -> None:
        """Record a heartbeat of a node. It also ends a suspicion of the node."""
        watch = self._watches.get(node_id)
        if watch is not None:
            watch.heard_at = now
            watch.suspected_at = None

    def gone(self, node_id: NodeId, now: float) -> NodeEvent | None:
        """Suspect a node whose connection has closed.

        Return the event, or None if the node is unknown or suspected already.
        """
        watch = self._watches.get(node_id)
        if watch is None or watch.suspected_at is not None:
            return None
        watch.suspected_at = now
        return NodeEvent(node_id, "suspected", "its connection closed")

    def leave(self, node_id: NodeId) -> None:
        """Forget a node that is given up although it sends heartbeats. After its next hello the node counts again."""
        self._watches.pop(node_id, None)

    def tick(self, now: float) -> list[NodeEvent]:
        """Suspect silent nodes, and declare suspected nodes lost when their time is over. Return the events."""
        events: list[NodeEvent] = []
        for node_id, watch in sorted(self._watches.items()):
            if watch.suspected_at is None:
                if now - watch.heard_at >= self._config.lost_s:
                    watch.suspected_at = now
                    events.append(
                        NodeEvent(node_id, "suspected", f"no heartbeat for {self._config.lost_s:g} s")
                    )
            elif now - watch.suspected_at >= self._config.adoption_s:
                del self._watches[node_id]
                reason = f"no agent came back within {self._config.adoption_s:g} s"
                events.append(NodeEvent(node_id, "lost", reason))
        return events

    @property
    def present(self) -> tuple[NodeId, ...]:
        """All nodes that have sent a hello and are not lost.

        A suspected node is included: it may be back in a moment.
        """
        return tuple(sorted(self._watches))

    @property
    def heard_voters(self) -> int:
        """Number of voters that are connected and not suspected."""
        return sum(self.is_up(voter) for voter in self.voters)

    @property
    def has_majority(self) -> bool:
        """True if a majority of the voters is heard, or if there are no voters (a job of one node)."""
        return not self.voters or 2 * self.heard_voters > len(self.voters)

    def is_suspected(self, node_id: NodeId) -> bool:
        """Return True if the node is known but not heard at present: it will be back soon, or be declared lost."""
        watch = self._watches.get(node_id)
        return watch is not None and watch.suspected_at is not None

    def is_up(self, node_id: NodeId) -> bool:
        """Return True if the node is known and not suspected."""
        watch = self._watches.get(node_id)
        return watch is not None and watch.suspected_at is None
