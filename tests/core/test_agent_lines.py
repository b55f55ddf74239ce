"""Lines of agents that still deliver after the agent has connected again."""

from __future__ import annotations

from holdfast.core.ids import NodeId
from holdfast.core.job.agent_lines import AgentLines

NODE = NodeId("node1")


def two_lines() -> AgentLines[str]:
    """The agent of a node has connected twice."""
    lines = AgentLines[str]()
    for name in ("first", "second"):
        lines.opened(name)
    return lines


def test_the_newest_line_of_a_node_counts() -> None:
    lines = two_lines()
    assert lines.hello("first", NODE) and lines.node_of("first") == NODE
    assert lines.hello("second", NODE)
    assert (lines.node_of("first"), lines.node_of("second"), lines.line_of(NODE)) == (None, NODE, "second")


def test_a_hello_that_arrives_late_on_an_older_line_does_not_count() -> None:
    lines = two_lines()
    assert lines.hello("second", NODE)
    assert not lines.hello("first", NODE)
    assert lines.line_of(NODE) == "second"


def test_the_end_of_an_older_line_does_not_lose_the_node() -> None:
    lines = two_lines()
    assert lines.hello("first", NODE) and lines.hello("second", NODE)
    assert lines.closed("first") is None and lines.nodes == (NODE,)
    assert lines.closed("second") == NODE
    assert lines.line_of(NODE) is None


def test_lines_of_several_nodes_do_not_meet() -> None:
    lines = two_lines()
    assert lines.hello("second", NODE) and lines.hello("first", NodeId("node2"))
    assert lines.closed("second") == NODE and lines.nodes == (NodeId("node2"),)
