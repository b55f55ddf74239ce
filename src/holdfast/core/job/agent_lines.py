"""The newest connection of each agent to the controller, so that messages on older connections are ignored.

Theory. A *line* is one connection. A broken line may deliver messages after the agent has connected again, because the
kernel retransmits for seconds. The agent repeats its reports after each hello, so the reports on the newest line are
newer than all of those messages. Messages on older lines are therefore ignored. A late report would replace a newer
one, and a late hello would make a dead line the connection to the node.

Invariants:
1. Of each node at most one line counts: the line that was opened last among those with a hello of the node.
2. A line that was superseded never counts again.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from holdfast.core.ids import NodeId

Line = TypeVar("Line", bound=Hashable)


class AgentLines(Generic[Line]):
    """The lines of the agents of one controller. A line is any hashable object of the driver.

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
        self._opened: dict[Line, int] = {}  # their order
        self._count = 0
        self._newest: dict[NodeId, Line] = {}

    def opened(self, line: Line) -> None:
        """Record that a connection was accepted."""
        self._count += 1
        self._opened[line] = self._count

    def hello(self, line: Line, node_id: NodeId) -> bool:
        """Record the hello of an agent on ``line``.

        Returns: False if the node has a line that was opened later, so that messages on this line must be ignored.
        """
        newest = self._newest.get(node_id)
        if newest is not None and self._opened.get(line, 0) < self._opened[newest]:
            return False
        self._newest[node_id] = line
        return True

    def node_of(self, line: Line) -> NodeId | None:
        """Return the node whose newest line is ``line``; None if there is no such node."""
        return next((node for node, newest in self._newest.items() if newest == line), None)

    def line_of(self, node_id: NodeId) -> Line | None:
        """Return the newest line of a node; None if the node cannot be reached."""
        return self._newest.get(node_id)

    def closed(self, line: Line) -> NodeId | None:
        """Record that a connection is closed.

        Returns: the node that can no longer be reached; None if ``line`` was not the newest line of a node.
        """
        self._opened.pop(line, None)
        node_id = self.node_of(line)
        if node_id is not None:
            del self._newest[node_id]
        return node_id

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """The nodes that can be reached."""
        return tuple(self._newest)
