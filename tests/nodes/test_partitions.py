"""Partitions: cables that are cut in one or both directions or lose packets, and two hosts with and without a witness.

``make partitions`` runs these tests.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.exit_codes import Exit
from holdfast.store.manage.checkpoint_root import Root
from tests.nodes.cables import Network, why_not
from tests.nodes.jobs import TRAIN, Hosts
from tests.nodes.test_nodes import alone

WANTED = "HOLDFAST_PARTITIONS" in os.environ
WHY_NOT = why_not() if WANTED else "these take minutes: make partitions"
pytestmark = [
    pytest.mark.processes,
    pytest.mark.torch,
    pytest.mark.timeout(600),  # some wait several times, each for at most BOUND_S
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]
STEPS = 120
LOSSY_S = 20.0


@pytest.fixture
def net(request: pytest.FixtureRequest) -> Iterator[Network]:
    """Yield a network of three hosts, or of the number in the test's parameter."""
    with Network(getattr(request, "param", 3)) as network:
        yield network


def train(net: Network, base: Path, nnodes: str, *flags: str, pause_s: float = 0.05) -> Hosts:
    return Hosts(
        net, base, nnodes, TRAIN, (str(STEPS), str(pause_s), str(base / "out")), flags=flags, torch=True
    )


def digests(base: Path) -> set[str]:
    return {path.read_text() for path in base.glob("out-*")}


def steps_sealed(base: Path) -> list[int]:
    """Return the steps of the sealed checkpoints, newest first."""
    return [found.step for found in Root(base / "checkpoints").list() if found.valid]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(("to_it", "from_it"), [(True, True), (True, False), (False, True)])
def test_a_host_is_cut_off(net: Network, tmp_path: Path, victim: int, to_it: bool, from_it: bool) -> None:
    """The other hosts continue, and the host that is cut off never commits a step, with or without the controller."""
    with train(net, tmp_path, "2:3") as hosts:
        hosts.start()
        hosts.wait_step(1, 3)
        net.cut(victim, to_it=to_it, from_it=from_it)
        others = [i for i in range(3) if i != victim]
        assert [hosts.wait(i) for i in others] == [0, 0], hosts.output(others[0])
        assert hosts.wait(victim) == Exit.REQUEUE, hosts.output(victim)
        assert "no majority" in hosts.output(victim)
        decided = [int(e.data["step"]) for e in hosts.events(victim, "planned")]
        moved_on = [int(e.data["step"]) for e in hosts.events(others[0], "planned")]
        assert len(decided) == 1 and abs(decided[0] - moved_on[0]) <= 1
        assert not hosts.events(victim, "generation_started")[1:], "the minority started nothing"
    assert digests(tmp_path) == {alone(tmp_path, STEPS)}


@pytest.mark.parametrize("victim", [0, 1])
def test_a_frozen_host_that_thaws_commits_nothing_and_says_what_happened(
    net: Network, tmp_path: Path, victim: int
) -> None:
    with train(net, tmp_path, "2:3") as hosts:
        hosts.start()
        hosts.wait_step(1 - victim, 3)
        frozen = hosts.freeze(victim)
        others = [i for i in range(3) if i != victim]
        assert [hosts.wait(i) for i in others] == [0, 0], hosts.output(others[0])
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
        assert hosts.wait(victim) == Exit.REQUEUE, hosts.output(victim)
        assert "stood still for" in hosts.output(victim)
        assert "at the newest step that any host has saved" in hosts.output(victim)
        assert not hosts.events(victim, "generation_started")[1:], "it started nothing"
        assert steps_sealed(tmp_path)[0] == STEPS, "what it saved is older than what the others did"
    assert digests(tmp_path) == {alone(tmp_path, STEPS)}


def test_thirty_percent_of_the_packets_are_lost(net: Network, tmp_path: Path) -> None:
    with train(net, tmp_path, "2:3") as hosts:
        hosts.start()
        hosts.wait_event(1, "resumed")
        net.lose(0.3)
        time.sleep(LOSSY_S)  # every collective waits for packets that are sent again, so the job is slow
        net.lose(0.0)
        assert [hosts.wait(i, 110) for i in range(3)] == [0, 0, 0], hosts.output(0)
        fences = [e.data["reason"] for e in hosts.events(0, "fenced")]
        print("fences under loss:", fences, "carried", net.carried, "dropped", net.dropped)
        assert len(fences) <= 1 and all(fences)
        assert net.dropped > 100
    assert digests(tmp_path) == {alone(tmp_path, STEPS)}


