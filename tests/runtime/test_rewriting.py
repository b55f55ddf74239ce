"""The rank table of a generation in which a spare host has the ranks of a lost one."""

from __future__ import annotations

import json
import os
import signal
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.ids import Generation, NodeId
from holdfast.core.protocol.messages import StartMembers
from holdfast.errors import UsageError
from holdfast.runtime.node.run_settings import RunSettings
from holdfast.runtime.node.rundir import RunDir
from holdfast.runtime.rank_table.rewriting import NodeRanks, RewrittenTable, rewrite, table_of
from holdfast.runtime.rank_table.table import check, make
from tests.runtime.runs import LOOP, until
from tests.runtime.test_meeting import Nodes, address

HOSTS = ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
CARDS = {host: {0: f"192.168.{k}.1", 1: f"192.168.{k}.2"} for k, host in enumerate(HOSTS)}


def rewritten(data: bytes, *blocks: tuple[int, str]) -> dict[str, Any]:
    """Return the rewritten table for nodes of two ranks each, checked for mistakes."""
    made = rewrite(data, [NodeRanks(n, host, range(2 * k, 2 * k + 2)) for k, (n, host) in enumerate(blocks)])
    assert check(made).mistakes == ()
    found: dict[str, Any] = json.loads(made)
    return found


def shown(table: dict[str, Any]) -> list[tuple[str, str, list[tuple[str, str, str]]]]:
    """Return name and address of each host, and (rank, device, card) of its places."""
    return [
        (
            server["server_id"],
            server["host_ip"],
            [(d["rank_id"], d["device_id"], d.get("device_ip", "")) for d in server["device"]],
        )
        for server in table["server_list"]
    ]


def first(host: int, rank: int) -> tuple[str, str, list[tuple[str, str, str]]]:
    """Return a host of the user's table, with its cards."""
    places = [(str(rank + k), str(k), CARDS[HOSTS[host]][k]) for k in range(2)]
    return HOSTS[host], HOSTS[host], places


@pytest.mark.parametrize("version", ["1.0", "1.2"])
def test_a_spare_takes_the_place_of_a_host(version: str) -> None:
    data = make(HOSTS, [2], version, CARDS)
    table = rewritten(data, (0, HOSTS[0]), (3, "10.0.0.25"), (2, HOSTS[2]))
    spare = ("10.0.0.25", "10.0.0.25", [("2", "0", ""), ("3", "1", "")])
    assert shown(table) == [first(0, 0), spare, first(2, 4)]
    if version == "1.2":
        (pod,) = table["super_pod_list"]
        assert [each["server_id"] for each in pod["server_list"]] == [HOSTS[0], "10.0.0.25", HOSTS[2]]


def test_where_the_order_of_names_would_break_the_spare_keeps_the_name_of_the_lost_host() -> None:
    table = rewritten(make(HOSTS, [2], "1.0", CARDS), (0, HOSTS[0]), (3, "10.0.0.9"), (2, HOSTS[2]))
    assert shown(table)[1] == (HOSTS[1], "10.0.0.9", [("2", "0", ""), ("3", "1", "")])


def test_a_job_that_goes_on_with_fewer_hosts_has_a_table_of_these() -> None:
    table = rewritten(make(HOSTS, [2], "1.0", CARDS), (0, HOSTS[0]), (2, HOSTS[2]))
    assert table["server_count"] == "2" and shown(table) == [first(0, 0), first(2, 2)]


def test_no_table_with_a_mistake_is_made() -> None:
    with pytest.raises(UsageError, match="no rank table can be made"):
        rewrite(make(HOSTS, [2]), [NodeRanks(2, HOSTS[2], range(2)), NodeRanks(0, HOSTS[0], range(2, 4))])


def order(*places: tuple[str, str]) -> StartMembers:
    """Return an order to start, for nodes at these addresses."""
    return StartMembers(
        node_id=NodeId("node0"), generation=Generation(1, 2), world_size=2, attempt=1, members=(),
        places=tuple((NodeId(node), host) for node, host in places),
    )  # fmt: skip


def test_the_users_table_is_passed_on_as_long_as_it_fits(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    given = tmp_path / "table.json"
    given.write_bytes(make(HOSTS[:2], [1]))
    settings = RunSettings(
        run_id="t", nproc=1, nnodes=2, nnodes_max=3, rank_table=str(given), device_ids=(0,)
    )
    fits, moved = order(("node0", "a"), ("node1", "b")), order(("node0", HOSTS[0]), ("node2", HOSTS[2]))
    assert table_of(run, settings, fits) == RewrittenTable(str(given))
    assert table_of(run, settings, order()) == RewrittenTable(str(given)), "one node"
    assert table_of(run, RunSettings(run_id="t"), moved) == RewrittenTable("")
    path, kept = table_of(run, settings, moved)
    assert not kept and Path(path).name == "rank-table-1.2.json"
    assert [name for name, *_ in shown(json.loads(Path(path).read_bytes()))] == [HOSTS[0], HOSTS[2]]
    for spoiled in (b"{", b"[]", b'{"server_list": []}'):
        given.write_bytes(spoiled)
        path, kept = table_of(run, settings, moved)
        assert path == str(given) and kept, spoiled
    given.unlink()
    assert "No such file" in table_of(run, settings, moved).kept


SCRIPT = f"""
import os, sys
from pathlib import Path
place = Path(sys.argv[0]).with_name(f"table-{{os.environ['RANK']}}")
place.with_suffix(".new").write_text(os.environ["RANK_TABLE_FILE"])
place.with_suffix(".new").replace(place)  # the test must not read an empty file
{LOOP}
"""


@pytest.mark.processes
def test_workers_read_of_the_host_that_took_a_place(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    table.write_bytes(make([address(0), address(1)], [1]))
    nodes = Nodes(tmp_path, 2, spares=1)
    nodes.shape |= {"args": ("100000",), "rank_table": str(table), "device_ids": (0,)}
    with ExitStack() as stack:
        runs = [stack.enter_context(nodes.node(number)) for number in range(3)]
        for run in runs:
            run.script.write_text(SCRIPT)
            run.start()
        told = [run.script.with_name(f"table-{rank}") for rank, run in enumerate(runs[:2])]
        until("both have begun", lambda: all(path.exists() for path in told))
        assert [path.read_text() for path in told] == [str(table)] * 2
        runs[1].agents[0].kill()
        for pid in runs[1].left():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        late = runs[2].script.with_name("table-1")
        until("the spare has begun", late.exists)
        until("rank 0 has begun again", lambda: told[0].read_text() != str(table))
        for run, path in ((runs[0], told[0]), (runs[2], late)):
            found = json.loads(Path(path.read_text()).read_bytes())
            assert [server["server_id"] for server in found["server_list"]] == [address(0), address(2)]
            assert run.events("rank_table")[-1].data == {"path": path.read_text(), "kept": ""}
            run.let_end()
        assert [runs[0].wait(), runs[2].wait()] == [0, 0]
