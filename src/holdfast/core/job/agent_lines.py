"""Which connection of an agent counts, when an earlier one still delivers.

Theory. A line that broke may deliver what was on it after the agent has connected again: the kernel retransmits for
seconds. What the agent repeated after its newest hello is newer than all of that, so only the newest line counts, and
nothing of an earlier one is heard any more: not a report that would replace a newer one, and not a hello that would
name a dead line as the way to the node.

Invariants:
1. Of each node at most one line counts: the one that was opened last among those on which it said hello.
2. A line that was superseded never counts again.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from holdfast.core.ids import NodeId

Line = TypeVar("Line", bound=Hashable)


class AgentLines(Generic[Line]):
    """The lines of the agents of one controller. A line is whatever the shell calls one.

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
        self._opened: dict[Line, int] = {}  # in which order
        self._count = 0
        self._newest: dict[NodeId, Line] = {}

    def opened(self, line: Line) -> None:
        """A connection was accepted."""
        self._count += 1
        self._opened[line] = self._count

    def hello(self, line: Line, node_id: NodeId) -> bool:
        """An agent has said hello on ``line``.

        Returns: False when its node has a line that was opened later: nothing on this one counts.
        """
        newest = self._newest.get(node_id)
        if newest is not None and self._opened.get(line, 0) < self._opened[newest]:
            return False
        self._newest[node_id] = line
        return True

    def node_of(self, line: Line) -> NodeId | None:
        """The node whose newest line this is; None when there is none."""
        return next((node for node, newest in self._newest.items() if newest == line), None)

    def line_of(self, node_id: NodeId) -> Line | None:
        """The way to a node."""
        return self._newest.get(node_id)

    def closed(self, line: Line) -> NodeId | None:
        """A connection is gone.

        Returns: the node that cannot be reached any more; None when it was not the newest line of one.
        """
        self._opened.pop(line, None)
        node_id = self.node_of(line)
        if node_id is not None:
            del self._newest[node_id]
        return node_id

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """Nodes that can be reached."""
        return tuple(self._newest)
