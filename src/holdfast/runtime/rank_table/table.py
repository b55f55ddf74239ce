"""Rank tables, read, checked and written: the JSON file of Ascend's tools with the host and device of each rank.

There are two forms. *Servers* (versions 1.0 and 1.2) lists hosts with their devices, and every number is a string.
Version 1.2 adds super pods, which are groups of hosts. *Ranks* (version 2.0) lists ranks with their devices and network
layers, without hosts, and its numbers are JSON numbers. The check collects every mistake before it reports any, because
the user finds each further mistake only by another start of the job.

Invariants of a table that :func:`read` returns:
1. The ranks are 0 to n-1, each once. No device occurs twice on a host.
2. The ranks of a host are consecutive. ``servers`` are in rank order, which in 1.0 is the string order of their names.
3. The table is complete: ``status`` is ``completed`` and all counts are right.
"""

from __future__ import annotations

import ipaddress
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.errors import UnsupportedError, UsageError
from holdfast.store.backends.user_files import read_given
from holdfast.text import plural

FILE_SIZE_MAX_BYTES = 16 << 20
RANKS_MAX = 65536
NAME_CHARACTERS_MAX = 64
MISTAKES_MAX = 1000
MISTAKES_TOLD_MAX = 50
SERVER_VERSIONS = ("1.0", "1.2")
RANK_VERSIONS = ("2.0",)
COMPLETED = "completed"


class Device(NamedTuple):
    """One device, which runs one rank."""

    rank: int
    device_id: int
    address: str  # address of its network card; empty: none given


class TableServer(NamedTuple):
    """One host of a rank table.

    ``address``: its network address; empty if the table has none. ``devices``: its devices in rank order.
    """

    name: str
    address: str
    devices: tuple[Device, ...]


class RankTable(NamedTuple):
    """A rank table without mistakes. ``servers``: the hosts in rank order; in version 2.0 one host without a name."""

    version: str
    servers: tuple[TableServer, ...]

    @property
    def world_size(self) -> int:
        """The number of ranks of the job."""
        return sum(len(server.devices) for server in self.servers)


class Mistake(NamedTuple):
    """A mistake in a rank table. ``where``: a path in the JSON file, such as ``server_list[1].device[0].rank_id``."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" if self.where else self.what


class Check(NamedTuple):
    """The result of a check of a rank table.

    ``table``: None if there are mistakes; ``status``: as written in the file.
    """

    table: RankTable | None
    mistakes: tuple[Mistake, ...]
    status: str


def read(path: Path) -> Check:
    """Read the rank table in file ``path``, and return the result of its check.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        return check(read_given(path, FILE_SIZE_MAX_BYTES))
    except OSError as error:
        raise UsageError(f"cannot read the rank table {path}: {error.strerror}",
                         hint="write one: holdfast ranktable make --help") from error  # fmt: skip


def refusal(path: Path, mistakes: Sequence[Mistake]) -> UsageError:
    """Return one error that lists the mistakes in the rank table ``path``."""
    count = plural(len(mistakes), "mistake")
    lines = [f"  {mistake}" for mistake in mistakes[:MISTAKES_TOLD_MAX]]
    if len(mistakes) > MISTAKES_TOLD_MAX:
        lines.append(f"  and {len(mistakes) - MISTAKES_TOLD_MAX} more")
    return UsageError("\n".join([f"the rank table {path} has {count}:", *lines]),
                      hint=f"correct them, then: holdfast ranktable check {path}")  # fmt: skip


def check(data: bytes) -> Check:
    """Return the result of the check of a rank table.

    This never raises. After ``MISTAKES_MAX`` mistakes the check stops.
    """
    found = _Mistakes()
    try:
        return _check(data, found)
    except _TooMany:
        return Check(None, (*found, Mistake("", "and more: no further mistakes were looked for")), "")


def _check(data: bytes, found: _Mistakes) -> Check:
    value = _decode(data, found)
    if value is None:
        return Check(None, tuple(found), "")
    status = value.get("status")
    if "status" not in value:
        found.add("status", "is missing")
    elif status != COMPLETED:
        found.add("status", f"is {_shown(status)}, not {COMPLETED!r}: the table is not ready")
    if "rank_list" in value:
        version, servers = _by_ranks(value, found)
    else:
        version, servers = _by_servers(value, found)
    table = None if found else RankTable(version, servers)
    return Check(table, tuple(found), status if isinstance(status, str) else "")


