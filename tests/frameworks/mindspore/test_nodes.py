"""MindSpore on two hosts: the gradients travel between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nodes.cables import Network, why_not
from tests.nodes.jobs import BOUND_S, Hosts

JOB = Path(__file__).with_name("job.py").read_text()


@pytest.mark.skipif(bool(why_not()), reason=f"no network namespaces here: {why_not()}")
def test_two_hosts_train_one_model(tmp_path: Path) -> None:
    flags = ("--framework", "mindspore")
    with Network(2) as net, Hosts(net, tmp_path / "job", "2", JOB, nproc=1, flags=flags, torch=True) as hosts:
        hosts.start()
        assert [hosts.wait(index, BOUND_S) for index in (0, 1)] == [0, 0], hosts.output(0) + hosts.output(1)
        found = set()
        for index in (0, 1):
            (log,) = hosts.run(index).path.glob("attempt-000/rank-*.log")
            found |= {line for line in log.read_text().splitlines() if line.startswith("digest ")}
    assert len(found) == 1
