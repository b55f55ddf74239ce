"""A host on which workers die again and again: it is left out, the spare host takes over, the same weights."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes.cables import Network, why_not
from tests.nodes.jobs import TRAIN, Hosts
from tests.nodes.test_departures import start_with_spare
from tests.nodes.test_moves import final, holdfast
from tests.runtime.runs import until

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.processes,
    pytest.mark.torch,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(WHY_NOT), reason=f"no network of several hosts here: {WHY_NOT}"),
]
STEPS = 600


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    """Yield three hosts."""
    with Network(3) as network:
        yield network


@pytest.fixture(scope="module")
def weights(net: Network, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the digest of the final weights of a run that nothing disturbs."""
    base = tmp_path_factory.mktemp("undisturbed")
    with Hosts(net, base, "2:3", TRAIN, (str(STEPS), "0.0", str(base / "out")), torch=True) as hosts:
        hosts.start(0, 1)
        assert [hosts.wait(0), hosts.wait(1)] == [0, 0], hosts.output(0)
    return final(base)


def kill_rank(hosts: Hosts, index: int, rank: int, times: int) -> None:
    """Kill the worker of a rank on a host with SIGKILL, and wait until the job has recovered from it."""
    view = json.loads(holdfast(hosts, index, "status", "--json").stdout)
    pid = next(each["pid"] for each in view["ranks"] if each["rank"] == rank and each["alive"])
    os.kill(pid, signal.SIGKILL)
    hosts.wait_event(0, "recovered", times)


@pytest.mark.more
def test_a_host_whose_workers_die_is_left_out_and_the_spare_takes_over(
    net: Network, tmp_path: Path, weights: str
) -> None:
    with Hosts(net, tmp_path, "2:3", TRAIN, (str(STEPS), "0.05", str(tmp_path / "out")), torch=True) as hosts:
        start_with_spare(hosts)
        hosts.wait_step(0, 3)
        for times in (1, 2, 3):
            kill_rank(hosts, 1, 1, times)
        out = hosts.wait_event(0, "node_left_out")
        assert out.data["node"] == "node1" and out.data["causes"] == ["signal"] * 3
        assert [e.data["nodes"] for e in hosts.events(0, "members_replaced")] == [
            ["node1"],
            ["node1"],
            ["node2"],
        ]
        said = holdfast(hosts, 0, "status").stdout
        assert "node1 is left out after 3 faults within" in said and "drain --cancel node1" in said
        until("the console says it", lambda: "node1 is left out" in hosts.output(0))
        assert hosts.commands[1].poll() is None, "its command stays, and its agent keeps its vote"

        hosts.kill(1)  # its launcher is started again: the answer is the same
        hosts.wait(1)
        hosts.wait_event(0, "node_lost")
        hosts.start(1)
        until("host 1 is back", lambda: hosts.events(0, "agent_joined")[-1].data["node"] == "node1")
        assert "node1 is left out" in holdfast(hosts, 0, "status").stdout
        kill_rank(hosts, 2, 1, 4)
        assert hosts.events(0, "members_replaced")[-1].data["nodes"] == ["node2"]

        assert holdfast(hosts, 0, "drain", "--cancel", "node1").returncode == 0
        assert hosts.wait_event(0, "node_used_again").data["reason"] == "a user takes it back"
        assert "left out" not in holdfast(hosts, 0, "status").stdout
        lost = [e.data["steps_lost"] for e in hosts.events(0, "restored")]
        assert not any(lost)
        hosts.let_end()
        assert [hosts.wait(index) for index in range(3)] == [0, 0, 0], hosts.output(0)
    assert final(tmp_path) == weights


@pytest.mark.more
def test_without_a_spare_the_host_is_kept_with_one_warning(
    net: Network, tmp_path: Path, weights: str
) -> None:
    with Hosts(
        net, tmp_path, "2:3", TRAIN, (str(STEPS), "0.05", str(tmp_path / "out")), torch=True,
        flags=("--node-faults", "2"),
    ) as hosts:  # fmt: skip
        hosts.start(0, 1)
        hosts.wait_step(0, 3)
        for times in (1, 2, 3):
            kill_rank(hosts, 1, 1, times)
        hosts.wait_event(0, "node_kept")
        until("the console says it", lambda: "no other host has room" in hosts.output(0))
        hosts.start(2)
        assert hosts.wait_event(0, "node_left_out").data["node"] == "node1"
        assert hosts.wait_event(0, "recovered", 4).data["kind"] == "leave", "its rank moves at a vote"
        assert "node2: rank 1" in holdfast(hosts, 0, "status").stdout
        hosts.let_end()
        assert [hosts.wait(index) for index in range(3)] == [0, 0, 0], hosts.output(0)
        assert len(hosts.events(0, "node_kept")) == 1
    assert final(tmp_path) == weights