# ---------------------------------------------------------------- reading


class _TooMany(Exception):
    """The end of a check after too many mistakes, because a list of millions of mistakes would take gigabytes."""


class _Mistakes(list[Mistake]):
    def add(self, where: str, what: str) -> None:
        self.append(Mistake(where, what))
        if len(self) == MISTAKES_MAX:
            raise _TooMany


def _decode(data: bytes, found: _Mistakes) -> dict[str, Any] | None:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(items)
        if len(made) < len(items):
            times = Counter(key for key, _ in items)
            for key in (key for key, count in times.items() if count > 1):
                found.add("", f"the key {_shown(key)} is there {times[key]} times in one object")
        return made

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=pairs)
    except UnicodeDecodeError as error:
        found.add("", f"is no text in UTF-8 (byte {error.start})")
        return None
    except (ValueError, RecursionError) as error:
        found.add("", f"is no JSON: {error}")
        return None
    if not isinstance(value, dict):
        found.add("", f"is {_kind(value)}, not an object")
        return None
    if "group_list" in value and "server_list" not in value:
        found.add(
            "group_list", "is the form of before 1.0, which is not read; write server_list (version 1.0)"
        )
        return None
    return value


def _by_servers(value: Mapping[str, Any], found: _Mistakes) -> tuple[str, tuple[TableServer, ...]]:
    version = _version(value, SERVER_VERSIONS, found)
    items = _list(value, "server_list", "", found)
    said = _number(value, "server_count", "", found)
    if said is not None and items is not None and said != len(items):
        found.add("server_count", f"says {said}, server_list has {len(items)}")
    servers: list[tuple[str, TableServer]] = []
    devices: list[tuple[str, Device]] = []
    for i, item in enumerate(items or ()):
        where = f"server_list[{i}]"
        server = _server(item, where, devices, found)
        if server is not None:
            servers.append((where, server))
    _once(((f"{where}.server_id", server.name) for where, server in servers if server.name), found)
    _once(((f"{w}.host_ip", s.address) for w, s in servers if s.address not in ("", s.name)), found)
    _once(((f"{where}.device_ip", device.address) for where, device in devices if device.address), found)
    _ranks([(f"{where}.rank_id", device.rank) for where, device in devices], found)
    _blocks(version, servers, found)
    if "super_pod_list" in value:
        _pods(value, [server.name for _, server in servers], found)
    ordered = sorted((server for _, server in servers), key=lambda s: [d.rank for d in s.devices][:1])
    return version, tuple(s._replace(devices=tuple(sorted(s.devices))) for s in ordered)


def _server(item: Any, where: str, devices: list[tuple[str, Device]], found: _Mistakes) -> TableServer | None:
    if not isinstance(item, dict):
        found.add(where, f"is {_kind(item)}, not an object")
        return None
    name = _text(item, "server_id", where, found) or ""
    if "*" in name:
        found.add(f"{where}.server_id", f"{_shown(name)} is masked: write the address of the host")
    elif not name.isprintable():  # it may drive a terminal, or is no text: a surrogate cannot be encoded
        found.add(f"{where}.server_id", f"{_shown(name)} has characters that cannot be printed")
    elif len(name) > NAME_CHARACTERS_MAX:
        found.add(
            f"{where}.server_id", f"has {len(name)} characters, at most {NAME_CHARACTERS_MAX} are allowed"
        )
    address = ""
    for key in ("host_ip", "server_ip"):
        if key in item and not address:
            address = _address(item, key, where, found)
    if "host_nic_ip" in item and item["host_nic_ip"] != "reserve":
        _address(item, "host_nic_ip", where, found, "neither 'reserve' nor an address")
    own = []
    for k, each in enumerate(_list(item, "device", where, found) or ()):
        device = _device(each, f"{where}.device[{k}]", found)
        if device is not None:
            own.append((f"{where}.device[{k}]", device))
    devices += own
    _once(((f"{place}.device_id", device.device_id) for place, device in own), found)
    return TableServer(
        name, address or (name if _is_address(name) else ""), tuple(device for _, device in own)
    )


