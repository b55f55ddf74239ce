"""MindSpore's ``group_info.pb``: which ranks hold the same slices, read and written without a protobuf library.

Theory. The message has two fields: ``parallel_group_item`` (1), each with ``group_name`` (1, text) and
``parallel_group_ranks`` (2), and ``ckpt_restore_rank_list`` (2). A list of ranks is a message with the repeated field
``dim`` (1, varint). Other fields are skipped, as protobuf does. Numbers may be packed or not; we write them as
MindSpore does, unpacked. A protobuf library would be a dependency for one message of three fields.

Invariants:
1. ``decode_group_info(encode_group_info(x)) == x``.
2. Damaged bytes raise :class:`CheckpointInvalid`. At most ``RANKS_TOLD_MAX`` ranks are taken from a file: a varint of
   one byte becomes an object of thirty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from holdfast.errors import CheckpointInvalid, UsageError
from holdfast.store.given import read_given

FILE_SIZE_BYTES_MAX = 8 * 1024 * 1024
RANK_MAX = 2**31 - 1
RANKS_TOLD_MAX = 2**20
"""Over all groups: those of one rank in a job of 100 000 ranks are fewer."""
_VARINT, _BYTES = 0, 2
_FIXED_SIZE_BYTES = {1: 8, 5: 4}


class GroupInfo(msgspec.Struct, frozen=True):
    """``groups``: ranks by name of the communication group; ``ranks``: those that hold the writer's slices."""

    groups: dict[str, tuple[int, ...]]
    ranks: tuple[int, ...]


def read_group_info(path: Path) -> GroupInfo:
    """The content of a file.

    Raises:
        UsageError: it cannot be read.
        CheckpointInvalid: damaged.
    """
    try:
        data = read_given(path, FILE_SIZE_BYTES_MAX)
    except OSError as error:
        raise UsageError(
            f"cannot read the group info {path}: {error.strerror}",
            hint="name the file that GROUP_INFO_FILE told MindSpore to write",
        ) from error
    return decode_group_info(data, str(path))


def decode_group_info(data: bytes, where: str) -> GroupInfo:
    """The message in ``data``.

    Raises:
        CheckpointInvalid: names ``where`` and the broken rule.
    """
    groups: dict[str, tuple[int, ...]] = {}
    ranks: list[int] | None = None
    told = 0
    try:
        for number, value in _fields(data):
            if number == 1:
                name, members = _group(_message(value))
                if name in groups:
                    raise ValueError(f"two groups are called {name!r}")
                groups[name] = members
                told += 1 + len(members)
            elif number == 2:
                ranks = [] if ranks is None else ranks
                _add_ranks(_message(value), ranks)
            _bounded(told)
    except ValueError as error:
        raise CheckpointInvalid(f"{where}: not a group_info file: {error}") from error
    if ranks is None:
        raise CheckpointInvalid(f"{where}: not a group_info file: it has no ckpt_restore_rank_list")
    return GroupInfo(groups, tuple(ranks))


def encode_group_info(info: GroupInfo) -> bytes:
    """The bytes that MindSpore writes for this content."""
    items = [
        _tagged(1, _tagged(1, name.encode()) + _tagged(2, _dims(members)))
        for name, members in info.groups.items()
    ]
    return b"".join(items) + _tagged(2, _dims(info.ranks))


def _group(data: bytes) -> tuple[str, tuple[int, ...]]:
    name = ""
    members: list[int] = []
    for number, value in _fields(data):
        if number == 1:
            name = _message(value).decode()
        elif number == 2:
            _add_ranks(_message(value), members)
    return name, tuple(members)


def _add_ranks(data: bytes, found: list[int]) -> None:
    for number, value in _fields(data):
        if number == 1:
            for rank in (value,) if isinstance(value, int) else _packed(value):
                if rank > RANK_MAX:
                    raise ValueError("a rank beyond 31 bits")
                found.append(rank)
                _bounded(len(found))


def _packed(data: bytes) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _varint(data, at)
        yield value


def _bounded(told: int) -> None:
    if told > RANKS_TOLD_MAX:
        raise ValueError(f"it names more than {RANKS_TOLD_MAX} ranks")


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field number and value of each field."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if number == 0:
            raise ValueError("a field without a number")
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        size = _FIXED_SIZE_BYTES.get(kind)
        if kind == _BYTES:
            size, at = _varint(data, at)
        if size is None:
            raise ValueError(f"a field of wire type {kind}")
        if at + size > len(data):
            raise ValueError(f"a field of {size} bytes where {len(data) - at} are left")
        yield number, data[at : at + size]
        at += size


def _message(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where a message belongs")
    return value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of at most 64 bits and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("it ends inside a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number of more than 64 bits")


def _number(value: int) -> bytes:
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*made, value))


def _tagged(number: int, data: bytes) -> bytes:
    return _number(number << 3 | _BYTES) + _number(len(data)) + data


def _dims(ranks: Sequence[int]) -> bytes:
    return b"".join(_number(1 << 3 | _VARINT) + _number(rank) for rank in ranks)
