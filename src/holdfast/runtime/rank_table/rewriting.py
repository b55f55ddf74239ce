"""The rank table of a generation in which a spare node has taken the ranks of a lost host.

The remaining hosts keep their entries, with their current ranks. A spare host gets an entry with its own address as
the name. Its devices are numbered from 0, and the addresses of these devices are not known. Version 1.0 requires hosts
in the order of their names. If the new name would give the entry another position, the entry keeps the name of the lost
host.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.core.protocol.messages import StartMembers
from holdfast.errors import UsageError
from holdfast.runtime.node.run_settings import RunSettings
from holdfast.runtime.node.rundir import RunDir, write_private
from holdfast.runtime.rank_table.table import FILE_SIZE_MAX_BYTES, SERVER_VERSIONS, check
from holdfast.store.backends.user_files import read_given


class NodeRanks(NamedTuple):
    """The ranks of one node.

    ``number``: number of the node. A number that is not in the table belongs to a spare node.
    """

    number: int
    address: str
    ranks: range


class RewrittenTable(NamedTuple):
    """The rank table for the workers.

    ``path``: its file. ``kept``: why the user's table is used although it does not match the nodes; empty if the table
    matches.
    """

    path: str
    kept: str = ""


def table_of(run: RunDir, settings: RunSettings, order: StartMembers) -> RewrittenTable:
    """Return the rank table for the workers that ``order`` starts. Its path is empty in a run without a table.

    If the user's table does not match the nodes that ``order`` names, a changed table is written to the run directory.
    """
    blocks, first = [], 0
    for place, (node_id, address) in enumerate(order.places):
        count = settings.counts[place % len(settings.counts)]
        blocks.append(NodeRanks(int(node_id.removeprefix("node")), address, range(first, first + count)))
        first += count
    if not settings.rank_table or [b.number for b in blocks] == list(range(settings.nnodes)) or not blocks:
        return RewrittenTable(settings.rank_table)
    path = run.path / f"rank-table-{order.generation}.json"
    try:
        write_private(path, rewrite(read_given(Path(settings.rank_table), FILE_SIZE_MAX_BYTES), blocks))
    except OSError as error:
        return RewrittenTable(settings.rank_table, f"{path}: {error.strerror}")
    except UsageError as error:
        return RewrittenTable(settings.rank_table, error.message)
    return RewrittenTable(str(path))


def rewrite(data: bytes, blocks: Sequence[NodeRanks]) -> bytes:
    """Return the rank table ``data``, changed so that it describes the nodes in ``blocks``.

    ``blocks`` has the ranks of each node, in rank order.

    Raises:
        UsageError: ``data`` is not a valid table, or has fewer hosts than ``blocks``, or the result would have
            mistakes.
    """
    table = check(data).table
    if table is None or table.version not in SERVER_VERSIONS or len(table.servers) < len(blocks):
        raise UsageError(
            f"the rank table is not the one of the start: it has no {len(blocks)} hosts without a mistake",
            hint="the table must stay as it was given as long as the run lasts",
        )
    value = json.loads(data)
    servers = sorted(
        value["server_list"], key=lambda server: min(int(d["rank_id"]) for d in server["device"])
    )
    mistakes: tuple[object, ...] = ()
    for renamed in (True, False):
        made = (json.dumps(_filled(value, servers, blocks, renamed=renamed), indent=1) + "\n").encode()
        mistakes = check(made).mistakes
        if not mistakes:
            return made
    raise UsageError(
        "\n  ".join(["no rank table can be made for the hosts that are left:", *map(str, mistakes)]),
        hint="start again with a table of these hosts: holdfast ranktable make",
    )


def _filled(
    value: Mapping[str, Any], servers: Sequence[dict[str, Any]], blocks: Sequence[NodeRanks], *, renamed: bool
) -> dict[str, Any]:
    entries, pods = [], _pods(value)
    own: dict[str, list[dict[str, str]]] = {}
    for place, block in enumerate(blocks):
        known = block.number < len(servers)
        entry = copy.deepcopy(servers[block.number if known else place])
        pod = pods.get(entry["server_id"], "")
        if not known:
            name = block.address if renamed else entry["server_id"]
            entry = {"server_id": name, "host_ip": block.address, "device": [], "host_nic_ip": "reserve"}
        devices = entry["device"] if known else [{"device_id": str(k)} for k in range(len(block.ranks))]
        entry["device"] = [
            {**device, "rank_id": str(rank)} for device, rank in zip(devices, block.ranks, strict=False)
        ]
        entries.append(entry)
        own.setdefault(pod, []).append({"server_id": entry["server_id"]})
    filled = {**value, "server_count": str(len(entries)), "server_list": entries}
    if pods:
        filled["super_pod_list"] = [{"super_pod_id": pod, "server_list": hosts} for pod, hosts in own.items()]
    return filled


def _pods(value: Mapping[str, Any]) -> dict[str, str]:
    """Return the super pod id of each host, by the name of the host."""
    pods = value.get("super_pod_list", [])
    return {host["server_id"]: pod["super_pod_id"] for pod in pods for host in pod["server_list"]}