def _device(item: Any, where: str, found: _Mistakes) -> Device | None:
    if not isinstance(item, dict):
        found.add(where, f"is {_kind(item)}, not an object")
        return None
    device_id = _number(item, "device_id", where, found)
    rank = _number(item, "rank_id", where, found)
    address = _address(item, "device_ip", where, found) if item.get("device_ip") else ""
    if item.get("backup_device_ip"):
        _address(item, "backup_device_ip", where, found)
    for key in ("device_port", "backup_device_port", "host_port"):
        port = _number(item, key, where, found) if key in item else 1
        if port is not None and not 0 < port < 65536:
            found.add(f"{where}.{key}", f"{port} is no port number")
    if "super_device_id" in item:
        _number(item, "super_device_id", where, found)
    return None if device_id is None or rank is None else Device(rank, device_id, address)


def _by_ranks(value: Mapping[str, Any], found: _Mistakes) -> tuple[str, tuple[TableServer, ...]]:
    version = _version(value, RANK_VERSIONS, found)
    items = _list(value, "rank_list", "", found)
    said = _number(value, "rank_count", "", found, as_text=False)
    if said is not None and items is not None and said != len(items):
        found.add("rank_count", f"says {said}, rank_list has {len(items)}")
    ranks: list[tuple[str, int]] = []
    devices = []
    for i, item in enumerate(items or ()):
        where = f"rank_list[{i}]"
        if not isinstance(item, dict):
            found.add(where, f"is {_kind(item)}, not an object")
            continue
        rank = _number(item, "rank_id", where, found, as_text=False)
        device_id = _number(item, "device_id", where, found, as_text=False)
        _number(item, "local_id", where, found, as_text=False)
        for k, level in enumerate(_list(item, "level_list", where, found) or ()):
            _level(level, f"{where}.level_list[{k}]", found)
        if rank is not None:
            ranks.append((f"{where}.rank_id", rank))
            devices.append(Device(rank, device_id or 0, ""))
    _ranks(ranks, found)
    return version, (TableServer("", "", tuple(sorted(devices))),)


def _level(item: Any, where: str, found: _Mistakes) -> None:
    if not isinstance(item, dict):
        found.add(where, f"is {_kind(item)}, not an object")
        return
    _number(item, "net_layer", where, found, as_text=False)
    _text(item, "net_instance_id", where, found)
    for k, each in enumerate(_list(item, "rank_addr_list", where, found) or ()):
        if isinstance(each, dict):
            _text(each, "addr", f"{where}.rank_addr_list[{k}]", found)
        else:
            found.add(f"{where}.rank_addr_list[{k}]", f"is {_kind(each)}, not an object")


# ---------------------------------------------------------------- rules over the whole table


def _ranks(ranks: Sequence[tuple[str, int]], found: _Mistakes) -> None:
    """Check that the ranks are 0 to n-1, each once."""
    if len(ranks) > RANKS_MAX:
        found.add("", f"the table has {len(ranks)} ranks, at most {RANKS_MAX} are read")
        return
    _once(ranks, found)
    have = {rank for _, rank in ranks}
    for where, rank in ranks:
        if rank >= len(ranks):
            found.add(where, f"{rank} with {plural(len(ranks), 'rank')}: they are 0 to {len(ranks) - 1}")
    gaps = [str(rank) for rank in range(len(ranks)) if rank not in have]
    if gaps:
        more = f" and {len(gaps) - 20} more" if len(gaps) > 20 else ""
        found.add("rank_id", f"no device has rank {', '.join(gaps[:20])}{more}")


