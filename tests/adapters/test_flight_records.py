"""Torch's flight recorder as JSON, in the form that torch writes: the position of each device."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.core.protocol.health_messages import DeviceSeen
from holdfast.frameworks.torch import private_api
from holdfast.frameworks.torch.comm import flight_records

pytestmark = pytest.mark.torch


def entry(number: int, state: str, **more: Any) -> dict[str, Any]:
    """Return an entry as torch 2.15 writes it, with fields that Holdfast does not read."""
    return {
        "collective_seq_id": number,
        "input_dtypes": ["Float"],
        "input_sizes": [[4, 1024]],
        "is_p2p": False,
        "op_id": number,
        "pg_id": 0,
        "process_group": ["world.0", "default_pg"],
        "profiling_name": "nccl:all_reduce",
        "record_id": number,
        "retired": state == "completed",
        "state": state,
        "thread_id": "140046122597248",
        "time_discovered_started_ns": 0,
        **more,
    }


def read(monkeypatch: pytest.MonkeyPatch, *entries: dict[str, Any]) -> tuple[DeviceSeen, ...]:
    data = json.dumps({"entries": entries, "pg_status": {}, "version": "2.10"}).encode()
    monkeypatch.setattr(private_api, "recorded_collectives", lambda: {"nccl": data})
    return flight_records.records().devices


def test_the_oldest_that_is_not_over_and_the_newest_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    what = "nccl:all_reduce of 4x1024 Float"
    begun = [entry(1, "completed"), entry(2, "started"), entry(3, "scheduled")]
    assert read(monkeypatch, *begun) == (DeviceSeen("world.0", 3, 2, 1, what),)
    untimed = [entry(1, "completed"), entry(2, "scheduled")]
    assert read(monkeypatch, *untimed) == (DeviceSeen("world.0", 2, 1, 1, what),)
    assert read(monkeypatch, entry(7, "completed")) == (DeviceSeen("world.0", 7, 7, 7, what),)


def test_of_a_group_that_was_rebuilt_only_the_newest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = read(monkeypatch, entry(40, "started"), entry(2, "completed", pg_id=5))
    assert [(d.given, d.ended) for d in found] == [(2, 2)]


def test_transfers_between_two_ranks_and_collectives_of_the_host_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = entry(3, "scheduled", is_p2p=True)
    assert read(monkeypatch, sent, entry(3, "scheduled", profiling_name="gloo:all_reduce")) == ()


@pytest.mark.parametrize("data", [b"", b"{}", b'{"entries": {}}', b"\x80\x04K\x01."])
def test_what_is_not_this_json_is_no_evidence(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_api, "recorded_collectives", lambda: {"nccl": data})
    assert flight_records.records().recorders == {}


def test_the_recorders_of_this_torch_are_read() -> None:
    flight_records.records()
    assert "cpu" in private_api.recorded_collectives()
