"""The flags that a rank table (``--rank-table``) sets: hosts, workers per host, number and address of this host."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.cli.screen.error_output import say
from holdfast.errors import UsageError
from holdfast.runtime.net.addresses import family_of, read_host, same_address
from holdfast.runtime.rank_table.table import COMPLETED, RankTable, TableServer, read, refusal
from holdfast.text import plural

WAIT_S = 120.0  # largest difference between the start times of the hosts
LOOK_S = 0.5
VARIABLE = "RANK_TABLE_FILE"
NOT_READY = ("initializing",)
FORMS = "--rank-table FILE alone says all of this"


class RankTableFlags(NamedTuple):
    """The flag values after the rank table was read.

    Attributes:
        values: the value of each flag, by key.
        given: keys of the flags that the user or the table has set.
        path: absolute path of the table; empty if there is none.
        device_ids: ids of the devices of this host's workers.
        notes: messages for the user.
    """

    values: Mapping[str, Any]
    given: frozenset[str]
    path: str = ""
    device_ids: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def place(values: Mapping[str, Any], given: frozenset[str]) -> RankTableFlags:
    """Return the flag values with those of the rank table added. Without a table they are unchanged.

    Raises:
        UsageError: the table has mistakes, a flag contradicts it, or it does not contain this host.
    """
    if not values["rank_table"]:
        return RankTableFlags(values, given)
    if values["rank_table"] == os.environ.get(VARIABLE) and given & {"nproc_per_node", "nnodes"}:
        return RankTableFlags(
            values, given, notes=(f"{VARIABLE} is not followed: --nproc-per-node or --nnodes is given",)
        )
    path = Path(values["rank_table"]).absolute()
    table = load(path)
    counts = [len(server.devices) for server in table.servers]
    workers = ",".join(map(str, counts if len(set(counts)) > 1 else counts[:1]))
    _agree(values, given, "nproc_per_node", workers, path)
    told: dict[str, Any] = {"nproc_per_node": workers}
    if len(table.servers) == 1 and "nnodes" not in given:
        return RankTableFlags({**values, **told}, given, str(path), _ids(table.servers[0]))
    if not table.servers[0].name:
        raise UsageError(f"the rank table {path} names no hosts (version {table.version}), and --nnodes is given",
                         hint="leave --nnodes out: one host runs all its ranks")  # fmt: skip
    most = _nnodes(values, given, len(table.servers), path)
    number = _number(values, given, table, path, most)
    spare = number >= len(table.servers)
    told |= {"nnodes": values["nnodes"] if "nnodes" in given else str(most), "node_rank": number}
    if not given & {"master_addr", "rdzv_endpoint"}:
        told["master_addr"] = _address(table.servers[0], path)
    if "bind" not in given and not spare:
        told["bind"] = _address(table.servers[number], path)
    ids = tuple(range(max(counts))) if spare else _ids(table.servers[number])
    return RankTableFlags({**values, **told}, given | {"node_rank"}, str(path), ids)


def load(path: Path) -> RankTable:
    """Read a rank table. If the table is still being written, wait for its completion.

    Raises:
        UsageError: the table has mistakes, or is not complete after ``WAIT_S``.
    """
    deadline_s, waiting = time.monotonic() + WAIT_S, False
    while True:
        found = read(path)
        if found.table is not None:
            return found.table
        if found.status not in NOT_READY or time.monotonic() > deadline_s:
            raise refusal(path, found.mistakes)
        if not waiting:
            waiting = True
            say(
                f"note: the rank table {path} says {found.status}: waiting for {COMPLETED}, at most {WAIT_S:g} s"
            )
        time.sleep(LOOK_S)


def _ids(server: TableServer) -> tuple[int, ...]:
    return tuple(device.device_id for device in server.devices)


def _agree(values: Mapping[str, Any], given: frozenset[str], key: str, told: str, path: Path) -> None:
    if key in given and str(values[key]) != told:
        name = f"--{key.replace('_', '-')}"
        raise UsageError(f"{name} {values[key]}, but the rank table {path} says {told}",
                         hint=f"leave {name} out: {FORMS}")  # fmt: skip


def _nnodes(values: Mapping[str, Any], given: frozenset[str], hosts: int, path: Path) -> int:
    """Return the largest number of nodes of the job. Hosts that are not in the table are spares."""
    text = str(values["nnodes"])
    if "nnodes" not in given:
        return hosts
    least, _, most = text.partition(":")
    if least != str(hosts) or not (most or least).isdecimal():
        raise UsageError(f"--nnodes {text}, but the rank table {path} has {plural(hosts, 'host')}",
                         hint=f"leave --nnodes out, or --nnodes {hosts}:MAX for spare hosts beside them")  # fmt: skip
    return int(most or least)


def _number(values: Mapping[str, Any], given: frozenset[str], table: RankTable, path: Path, most: int) -> int:
    """Return the number of this host, from 0: the value of ``--node-rank``, or its position in the rank table.

    An entry of the table is this host if its address is that of ``--bind``, or without this flag any local address.

    Raises:
        UsageError: no entry or several entries of the table are this host.
    """
    if "node_rank" in given:
        return int(values["node_rank"])
    if "bind" in given:
        bind = same_address(read_host(str(values["bind"]), "--bind"))
        local = [i for i, server in enumerate(table.servers) if same_address(server.address) == bind]
    else:
        local = [i for i, server in enumerate(table.servers) if _is_here(server.address)]
    if len(local) == 1:
        return local[0]
    listed = ", ".join(server.address or server.name for server in table.servers[:10])
    if local:
        raise UsageError(f"several hosts of the rank table {path} are this machine: {listed}",
                         hint="--node-rank N, from 0, or --bind ADDRESS")  # fmt: skip
    spare = f"; a spare host: --node-rank {len(table.servers)} or more" if most > len(table.servers) else ""
    raise UsageError(f"no host of the rank table {path} is this machine: {listed}",
                     hint=f"write its host_ip, or --node-rank N, from 0{spare}")  # fmt: skip


def _is_here(address: str) -> bool:
    if not address:
        return False
    try:
        with socket.socket(family_of(address)) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _address(server: TableServer, path: Path) -> str:
    if server.address:
        return server.address
    try:
        found = socket.getaddrinfo(server.name, None, type=socket.SOCK_STREAM)
        return str(sorted(found)[0][4][0])  # an address of IPv4 sorts before one of IPv6
    except OSError as error:
        raise UsageError(f"the rank table {path} gives no address of the host {server.name}, nor do the names",
                         hint="write its host_ip, or --node-rank, --master-addr and --bind") from error  # fmt: skip
