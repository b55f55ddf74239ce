"""Jobs on several hosts, each a network namespace, with one command per host. Some tests lose a host."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.exit_codes import Exit
from tests.cli.command import HOLDFAST, clean_environment
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


LATE = """
import sys, time
from pathlib import Path
from holdfast.runtime.worker.worker_client import WorkerClient
client, go = WorkerClient.current(), Path(sys.argv[0]).with_name("enough")
if client.rank == 0:
    client.kv("set", ("result",), b"42")
else:
    while not go.exists():
        time.sleep(0.01)
    reply = client.kv("wait", ("result",), timeout_s=10)
    print("got", client.kv("get", ("result",)).value, client.kv("add", ("n",), amount=2).number, reply.error)
    sys.exit(0 if reply.ok else 9)
"""
"""A script in which rank 0 stores a key and ends. The other ranks read the key after the file ``enough`` exists."""


def alone(base: Path, steps: int, workers: int = 2, text: str = TRAIN) -> str:
    """Run the same training undisturbed on one node. Return the digest of the final weights."""
    script = base / "alone.py"
    script.write_text(text)
    subprocess.run(
        [HOLDFAST, "run", "--nproc-per-node", str(workers), "--run-dir", str(base / "alone"), str(script), str(steps),
         "0", str(base / "alone-out")], cwd=base, env=clean_environment(), check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    return (base / "alone-out-0").read_text()


def seats_when_lost(hosts: Hosts, lost: int) -> list[list[str]]:
    """Lose host 0 or 1, and check that the spare takes its ranks and no step is lost.

    Return the nodes of the ranks in each generation.
    """
    left = 1 - lost
    hosts.start()
    hosts.wait_event(left, "resumed")
    hosts.kill(lost)
    hosts.wait_event(left, "recovered")
    hosts.let_end()
    assert [hosts.wait(left), hosts.wait(2)] == [0, 0], hosts.output(left)
    assert {e.data["steps_lost"] for e in hosts.events(2, "recovered")} == {0}
    return [e.data["nodes"] for e in hosts.events(left, "generation_started")]


def test_two_hosts_find_each_other_and_share_one_job(net: Network, tmp_path: Path) -> None:
    with Hosts(net, tmp_path, "2", args=("5",), nproc=2) as hosts:
        hosts.start(1, 0)
        assert [hosts.wait(0), hosts.wait(1)] == [0, 0], hosts.output(0) + hosts.output(1)
        started = hosts.events(1, "generation_started")[0].data
        assert started["nodes"] == ["node0", "node0", "node1", "node1"]
        kinds = [[(e.kind, e.data["line"]) for e in hosts.events(i) if e.who == "controller"] for i in (0, 1)]
        assert kinds[0] == kinds[1], "both logs hold all lines of the controller"
        assert "saves a checkpoint" in hosts.output(0), "two nodes: what a loss means is said at the start"
        assert all(os.stat(hosts.run(i).path / "token").st_mode & 0o077 == 0 for i in (0, 1))
        assert not hosts.pids(0) and not hosts.pids(1)


@pytest.mark.parametrize(
    "killed", [pytest.param(None, marks=pytest.mark.more), 0, pytest.param(1, marks=pytest.mark.more)]
)
def test_the_keys_are_served_until_the_last_node_is_done(
    net: Network, tmp_path: Path, killed: int | None
) -> None:
    """The last worker on the node with the keys has ended, and the agent of one of the two nodes was killed."""
    with Hosts(net, tmp_path, "2", LATE) as hosts:
        hosts.start(1, 0)
        assert hosts.wait_event(1, "member_exited").data["rank"] == 0
        if killed is not None:
            os.kill(int(hosts.events(killed, "agent_started")[-1].data["pid"]), signal.SIGKILL)
            hosts.wait_event(killed, "agent_started", 2)
        hosts.let_end()
        assert [hosts.wait(0), hosts.wait(1)] == [0, 0], hosts.output(1)
        assert "got b'42' 2" in hosts.output(1)
        assert not hosts.events(0, "detected"), "it was done at once, by the workers that were there"


def test_a_name_that_is_known_late_and_has_a_dead_address_first(net: Network, tmp_path: Path) -> None:
    for index in (0, 1):
        net.know(index)
    net.also_at(1, "10.78.0.2")
    with Hosts(net, tmp_path, "2", args=("5",), first="first") as hosts:
        hosts.start(1, 0)
        until("both look", lambda: all("the host first (--master-addr" in hosts.output(i) for i in (0, 1)))
        for index in (0, 1):
            net.know(index, "10.78.0.1", net.address(0))
        assert [hosts.wait(0), hosts.wait(1)] == [0, 0], hosts.output(0) + hosts.output(1)
        assert f"node1 at {net.address(1)}, " in hosts.output(1), "by the network in which it was answered"


def test_two_hosts_with_one_number_are_told(net: Network, tmp_path: Path) -> None:
    with Hosts(net, tmp_path, "2", args=("5",)) as hosts:
        hosts.start(0)
        until("host 0 listens", lambda: hosts.events(0, "agent_started"))
        words = [HOLDFAST, "run", "--nnodes", "2", "--node-rank", "0", "--master-addr", net.address(0)]
        words += [
            "--token-file",
            str(hosts.token),
            "--run-dir",
            str(tmp_path / "twin"),
            str(hosts.script),
            "5",
        ]
        twin = subprocess.run(
            [*net.on(1), *words], capture_output=True, text=True, timeout=30, env=hosts.env, check=False
        )
        assert twin.returncode == Exit.USAGE and "--node-rank of its own" in twin.stderr, twin.stderr


@pytest.mark.more
@pytest.mark.torch
def test_the_controller_of_a_minority_dies_and_its_successor_seals(net: Network, tmp_path: Path) -> None:
    with Hosts(net, tmp_path, "2", TRAIN, ("4000", "0.05", str(tmp_path / "out")), torch=True) as hosts:
        hosts.start(0, 1)
        hosts.wait_event(0, "resumed")
        terms = len(hosts.events(0, "controller_started"))
        hosts.kill(1)
        hosts.wait_event(0, "no_majority")
        alone = until("it decides alone", lambda: hosts.events(0, "controller_started")[terms:])[-1]
        os.kill(int(alone.data["pid"]), signal.SIGKILL)
        assert hosts.wait(0) == Exit.REQUEUE, hosts.output(0)
        assert len(hosts.events(0, "no_majority")) == 2 and hosts.events(0, "sealed")


@pytest.mark.torch
def test_the_host_of_the_controller_is_lost_and_a_spare_takes_its_ranks(net: Network, tmp_path: Path) -> None:
    with Hosts(net, tmp_path, "2:3", TRAIN, ("70", "0.3", str(tmp_path / "out")), torch=True) as hosts:
        assert seats_when_lost(hosts, 0) == [["node0", "node1"], ["node2", "node1"]]
        assert hosts.events(1, "verdict")[0].data["action"] == "replace"
        started = [e.data["member_id"] for e in hosts.events(1, "member_started")]
        assert len(started) == 3, "the survivor kept its process"
    digests = {path.read_text() for path in tmp_path.glob("out-*")}
    assert digests == {alone(tmp_path, 70)}


@pytest.mark.more
@pytest.mark.torch
def test_a_lost_host_at_pod_level_starts_all_workers_again_on_the_hosts_that_are_left(
    net: Network, tmp_path: Path
) -> None:
    arguments, flags = ("70", "0.3", str(tmp_path / "out")), ("--on-fault", "pod")
    with Hosts(net, tmp_path, "2:3", TRAIN, arguments, flags=flags, torch=True) as hosts:
        seats = seats_when_lost(hosts, 0)
        assert [sorted(each) for each in seats] == [["node0", "node1"], ["node1", "node2"]]
        assert hosts.events(1, "verdict")[0].data["action"] == "restart_last_gasp"
        assert len(hosts.events(1, "member_started")) == 4, "the worker of the other host is a new process"
    assert {path.read_text() for path in tmp_path.glob("out-*")} == {alone(tmp_path, 70)}


@pytest.mark.more
@pytest.mark.torch
def test_a_device_that_fails_again_is_left_for_one_of_the_spare_host(net: Network, tmp_path: Path) -> None:
    """Regression: the rank was replaced on the same device until the run ended as a bug of the script."""
    breaks = (
        "if os.environ['HOLDFAST_RUN_DIR'].endswith('node0') and step.number == 3:\n"
        "                raise torch.AcceleratorError('CUDA error: uncorrectable ECC error encountered')\n"
    )
    script = TRAIN.replace("            time.sleep", f"            {breaks}            time.sleep")
    with Hosts(net, tmp_path, "2:3", script, ("12", "0.1", str(tmp_path / "out")), torch=True) as hosts:
        hosts.start()
        assert [hosts.wait(index) for index in range(3)] == [0, 0, 0], hosts.output(0)
        assert [e.data["nodes"] for e in hosts.events(1, "members_replaced")] == [["node0"], ["node2"]]
        assert {e.data["steps_lost"] for e in hosts.events(1, "recovered")} == {0}
    assert {path.read_text() for path in tmp_path.glob("out-*")} == {alone(tmp_path, 12)}


@pytest.mark.more
@pytest.mark.torch
def test_hosts_of_two_sizes_and_a_spare_for_the_larger(net: Network, tmp_path: Path) -> None:
    told = "print('placed', *map(os.environ.get, ('LOCAL_WORLD_SIZE', 'GROUP_RANK', 'GROUP_WORLD_SIZE')), flush=True)"
    script = TRAIN.replace("\ntorch.set_num", f"\n{told}\ntorch.set_num")
    words = ("70", "0.3", str(tmp_path / "out"))
    with Hosts(net, tmp_path, "2:3", script, words, torch=True, counts=(1, 2)) as hosts:
        assert seats_when_lost(hosts, 1) == [["node0", "node1", "node1"], ["node0", "node2", "node2"]]
        logs = [
            log.read_text() for i in (0, 2) for log in sorted(hosts.run(i).path.glob("attempt-*/rank-*.log"))
        ]
    assert [log.splitlines()[0] for log in logs] == ["placed 1 0 2", "placed 2 1 2", "placed 2 1 2"]
    assert {path.read_text() for path in tmp_path.glob("out-*")} == {alone(tmp_path, 70, 3)}


SHRINK = TRAIN.replace("torch.nn.Dropout(0.2)", "torch.nn.Tanh()").replace(
    'open(f"{result}-{rank}", "w").write(digest)',
    "weights = torch.cat([p.detach().flatten() for p in net.parameters()])\n"
    'open(f"{result}-{rank}", "w").write(\' \'.join(repr(float(w)) for w in weights))',
)


@pytest.mark.torch
def test_a_job_goes_on_with_half_of_its_hosts_and_grows_back(net: Network, tmp_path: Path) -> None:
    steps, witness = 90, str(tmp_path / "witness")
    flags = ("--witness", witness, "--shrink-to", "1")
    arguments = (str(steps), "0.3", str(tmp_path / "out"))
    with Hosts(net, tmp_path, "2", SHRINK, arguments, flags=flags, torch=True) as hosts:
        hosts.start(0, 1)
        hosts.wait_event(1, "resumed")
        hosts.kill(0)
        assert hosts.wait(0) == -signal.SIGKILL
        smaller = hosts.wait_event(1, "resized").data
        assert (smaller["ranks_before"], smaller["ranks"]) == (2, 1)
        hosts.wait_event(1, "resumed", 2)
        hosts.start(0)
        larger = hosts.wait_event(1, "resized", 2).data
        assert (larger["ranks_before"], larger["ranks"]) == (1, 2)
        hosts.let_end()
        assert [hosts.wait(0), hosts.wait(1)] == [0, 0], hosts.output(0) + hosts.output(1)
        assert {e.data["steps_lost"] for e in hosts.events(1, "recovered")} == {0}
    script = tmp_path / "alone.py"
    script.write_text(SHRINK)
    words = [HOLDFAST, "run", "--nproc-per-node", "2", "--run-dir", str(tmp_path / "alone"), str(script)]
    subprocess.run([*words, str(steps), "0", str(tmp_path / "alone-out")],
                   cwd=tmp_path, env=clean_environment(), check=True, capture_output=True, timeout=60)  # fmt: skip
    here, there = (
        [float(w) for w in (tmp_path / name).read_text().split()] for name in ("out-0", "alone-out-0")
    )
    assert here == pytest.approx(there, rel=1e-4, abs=1e-6)  # the same batches, added up in another order
    assert here != there


FLIP = TRAIN.replace(
    "            time.sleep(pause_s)\n",
    """            time.sleep(pause_s)
            if (rank, step.number, os.environ["TORCHELASTIC_RESTART_COUNT"]) == (1, 21, "0"):
                net[0].weight.data.view(-1).view(torch.int32)[5] ^= 1 << 23
""",
).replace("with holdfast.session(", "with holdfast.session(save_every_steps=8, ")


@pytest.mark.torch
@pytest.mark.skipif(not os.environ.get("HOLDFAST_FLIPS"), reason="make flips")
def test_a_flipped_bit_is_found_across_hosts(net: Network, tmp_path: Path) -> None:
    """Over several hosts, the vote uses a process group and not shared memory."""
    with Hosts(net, tmp_path, "2", FLIP, ("40", "0.02", str(tmp_path / "out")), nproc=1, torch=True,
               flags=("--verify-every", "4")) as hosts:  # fmt: skip
        hosts.start(0, 1)
        assert [hosts.wait(0), hosts.wait(1)] == [0, 0], hosts.output(0)
        (found,) = hosts.events(0, "corrupted")
        assert found.data["ranks"] == [0, 1] and not found.data["certain"]
        assert found.data["nodes"] == ["node0", "node1"] and 21 <= found.data["step"] <= 25
        assert {e.data["steps_lost"] for e in hosts.events(0, "recovered")} <= set(range(1, 26))
    digests = {path.read_text() for path in tmp_path.glob("out-*")}
    assert digests == {alone(tmp_path, 40)}
