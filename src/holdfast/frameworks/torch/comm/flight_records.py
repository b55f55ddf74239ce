"""The progress of this process's devices through their NCCL collectives, from torch's flight recorder.

A host queues collectives of NCCL and continues. If all hosts wait for their devices, only torch's record of the devices
differs between the ranks; it is read as JSON. The device of a rank holds up the others in two cases: the rank has not
queued the collective in which the others wait, or its device has not begun that collective. The start of a collective
is recorded only with ``TORCH_NCCL_ENABLE_TIMING=1``.
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
    """A collective as torch records it; ``pg_id`` numbers the groups of the process in their order of creation."""

    collective_seq_id: int = 0
    pg_id: int = 0
    process_group: tuple[str, ...] = ()
    profiling_name: str = ""
    state: str = ""
    is_p2p: bool = False
    input_sizes: list[list[int]] = []
    input_dtypes: list[str] = []


class Dump(msgspec.Struct):
    """The part of torch's flight record (JSON) that this module reads."""

    entries: list[FlightEntry] = []


def records() -> Records:
    """Return the content of torch's flight recorders. Callable from any thread; may wait for the device."""
    recorders: dict[str, msgspec.Raw] = {}
    devices: list[DeviceSeen] = []
    for name, data in private_api.recorded_collectives().items():
        try:
            entries = msgspec.json.decode(data, type=Dump).entries
        except msgspec.MsgspecError:  # a torch version with another format
            continue
        if entries:
            recorders[name] = msgspec.Raw(data)
            devices += summary(entries)
    return Records(tuple(devices), recorders)


def summary(entries: Iterable[FlightEntry]) -> list[DeviceSeen]:
    """Return the progress of the device in each NCCL group of ``entries``: last collective queued, begun and ended.

    Only the newest generation of each group counts.
    """
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