def _blocks(version: str, servers: Sequence[tuple[str, TableServer]], found: _Mistakes) -> None:
    """Check that each host's ranks are consecutive and, in version 1.0, that hosts are in the order of their names."""
    order = sorted((device.rank, where) for where, server in servers for device in server.devices)
    blocks = Counter(where for i, (_, where) in enumerate(order) if i == 0 or order[i - 1][1] != where)
    for where, _ in servers:
        if blocks[where] > 1:
            found.add(f"{where}.device", "its ranks are mixed with those of other hosts")
    by_rank = sorted((s for _, s in servers if s.devices), key=lambda s: min(d.rank for d in s.devices))
    names = [server.name for server in by_rank]
    if version == "1.0" and names != sorted(names) and len(set(names)) == len(names):
        found.add(
            "server_list",
            f"ranks follow the hosts {', '.join(names[:10])}, and must follow the order of their server_id, "
            f"letter by letter: {', '.join(sorted(names)[:10])}",
        )


def _pods(value: Mapping[str, Any], names: Sequence[str], found: _Mistakes) -> None:
    """Check that every host is in exactly one super pod, and that the hosts of a pod are neighbours in the table."""
    known = frozenset(names)
    pod_of: dict[str, str] = {}
    pods: list[tuple[str, str]] = []
    for i, item in enumerate(_list(value, "super_pod_list", "", found) or ()):
        where = f"super_pod_list[{i}]"
        if not isinstance(item, dict):
            found.add(where, f"is {_kind(item)}, not an object")
            continue
        pod = _text(item, "super_pod_id", where, found) or where
        pods.append((f"{where}.super_pod_id", pod))
        for k, each in enumerate(_list(item, "server_list", where, found) or ()):
            here = f"{where}.server_list[{k}]"
            name = _text(each, "server_id", here, found) if isinstance(each, dict) else None
            if name is None:
                continue
            if name not in known:
                found.add(f"{here}.server_id", f"{_shown(name)} is not in server_list")
            elif name in pod_of:
                found.add(
                    f"{here}.server_id", f"{_shown(name)} is in super pod {_shown(pod_of[name])} already"
                )
            pod_of.setdefault(name, pod)
    _once(pods, found)
    for name in names:
        if name not in pod_of:
            found.add("super_pod_list", f"the host {_shown(name)} is in no super pod")
    order = [pod_of[name] for name in names if name in pod_of]
    runs = [pod for i, pod in enumerate(order) if i == 0 or order[i - 1] != pod]
    if len(runs) != len(set(runs)):
        found.add("server_list", "hosts of one super pod must stand together")


def _once(items: Iterable[tuple[str, Any]], found: _Mistakes) -> None:
    """Check that each value occurs once. The mistake about a repeated value names where the value occurs first."""
    first: dict[Any, str] = {}
    for where, value in items:
        if value in first:
            found.add(where, f"{_shown(value)} is there already, at {first[value]}")
        first.setdefault(value, where)


# ---------------------------------------------------------------- single values


def _version(value: Mapping[str, Any], known: tuple[str, ...], found: _Mistakes) -> str:
    version = _text(value, "version", "", found)
    if version is not None and version not in known:
        found.add("version", f"{_shown(version)} is not known for this form; it is {' or '.join(known)}")
    return version or known[0]


