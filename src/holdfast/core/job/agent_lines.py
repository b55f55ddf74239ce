"""The connections of the agents to one controller. Of each node, only the newest connection counts.

Theory. A connection that broke may deliver its last messages after the agent has connected again: the kernel
retransmits for seconds. The messages that the agent repeated after its newest hello are newer than these late messages.
So only the newest connection of a node counts. A message on an older connection must not replace a newer report. An
older connection must not be used to send to the node.

Invariants:
1. At most one connection of each node counts: the one that was opened last and has brought a hello.
2. A connection that was replaced by a newer one never counts again.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from holdfast.core.ids import NodeId

Line = TypeVar("Line", bound=Hashable)


class AgentLines(Generic[Line]):
    """The connections of the agents to one controller. ``Line`` is the caller's type of a connection.

    The order of opening counts, not the order of the hellos: a late hello on an older connection is refused.

    Example:
        >>> lines = AgentLines[str]()
        >>> lines.opened("first")
        >>> lines.opened("second")
        >>> lines.hello("second", NodeId("node1")), lines.hello("first", NodeId("node1"))
        (True, False)
        >>> lines.node_of("first"), lines.node_of("second")
        (None, 'node1')
    """

    def __init__(self) -> None:
        self._opened: dict[Line, int] = {}  # connection -> its number, in the order of opening
        self._count = 0
        self._newest: dict[NodeId, Line] = {}
        self._nodes: dict[
            Line, NodeId
        ] = {}  # the inverse of _newest: a controller asks for it at each message

    def opened(self, line: Line) -> None:
        """Record a connection that the controller has accepted."""
        self._count += 1
        self._opened[line] = self._count

    def hello(self, line: Line, node_id: NodeId) -> bool:
        """Record the hello of an agent on the connection ``line``.

        Returns:
            False if the node has a connection that was opened later. Then no message on ``line`` counts.
        """
        newest = self._newest.get(node_id)
        if newest is not None and self._opened.get(line, 0) < self._opened[newest]:
            return False
        if newest is not None:
            del self._nodes[newest]
        self._newest[node_id], self._nodes[line] = line, node_id
        return True

    def node_of(self, line: Line) -> NodeId | None:
        """Return the node whose newest connection is ``line``; None if there is no such node."""
        return self._nodes.get(line)

    def line_of(self, node_id: NodeId) -> Line | None:
        """Return the newest connection of a node; None if the node is not connected."""
        return self._newest.get(node_id)

    def closed(self, line: Line) -> NodeId | None:
        """Forget a connection that was closed.

        Returns:
            The node that has lost its connection; None if ``line`` was not the newest connection of a node.
        """
        self._opened.pop(line, None)
        node_id = self._nodes.pop(line, None)
        if node_id is not None:
            del self._newest[node_id]
        return node_id

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """The nodes whose agent is connected and has sent a hello."""
        return tuple(self._newest)
