"""Datasets of the ranks, compared through the agent's store."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any, cast

import pytest

from holdfast.core.protocol.messages import KvReply
from holdfast.errors import UsageError
from holdfast.frameworks.common.adapter import DataIdentity
from holdfast.runtime.worker.worker_client import WorkerClient
from holdfast.session.loops.dataset_check import compare_with_ranks
from tests.session.launch import run_job


class Store:
    """The part of an agent's store that the comparison uses."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def kv(self, op: str, keys: tuple[str, ...], value: bytes) -> Any:
        assert op == "compare_set"
        return KvReply(request_id=0, ok=True, value=self.values.setdefault(keys[0], value))


def warnings_of(lengths: list[int], caplog: pytest.LogCaptureFixture, *, shared: bool = False) -> list[str]:
    client = cast(WorkerClient, Store())
    caplog.set_level(logging.WARNING, "holdfast")
    for rank, length in enumerate(lengths):
        compare_with_ranks(client, rank, 0, DataIdentity(length, "", shared))
    return [record.getMessage() for record in caplog.records]


def test_other_lengths_without_a_sampler_that_shares_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    (said,) = warnings_of([64, 64, 72, 80], caplog)
    assert "rank 2 draws from 72 samples, rank 0 from 64, and no sampler shares them: " in said


def test_equal_lengths_are_no_matter_and_other_lengths_of_a_shared_dataset_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert warnings_of([64, 64], caplog) == []
    with pytest.raises(UsageError, match="rank 1 and rank 0 draw from different datasets"):
        warnings_of([64, 72], caplog, shared=True)


@pytest.mark.torch
@pytest.mark.processes
@pytest.mark.parametrize(
    ("way", "told"), [("alone", 1), ("numbers", 0), pytest.param("shared", 0, marks=pytest.mark.more)]
)
def test_data_that_no_sampler_shares_are_told_once(tmp_path: Path, way: str, told: int) -> None:
    done = run_job(tmp_path, 2, str(Path(__file__).with_name("unshared_job.py")), way)
    assert done.returncode == 0, done.stdout
    said = "".join(path.read_text() for path in tmp_path.glob("runs/*/attempt-000/*.log"))
    assert said.count("all 2 copies of the model have drawn the same batch") == told, said


@pytest.mark.torch
@pytest.mark.processes
def test_other_lengths_are_told_on_the_console_whichever_rank_finds_them(tmp_path: Path) -> None:
    done = run_job(tmp_path, 2, str(Path(__file__).with_name("unshared_job.py")), "lengths")
    assert done.returncode == 0, done.stdout
    assert len(re.findall(r"rank \d draws from \d+ samples, rank \d from \d+, and no", done.stdout)) == 1, (
        done.stdout
    )
