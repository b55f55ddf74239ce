"""Rank tables: correct ones pass, and all mistakes of a wrong one are reported at once, each with its place."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import UnsupportedError, UsageError
from holdfast.runtime.rank_table.table import (
    FILE_SIZE_MAX_BYTES,
    MISTAKES_MAX,
    RANKS_MAX,
    check,
    device_addresses,
    make,
    read,
)


def eight() -> dict[str, Any]:
    """Return a table of two hosts with eight devices each, as the tutorials of version 1.0 print it."""
    value = {
        "version": "1.0",
        "server_count": "2",
        "server_list": [
            {
                "server_id": f"10.0.0.{host}",
                "device": [
                    {
                        "device_id": str(k),
                        "device_ip": f"192.{k}.27.{host}",
                        "rank_id": str(8 * (host - 1) + k),
                    }
                    for k in range(8)
                ],
                "host_nic_ip": "reserve",
            }
            for host in (1, 2)
        ],
        "status": "completed",
    }
    return value


def pods() -> dict[str, Any]:
    """Return a table of version 1.2: four hosts of two devices in two super pods."""
    servers = [
        {
            "server_id": f"node_{host}",
            "host_ip": f"172.16.0.{100 + host}",
            "device": [
                {
                    "device_id": str(k),
                    "super_device_id": str(k),
                    "device_ip": f"192.168.{host}.{k + 6}",
                    "device_port": "16666",
                    "backup_device_ip": f"192.168.{host}.{7 - k}",
                    "backup_device_port": "16667",
                    "host_port": str(16665 + k),
                    "rank_id": str(2 * host + k),
                }
                for k in range(2)
            ],
        }
        for host in range(4)
    ]
    lists = [[{"server_id": f"node_{2 * pod + k}"} for k in range(2)] for pod in range(2)]
    super_pods = [{"super_pod_id": str(pod), "server_list": lists[pod]} for pod in range(2)]
    return {"status": "completed", "version": "1.2", "server_count": "4", "server_list": servers,
            "super_pod_list": super_pods}  # fmt: skip


def ranks() -> dict[str, Any]:
    """Return a table of version 2.0: ranks with their network layers, no hosts."""
    layer = {"net_layer": 0, "net_instance_id": "a", "net_type": "CLOS", "net_attr": "",
             "rank_addr_list": [{"addr_type": "EID", "addr": "00ff", "ports": ["0/0"], "plane_id": "1"}]}  # fmt: skip
    items = [
        {"rank_id": k, "local_id": k, "device_id": k, "level_list": [copy.deepcopy(layer)]} for k in range(4)
    ]
    return {"status": "completed", "version": "2.0", "rank_count": 4, "rank_list": items}


def told(value: Any) -> list[str]:
    """Return the mistakes of a table."""
    found = check(json.dumps(value).encode())
    assert (found.table is None) == bool(found.mistakes)
    return [str(mistake) for mistake in found.mistakes]


@pytest.mark.parametrize("value", [eight(), pods(), ranks()], ids=["1.0", "1.2", "2.0"])
def test_tables_of_each_form_pass(value: dict[str, Any]) -> None:
    table = check(json.dumps(value).encode()).table
    assert table is not None and table.version == value["version"]
    assert [d.rank for s in table.servers for d in s.devices] == list(range(table.world_size))
    assert table.world_size == {"1.0": 16, "1.2": 8, "2.0": 4}[table.version]
    assert table.servers[0].address == {"1.0": "10.0.0.1", "1.2": "172.16.0.100", "2.0": ""}[table.version]


def change(base: Callable[[], dict[str, Any]], path: str, new: Any) -> dict[str, Any]:
    """Return a table with one value replaced; ``...`` removes it."""
    value = base()
    *way, last = [int(word) if word.isdigit() else word for word in re.findall(r"\w+", long(path))]
    place: Any = value
    for word in way:
        place = place[word]
    if new is ...:
        del place[last]
    else:
        place[last] = copy.deepcopy(new)
    return value


SHORT = {"S": "server_list", "D": "device", "P": "super_pod_list", "R": "rank_list", "L": "level_list"}


def long(text: str) -> str:
    """Return the long form of a place: ``server_list[0].device[3]`` for ``S0.D3``."""
    return re.sub(r"\b([SDPRL])(\d)\b", lambda found: f"{SHORT[found[1]]}[{found[2]}]", text)


CASES: list[tuple[Callable[[], dict[str, Any]], str, Any, list[str]]] = [
    (eight, "status", "initializing", ["status: is 'initializing', not 'completed': the table is not ready"]),
    (eight, "status", ..., ["status: is missing"]),
    (eight, "version", "3.0", ["version: '3.0' is not known for this form; it is 1.0 or 1.2"]),
    (eight, "server_count", "3", ["server_count: says 3, server_list has 2"]),
    (eight, "server_count", 2, ["server_count: is 2, which must be a string here: '2'"]),
    (eight, "server_list", {}, ["server_list: is an object, not a list"]),
    (eight, "server_list", [], ["server_list: is empty"]),
    (eight, "S0.server_id", "10.*.*.*", ["S0.server_id: '10.*.*.*' is masked: write the address of the host"]),
    (eight, "S1.server_id", "10.0.0.1", ["S1.server_id: '10.0.0.1' is there already, at S0.server_id"]),
    (eight, "S1.server_id", "x" * 65, ["S1.server_id: has 65 characters, at most 64 are allowed"]),
    (eight, "S1.server_id", "10.0.0.10", []),
    (eight, "S0.server_id", "10.0.0.9", [
        ("server_list: ranks follow the hosts 10.0.0.9, 10.0.0.2, and must follow the order of their server_id, "
         "letter by letter: 10.0.0.2, 10.0.0.9")]),
    (eight, "S0.host_nic_ip", "eth0", ["S0.host_nic_ip: 'eth0' is neither 'reserve' nor an address"]),
    (eight, "S0.device", ..., [
        "S0.device: is missing", *[f"S1.D{k}.rank_id: {8 + k} with 8 ranks: they are 0 to 7" for k in range(8)],
        "rank_id: no device has rank 0, 1, 2, 3, 4, 5, 6, 7"]),
    (eight, "S0.D3.device_id", "2", ["S0.D3.device_id: 2 is there already, at S0.D2.device_id"]),
    (eight, "S0.D3.device_ip", "192.0.27.1", [
        "S0.D3.device_ip: '192.0.27.1' is there already, at S0.D0.device_ip"]),
    (eight, "S0.D3.device_ip", "nic3", ["S0.D3.device_ip: 'nic3' is no address"]),
    (eight, "S0.D3.rank_id", "2", [
        "S0.D3.rank_id: 2 is there already, at S0.D2.rank_id", "rank_id: no device has rank 3"]),
    (eight, "S1.D7.rank_id", "16", [
        "S1.D7.rank_id: 16 with 16 ranks: they are 0 to 15", "rank_id: no device has rank 15"]),
    (eight, "S0.D0.rank_id", "zero", [
        "S0.D0.rank_id: is 'zero', not a string of digits", "S1.D7.rank_id: 15 with 15 ranks: they are 0 to 14",
        "rank_id: no device has rank 0"]),
    (eight, "S0.D0", None, [
        "S0.D0: is null, not an object", "S1.D7.rank_id: 15 with 15 ranks: they are 0 to 14",
        "rank_id: no device has rank 0"]),
    (pods, "S0.host_ip", "172.16.0.101", ["S1.host_ip: '172.16.0.101' is there already, at S0.host_ip"]),
    (pods, "S0.D0.host_port", "70000", ["S0.D0.host_port: 70000 is no port number"]),
    (pods, "P1.super_pod_id", "0", ["P1.super_pod_id: '0' is there already, at P0.super_pod_id"]),
    (pods, "P1.S0.server_id", "node_9", [
        "P1.S0.server_id: 'node_9' is not in server_list", "super_pod_list: the host 'node_2' is in no super pod"]),
    (pods, "P1.S0.server_id", "node_0", [
        "P1.S0.server_id: 'node_0' is in super pod '0' already",
        "super_pod_list: the host 'node_2' is in no super pod"]),
    (ranks, "rank_count", "4", ["rank_count: is '4', not a whole number from 0"]),
    (ranks, "rank_count", 5, ["rank_count: says 5, rank_list has 4"]),
    (ranks, "R2.rank_id", 1, [
        "R2.rank_id: 1 is there already, at R1.rank_id", "rank_id: no device has rank 2"]),
    (ranks, "R2.L0.rank_addr_list", [1], ["R2.L0.rank_addr_list[0]: is a number, not an object"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("base", "path", "new", "wanted"), CASES, ids=[f"{c[1]}={c[2]!r:.20}" for c in CASES]
)
def test_each_mistake_is_named(
    base: Callable[[], dict[str, Any]], path: str, new: Any, wanted: list[str]
) -> None:
    assert told(change(base, path, new)) == [long(line) for line in wanted]


def test_ranks_of_hosts_are_not_mixed() -> None:
    value = eight()
    value["server_list"][0]["device"][7]["rank_id"] = "8"
    value["server_list"][1]["device"][0]["rank_id"] = "7"
    mixed = "its ranks are mixed with those of other hosts"
    assert told(value) == [f"server_list[0].device: {mixed}", f"server_list[1].device: {mixed}"]


def test_all_mistakes_at_once() -> None:
    value = eight()
    value["status"] = "initializing"
    value["server_count"] = "1"
    value["server_list"][1]["server_id"] = "10.0.0.1"
    value["server_list"][1]["device"][0]["rank_id"] = "7"
    value["server_list"][1]["device"][1]["device_id"] = 1
    starts = [
        "status",
        "server_count",
        "S1.D1.device_id",
        "S1.server_id",
        "S1.D0.rank_id",
        "S1.D7.rank_id",
        "rank_id",
    ]
    found = told(value)
    assert all(any(line.startswith(long(start)) for line in found) for start in starts), found


def test_pods_whose_hosts_are_mixed() -> None:
    value = pods()
    value["super_pod_list"][0]["server_list"][1]["server_id"] = "node_2"
    value["super_pod_list"][1]["server_list"][0]["server_id"] = "node_1"
    assert told(value) == ["server_list: hosts of one super pod must stand together"]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\xff{}", "is no text in UTF-8 (byte 0)"),
        (b"{", "is no JSON"),
        (b"[1]", "is a list, not an object"),
        (b"[" * 200_000, "is no JSON"),
        (b'{"status": 1' + b"0" * 5000 + b"}", "is no JSON"),
        (b'{"status": "completed", "status": "completed"}', "the key 'status' is there 2 times"),
        (b'{"group_list": []}', "group_list: is the form of before 1.0"),
    ],
)
def test_files_that_are_no_table(data: bytes, says: str) -> None:
    assert any(str(mistake).startswith(says) for mistake in check(data).mistakes)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.touch()
    with open(path, "r+b") as file:
        file.truncate(FILE_SIZE_MAX_BYTES + 1)
    with pytest.raises(UsageError, match="at most"):
        read(path)
    with pytest.raises(UsageError, match="cannot read the rank table"):
        read(tmp_path / "none")


def test_only_files_are_read(tmp_path: Path) -> None:
    """A device file has no end, and a pipe waits for its writer."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(UsageError, match="no regular file"):
            read(path)


