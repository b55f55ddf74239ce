"""Pure FSDP over several hosts: a host is lost with its shards, and a spare host gets them from its buddy."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.store.memory import kept_steps
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


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    """Three hosts."""
    with Network(3) as network:
        yield network


def shards(base: Path) -> list[str]:
    """Digests of each rank's shards."""
    return [path.read_text() for path in sorted(base.glob("out-*"))]


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
    script = tmp_path / "alone.py"
    script.write_text(SHARDED)
    (tmp_path / "alone").mkdir()
    words = [HOLDFAST, "run", "--nproc-per-node", "2", "--run-dir", str(tmp_path / "alone"), str(script)]
    subprocess.run([*words, str(STEPS), "0", str(tmp_path / "alone" / "out")],
                   cwd=tmp_path, env=clean_environment(), check=True, capture_output=True, timeout=60)  # fmt: skip
    assert len(shards(tmp_path)) == 2 and shards(tmp_path) == shards(tmp_path / "alone")
