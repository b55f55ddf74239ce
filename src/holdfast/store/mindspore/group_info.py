"""MindSpore's ``group_info.pb``: which ranks hold the same slices, read and written without a protobuf library.

Theory. The file is one message with two fields. Field 1, repeated, is ``parallel_group_item``, with ``group_name`` (1,
text) and ``parallel_group_ranks`` (2). Field 2 is ``ckpt_restore_rank_list``. A list of ranks is a message with the
repeated field ``dim`` (1, varint). Numbers are written unpacked, as MindSpore does.

Invariants:
1. ``decode_group_info(encode_group_info(x)) == x``.
2. Damaged bytes raise :class:`CheckpointInvalid`. At most ``RANKS_TOLD_MAX`` ranks are read from a file, because a
   varint of one byte becomes a Python object of about thirty bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from holdfast.errors import CheckpointInvalid, UsageError
from holdfast.store.backends.user_files import read_given
from holdfast.store.mindspore.protobuf import counted, fields, message, repeated, tagged, text

FILE_SIZE_BYTES_MAX = 8 * 1024 * 1024
RANK_MAX = 2**31 - 1
RANKS_TOLD_MAX = 2**20
"""Largest number of ranks in one file, over all its groups. A rank of a job of 100 000 ranks writes fewer."""


class GroupInfo(msgspec.Struct, frozen=True):
    """The content of a ``group_info.pb`` file.

    ``groups``: ranks of each communication group, by name. ``ranks``: the ranks that hold the same slices.
    """

    groups: dict[str, tuple[int, ...]]
    ranks: tuple[int, ...]


def read_group_info(path: Path) -> GroupInfo:
    """Read a ``group_info.pb`` file, and return its content.

    Raises:
        UsageError: the file cannot be read.
        CheckpointInvalid: the file is damaged.
    """
    try:
        data = read_given(path, FILE_SIZE_BYTES_MAX)
    except OSError as error:
        raise UsageError(
            f"cannot read the group info {path}: {error.strerror}",
            hint="name the file that MindSpore wrote (the value of GROUP_INFO_FILE)",
        ) from error
    return decode_group_info(data, str(path))


def decode_group_info(data: bytes, where: str) -> GroupInfo:
    """Return the content of the bytes of a ``group_info.pb`` file; ``where`` is its path, for errors.

    Raises:
        CheckpointInvalid: the error names ``where`` and the broken rule.
    """
    groups: dict[str, tuple[int, ...]] = {}
    ranks: list[int] | None = None
    told = 0
    try:
        for number, value in fields(data):
            if number == 1:
                name, members = _group(message(value))
                if name in groups:
                    raise ValueError(f"two groups are called {name!r}")
                groups[name] = members
                told += 1 + len(members)
            elif number == 2:
                ranks = [] if ranks is None else ranks
                _add_ranks(message(value), ranks)
            _bounded(told)
    except ValueError as error:
        raise CheckpointInvalid(f"{where}: not a group_info file: {error}") from error
    if ranks is None:
        raise CheckpointInvalid(f"{where}: not a group_info file: it has no ckpt_restore_rank_list")
    return GroupInfo(groups, tuple(ranks))


def encode_group_info(info: GroupInfo) -> bytes:
    """Return the bytes that MindSpore writes into a ``group_info.pb`` file for this content."""
    items = [
        tagged(1, tagged(1, name.encode()) + tagged(2, _dims(members)))
        for name, members in info.groups.items()
    ]
    return b"".join(items) + tagged(2, _dims(info.ranks))


def _group(data: memoryview) -> tuple[str, tuple[int, ...]]:
    name = ""
    members: list[int] = []
    for number, value in fields(data):
        if number == 1:
            name = text(value)
        elif number == 2:
            _add_ranks(message(value), members)
    return name, tuple(members)


def _add_ranks(data: memoryview, found: list[int]) -> None:
    for number, value in fields(data):
        if number == 1:
            for rank in repeated(value):
                if rank > RANK_MAX:
                    raise ValueError("a rank beyond 31 bits")
                found.append(rank)
                _bounded(len(found))


def _bounded(told: int) -> None:
    if told > RANKS_TOLD_MAX:
        raise ValueError(f"it names more than {RANKS_TOLD_MAX} ranks")


def _dims(ranks: Sequence[int]) -> bytes:
    return b"".join(counted(1, rank) for rank in ranks)
