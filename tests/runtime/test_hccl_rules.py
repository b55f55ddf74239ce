"""The rules of HCCL: sizes of a cluster, both networks of a host, all devices of several hosts."""

from __future__ import annotations

import pytest

from holdfast.runtime.rank_table.hccl_rules import ONE_SWITCH, hccl_mistakes, hccl_notes
from holdfast.runtime.rank_table.table import Device, RankTable, TableServer

ALL = range(8)


def table(*hosts: object) -> RankTable:
    """Return a rank table with one host per collection of device ids."""
    servers, rank = [], 0
    for number, ids in enumerate(hosts):
        assert isinstance(ids, range | tuple)
        devices = tuple(Device(rank + k, device_id, "") for k, device_id in enumerate(ids))
        rank += len(devices)
        servers.append(TableServer(f"10.0.0.{number}", "", devices))
    return RankTable("1.0", tuple(servers))


@pytest.mark.parametrize(
    "hosts",
    [
        ((0,),), ((7,),), ((0, 1),), ((2, 3),), ((4, 7),), ((0, 1, 2, 3),), ((4, 5, 6, 7),), (ALL,),
        (ALL, ALL), (ALL, ALL, ALL),
    ],
)  # fmt: skip
def test_clusters_that_hccl_takes(hosts: tuple[object, ...]) -> None:
    assert hccl_mistakes(table(*hosts)) == ()


@pytest.mark.parametrize(
    ("hosts", "says"),
    [
        (((0, 1, 2),), ["10.0.0.0: 3 devices (0, 1, 2): on one host HCCL takes 1, 2, 4 or 8"]),
        ((range(5),), ["on one host HCCL takes"]),
        ((range(6),), ["on one host HCCL takes"]),
        ((range(7),), ["on one host HCCL takes"]),
        (((3, 4),), ["10.0.0.0: 2 devices (3, 4): 0 to 3 and 4 to 7 are on two networks"]),
        (((2, 3, 4, 5),), ["are on two networks"]),
        (((0, 1, 2, 7),), ["are on two networks"]),
        (((8,),), ["device 8: a host has devices 0 to 7"]),
        ((range(1, 9),), ["device 8"]),
        (((0, 1, 2), (0, 1, 2)), ["10.0.0.0: 3 devices", "10.0.0.1: 3 devices (0, 1, 2): of several hosts"]),
        (((0,), (0,)), ["of several hosts HCCL takes all 8", "of several hosts HCCL takes all 8"]),
        ((ALL, (0, 1, 2, 3)), ["10.0.0.1: 4 devices"]),
    ],
)
def test_clusters_that_hccl_refuses(hosts: tuple[object, ...], says: list[str]) -> None:
    found = list(map(str, hccl_mistakes(table(*hosts))))
    assert len(found) == len(says)
    assert all(words in mistake for words, mistake in zip(says, found, strict=True)), found


def test_several_hosts_must_be_on_one_switch_which_is_only_said() -> None:
    assert hccl_notes(table(ALL, ALL)) == (ONE_SWITCH,)
    assert hccl_notes(table(ALL)) == ()