def _at(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _list(item: Mapping[str, Any], key: str, where: str, found: _Mistakes) -> list[Any] | None:
    value = item.get(key)
    if isinstance(value, list) and len(value) > RANKS_MAX:
        found.add(_at(where, key), f"has {len(value)} entries, at most {RANKS_MAX} are read")
        return None
    if isinstance(value, list) and value:
        return value
    wrong = "is missing" if key not in item else f"is {_kind(value)}, not a list"
    found.add(_at(where, key), "is empty" if value == [] else wrong)
    return None


def _text(item: Mapping[str, Any], key: str, where: str, found: _Mistakes) -> str | None:
    value = item.get(key)
    if isinstance(value, str) and value.strip():
        return value
    wrong = "is missing" if key not in item else f"is {_kind(value)}, not a string"
    found.add(_at(where, key), "is empty" if isinstance(value, str) else wrong)
    return None


def _number(
    item: Mapping[str, Any], key: str, where: str, found: _Mistakes, *, as_text: bool = True
) -> int | None:
    """Return the whole number (0 or more) under ``key``.

    The result is None if the value is wrong; the mistake is then added to ``found``. The value must be a string of
    digits in versions 1.x (``as_text``), and a JSON number in version 2.0.
    """
    value = item.get(key)
    if as_text and isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 16:
        return int(value)
    if not as_text and isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**16:
        return value
    if key not in item:
        found.add(_at(where, key), "is missing")
    elif as_text and isinstance(value, int):
        found.add(_at(where, key), f"is {_shown(value)}, which must be a string here: {_shown(str(value))}")
    else:
        wanted = "a string of digits" if as_text else "a whole number from 0"
        found.add(_at(where, key), f"is {_shown(value)}, not {wanted}")
    return None


def _address(
    item: Mapping[str, Any], key: str, where: str, found: _Mistakes, otherwise: str = "no address"
) -> str:
    value = item[key]
    if isinstance(value, str) and _is_address(value):
        return value
    masked = " (masked: write the address)" if isinstance(value, str) and "*" in value else ""
    found.add(_at(where, key), f"{_shown(value)} is {otherwise}{masked}")
    return ""


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text  # a scope id means nothing on another host


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false", int: "a number"}
    return "null" if value is None else kinds.get(type(value), "a number")


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return _kind(value)
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# ---------------------------------------------------------------- writing


def make(
    hosts: Sequence[str],
    counts: Sequence[int],
    version: str = "1.0",
    device_addresses: Mapping[str, Mapping[int, str]] | None = None,
) -> bytes:
    """Return a rank table of the given hosts, in the order that version 1.0 requires. It is always valid.

    Args:
        hosts: one address of each host.
        counts: number of devices of each host, or one number for all. Devices are numbered from 0.
        version: ``1.0`` or ``1.2`` (one super pod).
        device_addresses: addresses of devices by host and device, if known.

    Raises:
        UsageError: a host is not an address or is listed twice, or ``counts`` has another length than ``hosts``.
        UnsupportedError: the version is not supported.
    """
    if len(counts) not in (1, len(hosts)):
        raise UsageError(
            f"{plural(len(counts), 'number')} of devices for {plural(len(hosts), 'host')}",
            hint="--hosts 10.0.0.1,10.0.0.2 --nproc-per-node 8,4, or one number for all",
        )
    if version not in SERVER_VERSIONS:
        raise UnsupportedError(
            f"a rank table of version {version} is not written", hint="--version 1.0 or 1.2"
        )
    known = device_addresses or {}
    servers: list[dict[str, Any]] = []
    by_host = dict(zip(hosts, counts if len(counts) > 1 else [*counts] * len(hosts), strict=True))
    first = 0
    for host in sorted(hosts):
        addresses = known.get(host, {})
        devices = [
            {
                "device_id": str(k),
                **({"device_ip": addresses[k]} if k in addresses else {}),
                **({"super_device_id": str(first + k)} if version == "1.2" else {}),
                "rank_id": str(first + k),
            }
            for k in range(by_host[host])
        ]
        first += by_host[host]
        servers.append({"server_id": host, "host_ip": host, "device": devices, "host_nic_ip": "reserve"})
    value: dict[str, Any] = {"version": version, "server_count": str(len(servers)), "server_list": servers}
    if version == "1.2":
        names = [{"server_id": server["server_id"]} for server in servers]
        value["super_pod_list"] = [{"super_pod_id": "0", "server_list": names}]
    data = (json.dumps({**value, "status": COMPLETED}, indent=1) + "\n").encode()
    mistakes = list(check(data).mistakes)
    mistakes += [Mistake("", f"{host!r} is no address") for host in hosts if not _is_address(host)]
    if mistakes:
        raise UsageError("\n  ".join(["no table can be made of these hosts:", *map(str, dict.fromkeys(mistakes))]),
                         hint="--hosts 10.0.0.1,10.0.0.2 --nproc-per-node 8")  # fmt: skip
    return data


def device_addresses(text: str) -> dict[int, str]:
    """Return the addresses by device number, from the lines ``address_K=ADDRESS`` of an ``/etc/hccn.conf`` file."""
    found: dict[int, str] = {}
    for line in text.splitlines():
        key, equals, value = line.strip().partition("=")
        number = key.strip().removeprefix("address_")
        known = number.isascii() and number.isdigit() and len(number) < 16
        if equals and key.startswith("address_") and known and _is_address(value.strip()):
            found[int(number)] = value.strip()
    return found
