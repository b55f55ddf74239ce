"""Requests of a job to a cluster that allocates bundles, and the reasons for missing ones."""

from __future__ import annotations

import pytest

from holdfast.errors import UsageError
from holdfast.exit_codes import Exit
from holdfast.schedulers.job_ends import ending_of, meaning_of
from holdfast.schedulers.placement_bundles import ClusterNode, bundle_of, shortage


def test_a_worker_takes_a_cpu_and_what_is_said_of_a_node_wins() -> None:
    assert bundle_of(4, use_gpu=False, resources={}) == {"CPU": 4.0}
    assert bundle_of(4, use_gpu=True, resources={"CPU": 32, "trn": 1}) == {
        "CPU": 32.0,
        "GPU": 4.0,
        "trn": 1.0,
    }
    assert bundle_of(1, use_gpu=False, resources={"CPU": 0, "NPU": 8}) == {"NPU": 8.0}


@pytest.mark.parametrize(
    "resources", [{"CPU": -1}, {"CPU": float("nan")}, {"GPU": "8"}, {"GPU": True}, {"CPU": 0}]
)
def test_amounts_that_cannot_be_asked_for(resources: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        bundle_of(1, use_gpu=False, resources=resources)


def test_gpus_that_are_asked_for_and_left_out_are_a_contradiction() -> None:
    with pytest.raises(UsageError, match="leaves GPU out"):
        bundle_of(1, use_gpu=True, resources={"GPU": 0})


def test_what_is_missing_is_said() -> None:
    nodes = [
        ClusterNode("a", {"CPU": 8, "GPU": 8}),
        ClusterNode("b", {"CPU": 8, "GPU": 4}),
        ClusterNode("c", {}),
    ]
    wanted = {"CPU": 8.0, "GPU": 8.0}
    few = shortage(nodes, wanted, 2, "STRICT_SPREAD")
    assert few == (
        "2 nodes with CPU 8, GPU 8 each are wanted, and the cluster has 1 of them (b has CPU 8, GPU 4)"
    )
    assert "in use by other jobs" in shortage(nodes, wanted, 1, "STRICT_SPREAD")
    assert "in use by other jobs" in shortage(nodes, wanted, 2, "SPREAD")
    many = [ClusterNode(f"n{i}", {"CPU": 1}) for i in range(20)]
    assert shortage(many, {"CPU": 2.0}, 2, "STRICT_SPREAD").endswith(" and 12 more)")


@pytest.mark.parametrize(
    ("codes", "wanted"),
    [([0, 75, 1], 0), ([75, 2, 69], 2), ([69, 75, -9], 75), ([76, 69], 76), ([-9, -15], -15), ([137], 137)],
)
def test_the_code_of_a_job_is_that_of_one_of_its_launchers(codes: list[int], wanted: int) -> None:
    assert ending_of(codes) == wanted


def test_every_code_has_a_meaning() -> None:
    assert "checkpoint saved" in meaning_of(Exit.REQUEUE)
    assert meaning_of(-9) == "its launchers were killed (signal 9)"
    assert meaning_of(137) == "its launchers ended in an unknown way"