@pytest.mark.parametrize(
    "value",
    [
        {"server_list": [0] * RANKS_MAX},
        {"server_list": [{}] * RANKS_MAX},
        {"server_list": [{"server_id": "10.0.0.1", "device": [{}] * RANKS_MAX}]},
        {"server_list": [], "super_pod_list": [0] * RANKS_MAX},
        {"version": "2.0", "rank_list": [{"level_list": [0] * RANKS_MAX}]},
    ],
)
def test_after_a_thousand_mistakes_no_more_are_looked_for(value: dict[str, Any]) -> None:
    """Each mistake is stored. Regression: eight million of them, in a file of 16 MB, took two gigabytes."""
    found = check(json.dumps(value).encode())
    assert found.table is None and len(found.mistakes) == MISTAKES_MAX + 1
    assert "no further mistakes" in str(found.mistakes[-1])


def test_a_list_longer_than_any_job_is_one_mistake() -> None:
    data = json.dumps({"version": "1.0", "status": "completed", "server_list": [0] * (RANKS_MAX + 1)})
    found = [str(mistake) for mistake in check(data.encode()).mistakes]
    assert f"server_list: has {RANKS_MAX + 1} entries, at most {RANKS_MAX} are read" in found
    assert len(found) == 2  # one of them is about server_count


