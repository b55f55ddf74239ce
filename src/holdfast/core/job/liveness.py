"""Who is silent: fast heartbeats in, rare events out.

Theory. Heartbeats are the only frequent messages of the control plane. They end here; what comes out is rare
(a node is suspected, back, or lost), so that everything behind this file may be slow, journaled and replayed.
A closed connection is suspicion at once. Suspicion costs nothing: a successor agent that joins within the
adoption bound finds its workers undisturbed. Only a *lost* node is a fault.

Invariants:
1. A node is suspected at most once before it is back or lost; lost is final until it says hello again.
2. Nothing here reads a clock: ``now`` is an argument, in seconds.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from holdfast.core.config import Config
from holdfast.core.ids import NodeId


class NodeEvent(NamedTuple):
    """What changed about a node."""

    node_id: NodeId
    kind: Literal["suspected", "lost"]
    reason: str


class _NodeWatch:
    def __init__(self, now: float) -> None:
        self.heard_at = now
        self.suspected_at: float | None = None


class Liveness:
    """Heartbeats of the agents."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._watches: dict[NodeId, _NodeWatch] = {}

    def hello(self, node_id: NodeId, now: float) -> None:
        """A node joined or rejoined."""
        self._watches[node_id] = _NodeWatch(now)

    def beat(self, node_id: NodeId, now: float) -> None:
        """A heartbeat; it lifts a suspicion by silence."""
        watch = self._watches.get(node_id)
        if watch is not None:
            watch.heard_at = now
            watch.suspected_at = None

    def gone(self, node_id: NodeId, now: float) -> NodeEvent | None:
        """The connection closed."""
        watch = self._watches.get(node_id)
        if watch is None or watch.suspected_at is not None:
            return None
        watch.suspected_at = now
        return NodeEvent(node_id, "suspected", "its connection closed")

    def leave(self, node_id: NodeId) -> None:
        """It is given up, though it beats; it counts from its next hello."""
        self._watches.pop(node_id, None)

    def tick(self, now: float) -> list[NodeEvent]:
        """What time alone has changed."""
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
        """Every node that has said hello and is not lost; one that is only suspected may be back in a moment."""
        return tuple(sorted(self._watches))

    def is_up(self, node_id: NodeId) -> bool:
        """True for a node that is known and not suspected."""
        watch = self._watches.get(node_id)
        return watch is not None and watch.suspected_at is None
