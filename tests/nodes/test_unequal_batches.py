"""Ranks of several hosts with unequal numbers of batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.exit_codes import Exit
from tests.nodes.cables import Network, why_not
from tests.nodes.jobs import Hosts
from tests.session import unequal_job
from tests.session.unequal_job import BATCHES

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.torch,
    pytest.mark.processes,
    pytest.mark.skipif(bool(WHY_NOT), reason=f"no network of several hosts here: {WHY_NOT}"),
]


def test_unequal_numbers_of_batches_end_the_run_on_all_hosts(tmp_path: Path) -> None:
    script = Path(unequal_job.__file__).read_text()
    args = ("a sum of the size of the gradients", str(tmp_path))
    with Network(2) as two, Hosts(two, tmp_path / "job", "2", script, args, torch=True) as hosts:
        hosts.start()
        assert [hosts.wait(0), hosts.wait(1)] == [Exit.BAD_INPUT] * 2, hosts.output(0)
        said = " ".join(hosts.output(0).split())
        assert f"UnequalBatchesError: rank 0 has no batch for step {BATCHES}" in said, said
        assert "after the loop of epoch" not in said
        assert len(hosts.events(0, "verdict")) == 1
