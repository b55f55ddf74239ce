"""``holdfast ranktable`` and ``holdfast run --rank-table``: one host, and two agents on this host."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.start import rank_table_flags
from holdfast.cli.start.flags import FLAGS
from holdfast.cli.start.rank_table_flags import place
from holdfast.errors import UsageError
from holdfast.runtime.node.spawn import free_port
from holdfast.runtime.rank_table.table import make
from tests.cli.command import HOLDFAST, Run, clean_environment
from tests.runtime.runs import LOOP, without_torch

SCRIPT = f"""
import os
names = ("RANK_ID", "RANK_SIZE", "DEVICE_ID", "RANK_TABLE_FILE", "RANK", "WORLD_SIZE", "GROUP_RANK")
open(f"seen-{{os.environ['RANK']}}", "w").write(" ".join(os.environ[name] for name in names))
{LOOP}
"""


def write_table(path: Path, hosts: list[str], nproc: int, **changes: Any) -> Path:
    """Write a rank table with some top-level values changed."""
    path.write_text(json.dumps({**json.loads(make(hosts, [nproc])), **changes}))
    return path


def placed(path: Path, **given: Any) -> dict[str, Any]:
    """Return the flags that a rank table stands for on one host."""
    values = {flag.key: flag.default for flag in FLAGS} | given | {"rank_table": str(path)}
    return dict(place(values, frozenset(given)).values)


def refused(path: Path, says: str, **given: Any) -> None:
    with pytest.raises(UsageError, match=says):
        placed(path, **given)


def test_check_says_all_mistakes_or_what_is_where(holdfast: Run, tmp_path: Path) -> None:
    write_table(tmp_path / "good.json", ["10.0.0.1", "10.0.0.2"], 8)
    good = holdfast("ranktable", "check", "good.json")
    assert good.returncode == 0 and "version 1.0, 2 hosts, 16 ranks, no mistake" in good.stdout
    assert "node 1  10.0.0.2                  ranks 8 to 15" in good.stdout
    write_table(tmp_path / "bad.json", ["10.0.0.1", "10.0.0.2"], 8, server_count="3", status="no")
    bad = holdfast("ranktable", "check", "bad.json")
    assert bad.returncode == 2 and "has 2 mistakes" in bad.stderr
    assert "  status: is 'no'" in bad.stderr and "  server_count: says 3, server_list has 2" in bad.stderr
    shown = json.loads(holdfast("ranktable", "check", "--json", "bad.json").stdout)
    assert len(shown["mistakes"]) == 2 and shown["table"] is None


def test_check_and_make_know_what_hccl_takes(holdfast: Run, tmp_path: Path) -> None:
    write_table(tmp_path / "good.json", ["10.0.0.1", "10.0.0.2"], 8)
    good = holdfast("ranktable", "check", "--hccl", "good.json")
    assert good.returncode == 0 and "note: all hosts must be on one switch" in good.stdout
    write_table(tmp_path / "odd.json", ["10.0.0.1", "10.0.0.2"], 3)
    assert holdfast("ranktable", "check", "odd.json").returncode == 0
    odd = holdfast("ranktable", "check", "--hccl", "odd.json")
    assert odd.returncode == 2 and "has 2 mistakes" in odd.stderr and "  10.0.0.2: 3 devices" in odd.stderr
    shown = json.loads(holdfast("ranktable", "check", "--hccl", "--json", "odd.json").stdout)
    assert len(shown["mistakes"]) == 2 and shown["table"] is None
    two = json.loads((tmp_path / "odd.json").read_text())
    two["server_list"] = two["server_list"][:1]
    two["server_list"][0]["device"] = [
        {"device_id": str(k), "rank_id": str(rank)} for rank, k in enumerate((3, 4))
    ]
    (tmp_path / "halves.json").write_text(json.dumps(two | {"server_count": "1"}))
    halves = holdfast("ranktable", "check", "--hccl", "halves.json")
    assert (
        halves.returncode == 2 and "2 devices (3, 4): 0 to 3 and 4 to 7 are on two networks" in halves.stderr
    )
    made = holdfast("ranktable", "make", "--hccl", "--hosts", "10.0.0.1", "--nproc-per-node", "3",
                    "--output", "never.json")  # fmt: skip
    assert (
        made.returncode == 2
        and "takes 1, 2, 4 or 8" in made.stderr
        and not (tmp_path / "never.json").exists()
    )
    pair = holdfast("ranktable", "make", "--hccl", "--hosts", "10.0.0.1,10.0.0.2", "--nproc-per-node", "8")
    assert pair.returncode == 0 and "one switch" in pair.stderr and '"completed"' in pair.stdout


def test_make_writes_what_run_takes(holdfast: Run, tmp_path: Path) -> None:
    (tmp_path / "hccn.conf").write_text("address_0=192.168.0.1\naddress_1=192.168.0.2\n")
    made = holdfast("ranktable", "make", "--hosts", "10.0.0.9,10.0.0.10", "--nproc-per-node", "2",
                    "--hccn", "10.0.0.9=hccn.conf", "--output", "table.json")  # fmt: skip
    assert (
        made.returncode == 0 and "follow the letters" in made.stderr and (tmp_path / "table.json").is_file()
    )
    assert "192.168.0.2" in (tmp_path / "table.json").read_text()
    refused_make = holdfast("ranktable", "make", "--hosts", "a", "--nproc-per-node", "2")
    assert refused_make.returncode == 2 and "'a' is no address" in refused_make.stderr


def test_a_table_stands_for_the_flags(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t", ["127.0.0.1", "198.51.100.1", "198.51.100.2"], 2)
    mine = placed(path)
    assert (mine["nnodes"], mine["node_rank"], mine["nproc_per_node"]) == ("3", 0, "2")
    assert (mine["master_addr"], mine["bind"]) == ("127.0.0.1", "127.0.0.1")
    other = placed(path, node_rank=2)
    assert (other["node_rank"], other["bind"]) == (2, "198.51.100.2")
    spare = placed(path, nnodes="3:4", node_rank=3)
    assert (spare["nnodes"], spare["node_rank"], spare["bind"]) == ("3:4", 3, None)


def test_a_table_of_ipv6_addresses(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t", ["FD00::9", "fd00::a"], 2)
    for bind in ("fd00::a", "[fd00::0a]"):
        mine = placed(path, bind=bind)
        assert (mine["node_rank"], mine["master_addr"], mine["bind"]) == (1, "FD00::9", bind)


def test_a_table_of_hosts_of_two_sizes(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(make(["127.0.0.1", "198.51.100.1"], [2, 1]))
    assert placed(path)["nproc_per_node"] == placed(path, node_rank=1)["nproc_per_node"] == "2,1"
    assert (placed(path, nproc_per_node="2,1")["nnodes"], placed(path, node_rank=1)["bind"]) == (
        "2",
        "198.51.100.1",
    )
    refused(path, "--nproc-per-node 2, but the rank table .* says 2,1", nproc_per_node="2")


def test_a_table_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t", ["127.0.0.1", "127.0.0.2"], 2)
    refused(path, "several hosts of the rank table .* are this machine")
    refused(path, "--nproc-per-node 3, but the rank table .* says 2", nproc_per_node="3")
    refused(path, "--nnodes 3, but the rank table .* has 2 hosts", nnodes="3")
    refused(
        write_table(tmp_path / "far", ["198.51.100.1", "198.51.100.2"], 1),
        "no host of the rank table .* is this machine",
    )


def test_a_table_of_the_environment_gives_way_to_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_table(tmp_path / "t", ["127.0.0.1"], 8)
    monkeypatch.setenv("RANK_TABLE_FILE", str(path))
    assert placed(path)["nproc_per_node"] == "8"
    assert placed(path, nproc_per_node="2")["nproc_per_node"] == "2"


def test_a_table_that_is_being_written_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_table_flags, "LOOK_S", 0.01)
    path = write_table(tmp_path / "t", ["127.0.0.1"], 2, status="initializing")
    writer = threading.Timer(0.05, lambda: os.replace(write_table(tmp_path / "new", ["127.0.0.1"], 2), path))
    writer.start()
    assert placed(path)["nproc_per_node"] == "2"
    writer.join()
    write_table(path, ["127.0.0.1"], 2, status="initializing")
    monkeypatch.setattr(rank_table_flags, "WAIT_S", 0.0)
    refused(path, "the table is not ready")


@pytest.mark.processes
def test_workers_of_one_host_read_the_old_variables(tmp_path: Path, holdfast: Run) -> None:
    value = json.loads(make(["10.0.0.1"], [2]))
    for device in value["server_list"][0]["device"]:
        device["device_id"] = str(int(device["device_id"]) + 4)
    (tmp_path / "table.json").write_text(json.dumps(value))
    (tmp_path / "train.py").write_text(SCRIPT)
    done = holdfast("run", "train.py", "2", env={"RANK_TABLE_FILE": "table.json", **without_torch(tmp_path)})
    assert done.returncode == 0, done.stderr
    path = tmp_path / "table.json"
    assert [(tmp_path / f"seen-{r}").read_text() for r in (0, 1)] == [
        f"{r} 2 {r + 4} {path} {r} 2 0" for r in (0, 1)
    ]


@pytest.mark.processes
def test_one_command_per_host_needs_only_the_table(tmp_path: Path) -> None:
    """Two agents run on one machine, at two loopback addresses. The hosts' numbers come from the addresses."""
    table = write_table(tmp_path / "table.json", ["127.0.0.1", "127.0.0.2"], 1)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "token").touch(0o600)
    (tmp_path / "token").write_text(secrets.token_hex(32))
    env = clean_environment(without_torch(tmp_path))
    port = str(free_port())
    commands = [
        subprocess.Popen(
            [HOLDFAST, "run", "--rank-table", str(table), "--bind", address, "--token-file", "token", "--master-port",
             port, "--run-dir", f"at-{address}", "train.py", "3"],
            cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for address in ("127.0.0.1", "127.0.0.2")
    ]  # fmt: skip
    outputs = [command.communicate(timeout=60)[0] for command in commands]
    assert [command.returncode for command in commands] == [0, 0], outputs
    assert [(tmp_path / f"seen-{r}").read_text() for r in (0, 1)] == [
        f"{r} 2 0 {table} {r} 2 {r}" for r in (0, 1)
    ]