@pytest.mark.parametrize("net", [2], indirect=True)
def test_of_two_hosts_without_a_witness_the_one_that_is_left_seals_and_leaves(
    net: Network, tmp_path: Path
) -> None:
    with train(net, tmp_path, "2") as hosts:
        hosts.start()
        hosts.wait_step(1, 3)
        hosts.kill(0)
        assert hosts.wait(1) == Exit.REQUEUE, hosts.output(1)
        sealed = steps_sealed(tmp_path)
        assert sealed and 0 < sealed[0] < STEPS
    # The same commands continue at the sealed step.
    with train(net, tmp_path / "again", "2") as hosts:
        hosts.env["HOLDFAST_CHECKPOINT"] = str(tmp_path / "checkpoints")
        hosts.args = (*hosts.args[:2], str(tmp_path / "out"))
        hosts.start()
        assert [hosts.wait(0), hosts.wait(1)] == [0, 0], hosts.output(0)
        assert hosts.events(0, "session_opened")[0].data["step"] == sealed[0]
    assert digests(tmp_path) == {alone(tmp_path, STEPS)}


def test_both_hosts_of_a_job_are_lost_in_turn_and_what_they_held_is_not(net: Network, tmp_path: Path) -> None:
    """The state of the second host is then held only by a newcomer, on a host that had no rank before."""
    with train(net, tmp_path, "2:3") as hosts:
        hosts.start()
        hosts.wait_step(1, 3)
        # The controller's host is lost first, so its successor knows the layouts only from the agents.
        leads = max(
            (0, 1), key=lambda i: max((int(e.data["term"]) for e in hosts.events(i, "elected")), default=0)
        )
        hosts.kill(leads)
        hosts.wait_event(2, "resumed", 2)
        hosts.kill(1 - leads)
        assert hosts.wait(2) == Exit.REQUEUE, hosts.output(2)
        sealed = steps_sealed(tmp_path)
        assert sealed and 3 <= sealed[0] < STEPS
    with train(net, tmp_path / "again", "2") as hosts:
        hosts.env["HOLDFAST_CHECKPOINT"] = str(tmp_path / "checkpoints")
        hosts.args = (*hosts.args[:2], str(tmp_path / "out"))
        hosts.start(0, 1)
        assert [hosts.wait(0), hosts.wait(1)] == [0, 0], hosts.output(0)
        assert hosts.events(0, "session_opened")[0].data["step"] == sealed[0]
    assert digests(tmp_path) == {alone(tmp_path, STEPS)}


@pytest.mark.parametrize("net", [2], indirect=True)
def test_of_two_hosts_with_a_witness_one_survives_and_takes_the_other_again(
    net: Network, tmp_path: Path
) -> None:
    with train(net, tmp_path, "2", "--witness", str(tmp_path / "witness"), pause_s=0.08) as hosts:
        hosts.start()
        hosts.wait_step(1, 3)
        net.cut(1)
        said = [hosts.wait_event(i, "witness_said").data["voters"] for i in (0, 1)]
        assert said[0] == said[1] and len(said[0]) == 1, "one name, made once"
        left = int(said[0][0].removeprefix("node"))
        lost = 1 - left
        assert hosts.wait(lost) == Exit.REQUEUE, hosts.output(lost)
        net.mend(1)
        hosts.start(lost)  # the same command on the repaired host
        assert hosts.wait(left) == 0, hosts.output(left)
        assert hosts.wait(lost) == 0, hosts.output(lost)
        seats = [e.data["nodes"] for e in hosts.events(left, "generation_started")]
        assert len(seats) == 2 and seats[0] == seats[1]
    assert digests(tmp_path) == {alone(tmp_path, STEPS)}


def test_hosts_started_by_one_command_and_a_rank_table(net: Network, tmp_path: Path) -> None:
    with Hosts(net, tmp_path, "3", args=("5",), nproc=2, table=True) as hosts:
        hosts.start(2, 1, 0)
        assert [hosts.wait(i) for i in range(3)] == [0, 0, 0], hosts.output(0)
        started = hosts.events(1, "generation_started")[0].data
        assert started["nodes"] == [f"node{i}" for i in (0, 0, 1, 1, 2, 2)]
