"""The results of collectives before the first step, kept for a replacement."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast.core.ids import Generation
from holdfast.core.protocol.messages import KvReply
from holdfast.frameworks.torch.comm import setup_record
from holdfast.frameworks.torch.comm.setup_record import SetupCall, SetupRecord
from holdfast.runtime.node.flight_recorder import Flight

pytestmark = pytest.mark.torch
CALL = SetupCall("all_gather", "world.0", 1, 7, 0)


def test_a_replacement_gets_the_result_of_the_lost_process(tmp_path: Path) -> None:
    kept = [[torch.arange(6).reshape(2, 3).t(), torch.empty(0)], [torch.tensor(2.5, dtype=torch.bfloat16)]]
    SetupRecord(tmp_path).keep(CALL, kept)
    found = [[torch.zeros(3, 2, dtype=torch.int64), torch.empty(0)], [torch.tensor(0, dtype=torch.bfloat16)]]
    assert SetupRecord(tmp_path).put_back(CALL, found)
    assert found[0][0].equal(kept[0][0]) and found[1][0].equal(kept[1][0])


@pytest.mark.parametrize(
    ("call", "output"),
    [
        (CALL._replace(rank=0), torch.zeros(3)),
        (CALL._replace(number=1), torch.zeros(3)),
        (CALL._replace(place=8), torch.zeros(3)),
        (CALL._replace(what="broadcast"), torch.zeros(3)),
        (CALL, torch.zeros(4)),
        (CALL, torch.zeros(3, dtype=torch.int32)),
    ],
)
def test_the_result_of_another_collective_is_not_used(
    tmp_path: Path, call: SetupCall, output: torch.Tensor
) -> None:
    SetupRecord(tmp_path).keep(CALL, [torch.ones(3)])
    assert not SetupRecord(tmp_path).put_back(call, [output])
    assert not output.any()


def test_weights_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_record, "BYTES_MAX", 8)
    SetupRecord(tmp_path).keep(CALL, [torch.ones(3)])
    assert not list(tmp_path.iterdir())


class Store:
    """The key-value store of a job with several nodes."""

    generation, rank, world_size, joining = Generation(1, 1), 0, 2, False
    shared: Path | None = None
    directory: Path | None = None
    flight: Flight | None = None
    several_nodes = True

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def kv(
        self, op: str, keys: tuple[str, ...] = (), value: bytes = b"", *_: object, **__: object
    ) -> KvReply:
        if op == "set":
            self.values[keys[0]] = value
        return KvReply(1, self.values.get(keys[0], b""))


def test_a_replacement_on_another_node_gets_small_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_record, "STORED_BYTES_MAX", 16)
    here, there, store = tmp_path / "here", tmp_path / "there", Store()
    here.mkdir()
    there.mkdir()
    record = SetupRecord(here, store)
    record.keep(CALL, [torch.ones(4)])
    record.keep(CALL._replace(number=1), [torch.ones(5)])
    found = torch.zeros(4), torch.zeros(5)
    again = SetupRecord(there, store)
    assert again.put_back(CALL, [found[0]]) and found[0].all()
    assert not again.put_back(CALL._replace(number=1), [found[1]]) and not found[1].any()
    assert not SetupRecord(there).put_back(CALL, [found[0]])
