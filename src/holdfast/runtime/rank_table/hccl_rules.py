"""The rules of HCCL, the collective library of Ascend devices, for a rank table that is valid in form.

A host has eight devices: 0 to 3 are on one network, 4 to 7 on another. A job on one host uses 1, 2, 4 or 8 devices, and
2 or 4 devices must be on one network. A job on several hosts uses all eight devices of each host.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.runtime.rank_table.table import Mistake, RankTable, TableServer
from holdfast.text import plural

DEVICES = 8
NETWORKS = (frozenset(range(4)), frozenset(range(4, DEVICES)))
SIZES = (1, 2, 4, DEVICES)
ONE_SWITCH = "all hosts must be on one switch: no rank table shows that"


def hccl_mistakes(table: RankTable) -> tuple[Mistake, ...]:
    """Return the mistakes because of which HCCL would refuse an otherwise valid rank table."""
    return tuple(mistake for server in table.servers for mistake in _of_host(server, len(table.servers)))


def hccl_notes(table: RankTable) -> tuple[str, ...]:
    """Return the requirements of HCCL that a rank table cannot show, as texts for the user."""
    return (ONE_SWITCH,) if len(table.servers) > 1 else ()


def _of_host(server: TableServer, hosts: int) -> Iterator[Mistake]:
    where = server.name or "the host"
    ids = sorted(device.device_id for device in server.devices)
    listed = f"{plural(len(ids), 'device')} ({', '.join(map(str, ids))})"
    if ids[-1] >= DEVICES:
        yield Mistake(where, f"device {ids[-1]}: a host has devices 0 to {DEVICES - 1}")
    elif hosts > 1 and len(ids) != DEVICES:
        yield Mistake(where, f"{listed}: of several hosts HCCL takes all {DEVICES} devices of each")
    elif len(ids) not in SIZES:
        yield Mistake(
            where, f"{listed}: on one host HCCL takes {', '.join(map(str, SIZES[:-1]))} or {DEVICES}"
        )
    elif len(ids) < DEVICES and not any(network.issuperset(ids) for network in NETWORKS):
        yield Mistake(
            where, f"{listed}: 0 to 3 and 4 to 7 are on two networks, and HCCL takes both with all 8 only"
        )
