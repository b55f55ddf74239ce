"""Launchers that are asked to leave, or killed. The job continues without one host, and saves if all are asked."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.exit_codes import Exit
from holdfast.runtime.node.process_info import alive
from tests.nodes.cables import Network, why_not
from tests.nodes.jobs import TRAIN, Hosts
from tests.runtime.runs import until

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(WHY_NOT), reason=f"no network of several hosts here: {WHY_NOT}"),
]


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    """Yield a network of three hosts."""
    with Network(3) as network:
        yield network


def start_with_spare(hosts: Hosts) -> None:
    """Start a job with its ranks on hosts 0 and 1, and host 2 as a spare."""
    hosts.start(0, 1)
    hosts.wait_event(0, "generation_started")
    hosts.start(2)
    until("host 2 has a vote", lambda: "node2" in hosts.events(0, "electorate")[-1].data["voters"])


@pytest.mark.more
def test_a_host_whose_launcher_is_killed_leaves_the_job(net: Network, tmp_path: Path) -> None:
    with Hosts(net, tmp_path, "2:3", args=("100000",)) as hosts:
        start_with_spare(hosts)
        agent = int(hosts.wait_event(1, "agent_started").data["pid"])
        until("all ranks run", lambda: len(hosts.events(0, "member_started")) == 2)
        hosts.commands[1].kill()
        assert hosts.wait_event(0, "node_left").data["node"] == "node1"
        assert hosts.wait_event(0, "generation_started", 2).data["nodes"] == ["node0", "node2"]
        until("nothing is left there", lambda: not alive(agent) and not hosts.pids(1))
        hosts.let_end()
        assert [hosts.wait(0), hosts.wait(2)] == [0, 0], hosts.output(0)


@pytest.mark.torch
def test_ranks_of_a_host_that_is_asked_move_and_a_job_that_is_asked_saves(
    net: Network, tmp_path: Path
) -> None:
    with Hosts(net, tmp_path, "2:3", TRAIN, ("4000", "0.02", str(tmp_path / "out")), torch=True) as hosts:
        start_with_spare(hosts)
        hosts.wait_event(0, "resumed")
        hosts.commands[1].send_signal(signal.SIGTERM)
        assert hosts.wait(1) == Exit.REQUEUE
        assert "this node has left the job" in hosts.output(1) and "this node again" in hosts.output(1)
        assert hosts.wait_event(0, "recovered").data["steps_lost"] == 0
        hosts.start(1)
        left = hosts.wait_event(0, "node_left")
        until("it is a spare", lambda: hosts.events(0, "agent_joined")[-1].seq > left.seq)
        for index in range(3):
            hosts.commands[index].send_signal(signal.SIGTERM)
        assert [hosts.wait(index) for index in range(3)] == [Exit.REQUEUE] * 3, hosts.output(0)
        assert hosts.events(0, "sealed")[-1].data["save_kind"] == "exit"
        assert len(hosts.events(0, "node_left")) == 1