@pytest.mark.parametrize("name", ["\ud800", "\x1b[31mred", "two\nlines"])
def test_what_cannot_be_printed_is_no_name_of_a_host(name: str) -> None:
    value = eight()
    value["server_list"][0]["server_id"] = name
    assert any("cannot be printed" in str(mistake) for mistake in check(json.dumps(value).encode()).mistakes)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_value_anywhere_gives_mistakes_or_a_table(data: st.DataObject) -> None:
    value = data.draw(st.sampled_from([eight, pods, ranks]))()
    place: Any = value
    while True:
        key: Any = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            place[key] = data.draw(JSON)
            break
        place = place[key]
    found = check(json.dumps(value).encode())
    assert (found.table is None) == bool(found.mistakes)


@settings(max_examples=40, deadline=None)
@given(
    st.sets(st.ip_addresses(v=4).map(str), min_size=1, max_size=12), st.integers(1, 9), st.sampled_from(["1.0", "1.2"])
)  # fmt: skip
def test_what_is_made_has_no_mistake(hosts: set[str], nproc: int, version: str) -> None:
    table = check(make(list(hosts), [nproc], version)).table
    assert table is not None
    assert [server.name for server in table.servers] == sorted(hosts)
    assert table.world_size == len(hosts) * nproc


def test_make_takes_device_addresses_and_refuses_nonsense() -> None:
    cards = device_addresses(
        "address_0=192.168.0.1\nnetmask_0=255.255.0.0\naddress_1= 192.168.0.2\naddress_x=1\n"
        "address_\u00b2=192.168.0.3\n" + f"address_{'9' * 5000}=192.168.0.4\n"
    )
    assert cards == {0: "192.168.0.1", 1: "192.168.0.2"}
    table = check(make(["10.0.0.1"], [2], device_addresses={"10.0.0.1": cards})).table
    assert table is not None and [d.address for d in table.servers[0].devices] == list(cards.values())
    with pytest.raises(UsageError, match="'host1' is no address"):
        make(["host1"], [1])
    with pytest.raises(UsageError, match="there already"):
        make(["10.0.0.1", "10.0.0.1"], [1])
    with pytest.raises(UnsupportedError, match=r"2\.0 is not written"):
        make(["10.0.0.1"], [1], "2.0")
