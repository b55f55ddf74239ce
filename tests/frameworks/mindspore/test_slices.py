"""Gradients are exchanged among the ranks that hold the same part of a parameter, and with no other rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.launched import Launched

JOB = str(Path(__file__).with_name("slices_job.py"))


def trained(folder: Path, world: int, *options: str) -> list[tuple[str, ...]]:
    """Return ``w`` and ``v`` of each rank."""
    flags = ("--framework", "mindspore", "--nproc-per-node", str(world))
    with Launched(folder, *flags, JOB, *options) as run:
        assert run.wait() == 0, run.output
        found: list[tuple[str, ...]] = run.said(r"rank (\d) w (\S+) v (\S+)")  # type: ignore[assignment]
    return [tuple(each[1:]) for each in sorted(found)]


@pytest.mark.smoke
def test_gradients_of_slices_stay_with_them(tmp_path: Path) -> None:
    assert trained(tmp_path, 2) == [("-1", "-1.5"), ("-2", "-1.5")]


def test_they_are_averaged_over_the_ranks_that_hold_the_same_slice(tmp_path: Path) -> None:
    assert trained(tmp_path, 4, "halves") == [("-2", "-2.5"), ("-3", "-2.5")] * 2


def test_the_sum_where_the_script_says_so(tmp_path: Path) -> None:
    assert trained(tmp_path, 4, "halves", "sum") == [("-4", "-10"), ("-6", "-10")] * 2


def test_beside_mindspores_own_allreduce(tmp_path: Path) -> None:
    assert trained(tmp_path, 2, "native") == [("-1", "-1.5"), ("-2", "-1.5")]


def test_a_slice_that_nothing_describes_is_refused_by_name(tmp_path: Path) -> None:
    flags = ("--framework", "mindspore", "--nproc-per-node", "2")
    with Launched(tmp_path, *flags, JOB, "undeclared") as run:
        assert run.wait() == 3, run.output
        assert "parameter 'w' is layerwise_parallel" in run.logs() + run.output
