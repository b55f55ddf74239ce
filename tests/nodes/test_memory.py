"""Pure FSDP over several hosts: a host is lost with its shards, and a spare host gets them from its buddy."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.store.shared_memory.memory_slots import kept_steps
from tests.cli.command import HOLDFAST, clean_environment
from tests.nodes.cables import Network, why_not
from tests.nodes.jobs import TRAIN, Hosts
from tests.runtime.runs import until

WHY_NOT = why_not() or ("" if "HOLDFAST_MEMORY" in os.environ else "make memory")
STEPS = 60
EVERY = 4
pytestmark = [
    pytest.mark.torch,
    pytest.mark.processes,
    pytest.mark.skipif(bool(WHY_NOT), reason=f"no network of several hosts here: {WHY_NOT}"),
]

SHARDED = (
    TRAIN.replace("model = DistributedDataParallel(net)", "model = net\nfully_shard(net)")
    .replace("import holdfast\n", "import holdfast\nfrom torch.distributed.fsdp import fully_shard\n")
    .replace("p.detach().numpy()", "p.detach().to_local().numpy()")
)

BEHIND = SHARDED.replace(
    "digest = ",
    f"""\
        if step.committed and step.number % {EVERY} == {EVERY} - 1:
            if step.number == 5 * {EVERY} - 1 and rank == int(os.environ["LINGERS"]):
                open(result + ".behind", "w").close()
                while not os.path.exists(result + ".on"):
                    time.sleep(0.01)
            with torch.no_grad():
                for p in net.parameters():
                    p.mul_(0.9)
digest = """,
)
"""A script that changes its state after the block. The rank ``LINGERS`` waits there at one step."""


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    """Yield a network of three hosts."""
    with Network(3) as network:
        yield network


def shards(base: Path) -> list[str]:
    """Return the digests of all ranks' shards."""
    return [path.read_text() for path in sorted(base.glob("out-*"))]


def alone(base: Path, script: str) -> list[str]:
    """Run the same training undisturbed on one host. Return the digests of all ranks' shards."""
    (base / "alone").mkdir()
    (base / "alone.py").write_text(script)
    words = [
        HOLDFAST,
        "run",
        "--nproc-per-node",
        "2",
        "--run-dir",
        str(base / "alone"),
        str(base / "alone.py"),
    ]
    words += [str(STEPS), "0", str(base / "alone" / "out")]
    environment = clean_environment({"LINGERS": "-1"})
    subprocess.run(words, cwd=base, env=environment, check=True, capture_output=True, timeout=60)
    return shards(base / "alone")


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_host_leaves_its_shards_with_its_buddy(net: Network, tmp_path: Path, lost: int) -> None:
    other = 1 - lost
    flags = ("--memory-every", str(EVERY))
    arguments = (str(STEPS), "0.06", str(tmp_path / "out"))
    with Hosts(net, tmp_path, "2:3", SHARDED, arguments, torch=True, flags=flags) as hosts:
        hosts.start()
        hosts.wait_event(other, "resumed")
        pages = hosts.run(other).pages()
        until("some states are kept", lambda: max(kept_steps(pages, other), default=0) >= 3 * EVERY)
        hosts.kill(lost)
        assert [hosts.wait(other), hosts.wait(2)] == [0, 0], hosts.output(other)
        (verdict,) = [event.data for event in hosts.events(other, "verdict")]
        assert str(verdict["action"]).endswith("_from_memory"), verdict
        assert int(verdict["memory_step"]) % EVERY == 0 and verdict["memory_step"] > 0
        restored = hosts.events(other, "restored")[-1].data
        assert restored["step"] == verdict["memory_step"]
    assert len(shards(tmp_path)) == 2 and shards(tmp_path) == alone(tmp_path, SHARDED)


@pytest.mark.parametrize("lingers", [True, False])
def test_what_is_done_behind_a_block_is_in_the_buddys_copy(
    net: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lingers: bool
) -> None:
    """The host is lost while its rank is after the block and the others are further, or at a later step."""
    monkeypatch.setenv("LINGERS", "1" if lingers else "-1")
    flags = ("--memory-every", str(EVERY))
    arguments = (str(STEPS), "0.06", str(tmp_path / "out"))
    with Hosts(net, tmp_path, "2:3", BEHIND, arguments, torch=True, flags=flags) as hosts:
        hosts.start()
        if lingers:
            until("rank 1 is after the block", (tmp_path / "out.behind").exists)
            hosts.wait_step(0, 5 * EVERY)
        else:
            hosts.wait_step(1, 5 * EVERY + 1)
        hosts.kill(1)
        (tmp_path / "out.on").touch()
        assert [hosts.wait(0), hosts.wait(2)] == [0, 0], hosts.output(0)
        (verdict,) = [event.data for event in hosts.events(0, "verdict")]
        assert str(verdict["action"]).endswith("_from_memory"), verdict
    assert len(shards(tmp_path)) == 2 and shards(tmp_path) == alone(tmp_path, BEHIND)
