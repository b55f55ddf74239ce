"""``--encrypt`` over several hosts: the job recovers from faults, and no part of a state is readable on the wire."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cli.start.node_flags import ENCRYPTED
from holdfast.exit_codes import Exit
from holdfast.runtime.node.run_processes import recorded_members
from holdfast.store.shared_memory.memory_slots import kept_steps
from tests.nodes.cables import Network, why_not
from tests.nodes.jobs import TRAIN, Hosts
from tests.nodes.test_memory import EVERY, SHARDED
from tests.runtime.runs import until

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.torch,
    pytest.mark.processes,
    pytest.mark.skipif(bool(WHY_NOT), reason=f"no network of several hosts here: {WHY_NOT}"),
]
LOADED_S = 120.0
CHUNK_SIZE_BYTES = 48
"""Size of a piece of a state that is searched for on the wire. It is too large for a match by chance."""

WRITES_WEIGHTS = TRAIN.replace(
    "digest = ",
    """\
        if rank == 0:
            with open(result + ".states", "ab") as states:
                states.write(net[0].weight.detach().numpy().tobytes())
digest = """,
)
"""A script that writes the weights after each step. gloo sends gradients, and weights only before the first step."""

WRITES_MOMENTS = SHARDED.replace(
    "digest = ",
    """\
        moments = optimizer.state[net[0].weight]
        if moments:
            with open(f"{result}.{rank}.states", "ab") as states:
                states.write(moments["exp_avg"].to_local().numpy().tobytes())
digest = """,
)
"""A script that writes the optimizer state of each shard. gloo sends gradients and weights, but never this state."""


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    """Yield a network of three hosts. Some tests do not use the third."""
    with Network(3) as network:
        yield network


def seen(net: Network, states: Path) -> int:
    """Return the number of pieces of the states in the files that were on the wire in plain text."""
    assert net.recorded is not None
    wire = b"\0\0".join(net.recorded)
    data = b"".join(path.read_bytes() for path in sorted(states.parent.glob(f"{states.name}*.states")))
    assert len(data) > 100 * CHUNK_SIZE_BYTES
    chunks = {data[start : start + CHUNK_SIZE_BYTES] for start in range(0, len(data) - CHUNK_SIZE_BYTES, 64)}
    return sum(chunk in wire for chunk in chunks)


@pytest.mark.more
@pytest.mark.timeout(300)
def test_a_replacement_gets_its_state_from_another_host_and_nothing_of_it_is_seen(
    net: Network, tmp_path: Path
) -> None:
    """Without the flag, the weights are on the wire in plain text."""
    ends = {encrypts: replaced(net, tmp_path, encrypts) for encrypts in (False, True)}
    assert len(ends[True]) == 1 and ends[True] == ends[False]


def replaced(net: Network, base: Path, encrypts: bool) -> set[str]:
    """Kill a rank, whose replacement gets its state from the other host. Return the digests of the final weights."""
    base = base / ("encrypted" if encrypts else "plain")
    flags = ("--encrypt",) if encrypts else ()
    arguments = ("60", "0.05", str(base / "out"))
    with Hosts(net, base, "2", WRITES_WEIGHTS, arguments, torch=True, flags=flags) as hosts:
        hosts.start(0, 1)
        hosts.wait_event(1, "resumed", bound_s=LOADED_S)
        hosts.wait_step(1, 5)
        net.recorded = []
        ((_, worker),) = recorded_members(hosts.run(1))
        os.kill(worker, signal.SIGKILL)
        hosts.wait_event(0, "recovered")
        count, net.recorded = seen(net, base / "out"), None
        hosts.let_end()
        assert [hosts.wait(0), hosts.wait(1)] == [0, 0], hosts.output(0) + hosts.output(1)
        assert hosts.events(0, "recovered")[0].data["steps_lost"] == 0
        assert (ENCRYPTED in hosts.output(0)) is encrypts
        assert not hosts.events(0, "frames_refused") and not hosts.events(1, "frames_refused")
    assert (count == 0) is encrypts, f"{count} chunks of weights"
    return {path.read_text() for path in base.glob("out-*")}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "encrypts", [pytest.param(False, marks=pytest.mark.more), True], ids=["plain", "encrypted"]
)
def test_a_lost_host_leaves_its_shards_with_its_buddy_and_nothing_of_them_is_seen(
    net: Network, tmp_path: Path, encrypts: bool
) -> None:
    """The states of a node are kept by its buddy, and fetched by a third node."""
    flags = ("--memory-every", str(EVERY), *(("--encrypt",) if encrypts else ()))
    arguments = ("60", "0.06", str(tmp_path / "out"))
    with Hosts(net, tmp_path, "2:3", WRITES_MOMENTS, arguments, torch=True, flags=flags) as hosts:
        net.recorded = []
        hosts.start()
        hosts.wait_event(0, "resumed", bound_s=LOADED_S)
        pages = hosts.run(0).pages()
        until("states are kept", lambda: max(kept_steps(pages, 0), default=0) >= 3 * EVERY)
        hosts.kill(1)
        assert [hosts.wait(0, LOADED_S), hosts.wait(2, LOADED_S)] == [0, 0], hosts.output(0)
        (verdict,) = [event.data for event in hosts.events(0, "verdict")]
        assert str(verdict["action"]).endswith("_from_memory"), verdict
    count, net.recorded = seen(net, tmp_path / "out"), None
    assert (count == 0) is encrypts, f"{count} chunks of moments"


@pytest.mark.more
def test_hosts_that_do_not_both_encrypt_do_not_meet(net: Network, tmp_path: Path) -> None:
    with Hosts(net, tmp_path, "2", args=("5",), flags=("--encrypt",)) as hosts:
        hosts.start(0)
        until("host 0 listens", lambda: hosts.events(0, "agent_started"))
        hosts.flags = ()
        hosts.start(1)
        assert hosts.wait(1) == Exit.USAGE
        assert "this process does not encrypt, the other end (peers) does" in hosts.output(1), hosts.output(1)
        assert "--encrypt on every host, or on none" in hosts.output(1)
