"""Votes of nodes that are lost. The module is separate because it needs four hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nodes.cables import Network, why_not
from tests.nodes.jobs import Hosts

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(WHY_NOT), reason=f"no network of several hosts here: {WHY_NOT}"),
]


def test_spares_that_are_lost_one_after_the_other_take_nobody_with_them(tmp_path: Path) -> None:
    with Network(4) as four, Hosts(four, tmp_path, "2:4", args=("100000",)) as hosts:
        hosts.start()
        hosts.wait_event(0, "founded")
        hosts.wait_event(0, "member_started", 2)
        hosts.kill(3)
        left = hosts.wait_event(0, "electorate", 2).data["voters"]
        assert left == ["node0", "node1", "node2"]
        hosts.kill(2)
        hosts.wait_event(0, "node_lost", 2)
        hosts.let_end()
        assert [hosts.wait(0), hosts.wait(1)] == [0, 0], hosts.output(0)
        assert not hosts.events(0, "no_majority") and not hosts.events(0, "detected")
