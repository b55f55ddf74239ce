"""Ranks of a node that will leave move to another node while the job trains. No step is repeated."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.exit_codes import Exit
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
STEPS = 120


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    """Yield a network of three hosts."""
    with Network(3) as network:
        yield network


@pytest.fixture(scope="module")
def weights(net: Network, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the digest of the final weights of an undisturbed run."""
    base = tmp_path_factory.mktemp("undisturbed")
    with Hosts(net, base, "2:3", TRAIN, (str(STEPS), "0.0", str(base / "out")), torch=True) as hosts:
        hosts.start(0, 1)
        assert [hosts.wait(0), hosts.wait(1)] == [0, 0], hosts.output(0)
    return final(base)


def final(base: Path) -> str:
    """Return the digest of the final weights. Check that it is equal on all ranks."""
    (digest,) = {(base / f"out-{rank}").read_text() for rank in range(2)}
    return digest


def holdfast(hosts: Hosts, index: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of ``holdfast`` on a host for the run of this host."""
    directory = str(hosts.run(index).path)
    return subprocess.run(
        [*hosts.net.on(index), HOLDFAST, *words, directory],
        capture_output=True,
        text=True,
        env=hosts.env,
        timeout=60,
    )


@pytest.mark.parametrize("leaves", [pytest.param(1, marks=pytest.mark.more), 0])
def test_ranks_of_a_drained_node_move_and_nothing_is_done_again(
    net: Network, tmp_path: Path, weights: str, leaves: int
) -> None:
    """The drained node is the node of the controller, or the other one."""
    stays = 1 - leaves
    with Hosts(net, tmp_path, "2:3", TRAIN, (str(STEPS), "0.17", str(tmp_path / "out")), torch=True) as hosts:
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
        assert all(e.data["state"] == "ready" for e in hosts.events(stays, "settled")), (
            "no rank was in a step"
        )
        hosts.let_end()
        assert [hosts.wait(stays), hosts.wait(2)] == [0, 0], hosts.output(stays)
    assert final(tmp_path) == weights


@pytest.mark.more
def test_a_notice_that_is_withdrawn_changes_nothing(net: Network, tmp_path: Path, weights: str) -> None:
    with Hosts(net, tmp_path, "2:3", TRAIN, (str(STEPS), "0.17", str(tmp_path / "out")), torch=True) as hosts:
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


@pytest.mark.more
def test_a_spot_notice_of_one_host_moves_its_ranks_within_the_lead(
    net: Network, tmp_path: Path, weights: str
) -> None:
    """The notice comes from a simulated metadata service of GCP on the loopback address of the host."""
    pages = tmp_path / "pages" / "computeMetadata" / "v1" / "instance"
    pages.mkdir(parents=True)
    server = subprocess.Popen(
        [*net.on(1), sys.executable, "-m", "http.server", "8055", "--bind", "127.0.0.1"],
        cwd=tmp_path / "pages", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    flags = ("--notices", "gcp=http://127.0.0.1:8055")
    try:
        with Hosts(
            net, tmp_path, "2:3", TRAIN, (str(STEPS), "0.17", str(tmp_path / "out")), torch=True
        ) as hosts:
            hosts.start(0)
            hosts.flags = flags
            hosts.start(1)
            hosts.flags = ()
            hosts.wait_event(0, "generation_started")
            hosts.start(2)
            until("host 2 has a vote", lambda: "node2" in hosts.events(0, "electorate")[-1].data["voters"])
            hosts.wait_step(0, 3)
            (pages / "preempted").write_text("TRUE")
            assert hosts.wait(1) == Exit.REQUEUE
            leaves = hosts.wait_event(0, "node_leaves")
            assert leaves.data["source"] == "GCP: preempted" and 20 < leaves.data["left_s"] <= 30
            assert hosts.wait_event(0, "node_left").t_mono - leaves.t_mono < 30
            assert "GCP: preempted" in holdfast(hosts, 0, "report").stdout
            hosts.let_end()
            assert [hosts.wait(0), hosts.wait(2)] == [0, 0], hosts.output(0)
    finally:
        server.kill()
        server.wait()
    assert final(tmp_path) == weights


@pytest.mark.more
def test_a_sick_host_is_drained_and_its_processes_are_not_killed_for_it(
    net: Network, tmp_path: Path, weights: str
) -> None:
    sick = tmp_path / "sick"
    with Hosts(net, tmp_path, "2:3", TRAIN, (str(STEPS), "1.0", str(tmp_path / "out")), torch=True) as hosts:
        hosts.start(0)
        hosts.flags = ("--health", f"test ! -e {sick}", "--health-every", "1")
        hosts.start(1)
        hosts.flags = ()
        hosts.wait_event(0, "generation_started")
        hosts.wait_step(0, 3)
        sick.touch()
        assert hosts.wait_event(0, "node_leaves").data["source"] == "health: test ended with 1"
        sick.unlink()
        hosts.wait_event(0, "node_stays")
        sick.touch()
        hosts.wait_event(0, "node_leaves", 2)
        assert not hosts.events(0, "fenced"), "it trains on while no other host has room"
        hosts.start(2)
        assert hosts.wait(1) == Exit.REQUEUE
        assert hosts.wait_event(0, "recovered").data["kind"] == "leave"
        hosts.let_end()
        assert [hosts.wait(0), hosts.wait(2)] == [0, 0], hosts.output(0)
    assert final(tmp_path) == weights


def test_without_a_spare_the_job_is_saved_before_the_deadline(net: Network, tmp_path: Path) -> None:
    leave = tmp_path / "leave"
    with Hosts(net, tmp_path, "2:3", TRAIN, ("100000", "0.05", str(tmp_path / "out")), torch=True) as hosts:
        hosts.start(0)
        hosts.flags = ("--notices", f"file={leave}")
        hosts.start(1)
        hosts.wait_step(0, 3)
        leave.write_text("25")
        leaves = hosts.wait_event(0, "node_leaves")
        assert [hosts.wait(0), hosts.wait(1)] == [Exit.REQUEUE] * 2, hosts.output(0)
        (sealed,) = hosts.events(0, "sealed")
        assert sealed.data["save_kind"] == "exit" and sealed.t_mono - leaves.t_mono < leaves.data["left_s"]
        asked = hosts.events(0, "exit_requested")[0]
        assert asked.t_mono - leaves.t_mono > 5, "the notice may be withdrawn, and a spare may come"


@pytest.mark.more
@pytest.mark.timeout(600)
def test_without_a_spare_the_job_shrinks_before_the_deadline_where_it_may(
    net: Network, tmp_path: Path
) -> None:
    leave = tmp_path / "leave"
    with Hosts(
        net, tmp_path, "3", TRAIN, (str(STEPS), "0.34", str(tmp_path / "out")), torch=True,
        flags=("--shrink-to", "1"),
    ) as hosts:  # fmt: skip
        hosts.start(0, 2)
        hosts.flags = ("--shrink-to", "1", "--notices", f"file={leave}")
        hosts.start(1)
        hosts.wait_step(0, 3)
        leave.write_text("25")
        leaves = hosts.wait_event(0, "node_leaves")
        assert hosts.wait(1) == Exit.REQUEUE
        resized = hosts.wait_event(0, "resized")
        assert (resized.data["ranks_before"], resized.data["ranks"]) == (3, 1), (
            "the nodes in use divide three"
        )
        verdict = next(e for e in hosts.events(0, "verdict") if e.data["rung"] == "shrink")
        assert 5 < verdict.t_mono - leaves.t_mono < 25, "a spare may come; then before the deadline"
        assert hosts.events(0, "sealed")[-1].data["step"] == hosts.events(0, "verdict")[-1].data["step"]
        hosts.let_end()
        assert [hosts.wait(0), hosts.wait(2)] == [0, 0], hosts.output(0)
        assert [e.data["steps_lost"] for e in hosts.events(0, "restored")] == [0, 0]
        assert not hosts.events(0, "exit_requested")
