"""Ranks of a node that will leave move to another one while the job trains: no step is done again, the same weights."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.exits import Exit
from tests.cli.command import HOLDFAST
from tests.nodes.cables import Network, why_not
from tests.nodes.jobs import TRAIN, Hosts
from tests.nodes.test_departures import start_with_spare
from tests.runtime.runs import until

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.processes,
    pytest.mark.torch,
    pytest.mark.skipif(bool(WHY_NOT), reason=f"no network of several hosts here: {WHY_NOT}"),
]
STEPS = 400


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    """Three hosts."""
    with Network(3) as network:
        yield network


@pytest.fixture(scope="module")
def weights(net: Network, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of the final weights of a run that nothing disturbs."""
    base = tmp_path_factory.mktemp("undisturbed")
    with Hosts(net, base, "2:3", TRAIN, (str(STEPS), "0.0", str(base / "out")), torch=True) as hosts:
        hosts.start(0, 1)
        assert [hosts.wait(0), hosts.wait(1)] == [0, 0], hosts.output(0)
    return final(base)


def final(base: Path) -> str:
    """Of all ranks, which are the same."""
    (digest,) = {(base / f"out-{rank}").read_text() for rank in range(2)}
    return digest


def holdfast(hosts: Hosts, index: int, *words: str) -> subprocess.CompletedProcess[str]:
    """A command on a host about its run."""
    directory = str(hosts.run(index).path)
    return subprocess.run(
        [*hosts.net.on(index), HOLDFAST, *words, directory],
        capture_output=True,
        text=True,
        env=hosts.env,
        timeout=60,
    )


@pytest.mark.parametrize("leaves", [1, 0])
def test_ranks_of_a_drained_node_move_and_nothing_is_done_again(
    net: Network, tmp_path: Path, weights: str, leaves: int
) -> None:
    """Also those of the node that runs the controller."""
    stays = 1 - leaves
    with Hosts(net, tmp_path, "2:3", TRAIN, (str(STEPS), "0.05", str(tmp_path / "out")), torch=True) as hosts:
        start_with_spare(hosts)
        hosts.wait_step(0, 3)
        said = holdfast(hosts, 2, "drain", str(leaves))
        assert said.returncode == 0, said.stderr
        assert hosts.wait(leaves) == Exit.REQUEUE
        hosts.wait_event(stays, "node_left")
        assert hosts.wait_event(stays, "recovered").data["kind"] == "leave"
        assert hosts.wait_event(stays, "holding").data["node"] == f"node{leaves}"
        (called,) = hosts.events(2, "spare_called")
        assert called.data["state"] == "ready"
        assert [e.data["steps_lost"] for e in hosts.events(stays, "restored")] == [0, 0]
        assert all(e.data["state"] == "ready" for e in hosts.events(stays, "settled")), "nobody was in a step"
        hosts.let_end()
        assert [hosts.wait(stays), hosts.wait(2)] == [0, 0], hosts.output(stays)
    assert final(tmp_path) == weights


def test_a_notice_that_is_withdrawn_changes_nothing(net: Network, tmp_path: Path, weights: str) -> None:
    with Hosts(net, tmp_path, "2:3", TRAIN, (str(STEPS), "0.05", str(tmp_path / "out")), torch=True) as hosts:
        hosts.start(0, 1)
        hosts.wait_step(0, 3)
        assert holdfast(hosts, 0, "drain", "1", "--by", "1h").returncode == 0
        hosts.wait_event(0, "node_leaves")
        assert "node1 leaves by" in holdfast(hosts, 1, "status").stdout
        assert holdfast(hosts, 1, "drain", "--cancel", "node1").returncode == 0
        hosts.wait_event(0, "node_stays")
        hosts.start(2)
        until("host 2 has a vote", lambda: "node2" in hosts.events(0, "electorate")[-1].data["voters"])
        hosts.let_end()
        assert [hosts.wait(index) for index in range(3)] == [0, 0, 0], hosts.output(0)
        assert not {"fenced", "node_left"} & {event.kind for event in hosts.events(0)}
    assert final(tmp_path) == weights
