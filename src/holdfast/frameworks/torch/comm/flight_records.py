"""Where the devices of this process are in their collectives, by torch's flight recorder.

A host queues collectives of NCCL and continues; where all hosts wait for their devices, only torch's record of the
devices differs between the ranks. It is read as JSON: a device that has not been given, or has not begun, what others
are in holds them up. That a collective has begun is recorded with ``TORCH_NCCL_ENABLE_TIMING=1`` alone.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from holdfast.core.protocol.health_messages import DeviceSeen, Records
from holdfast.frameworks.torch import private_api

ON_DEVICES = "nccl"
"""Beginning of the names of collectives that are queued on a device (``nccl:all_reduce``, ``nccl2:broadcast``)."""
ENDED = "completed"
BEGUN = ("started", ENDED)


class FlightEntry(msgspec.Struct):
    """One collective, as torch writes it; ``pg_id`` numbers the groups of the process, in the order of their making."""

    collective_seq_id: int = 0
    pg_id: int = 0
    process_group: tuple[str, ...] = ()
    profiling_name: str = ""
    state: str = ""
    is_p2p: bool = False
    input_sizes: list[list[int]] = []
    input_dtypes: list[str] = []


class Dump(msgspec.Struct):
    """What torch writes; other fields are not read."""

    entries: list[FlightEntry] = []


def records() -> Records:
    """What torch's recorders hold. From any thread; may wait for the device."""
    recorders: dict[str, msgspec.Raw] = {}
    devices: list[DeviceSeen] = []
    for name, data in private_api.recorded_collectives().items():
        try:
            entries = msgspec.json.decode(data, type=Dump).entries
        except msgspec.MsgspecError:  # of a torch that writes it in another way
            continue
        if entries:
            recorders[name] = msgspec.Raw(data)
            devices += summary(entries)
    return Records(tuple(devices), recorders)


def summary(entries: Iterable[FlightEntry]) -> list[DeviceSeen]:
    """Of each group of NCCL that is recorded, in its newest generation."""
    by_group: dict[str, dict[int, list[FlightEntry]]] = {}
    for entry in entries:
        if entry.profiling_name.startswith(ON_DEVICES) and entry.process_group and not entry.is_p2p:
            of_name = by_group.setdefault(entry.process_group[0], {})
            of_name.setdefault(entry.pg_id, []).append(entry)
    return [_seen(group, of_name[max(of_name)]) for group, of_name in by_group.items()]


def _seen(group: str, entries: list[FlightEntry]) -> DeviceSeen:
    given = max(entry.collective_seq_id for entry in entries)
    open_ = [entry for entry in entries if entry.state != ENDED]
    oldest = min(open_, key=lambda entry: entry.collective_seq_id, default=None)
    ended = given if oldest is None else oldest.collective_seq_id - 1
    begun = max((e.collective_seq_id for e in entries if e.state in BEGUN), default=ended)
    return DeviceSeen(group, given, max(begun, ended), ended, _what(oldest or entries[-1]))


def _what(entry: FlightEntry) -> str:
    sizes = ["x".join(map(str, size)) for size in entry.input_sizes]
    kinds = [f"{size} {dtype}" for size, dtype in zip(sizes, entry.input_dtypes, strict=False)]
    return f"{entry.profiling_name} of {', '.join(kinds)}" if kinds else entry.profiling_name
