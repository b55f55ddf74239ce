"""MindSpore's group_info.pb: a real file, round trips, damage, and agreement with Holdfast's own holders."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cli.main import answer
from holdfast.errors import CheckpointInvalid, UsageError
from holdfast.store.manage.checkpoint_tools import holdings
from holdfast.store.mindspore.group_info import (
    FILE_SIZE_BYTES_MAX,
    RANKS_TOLD_MAX,
    GroupInfo,
    decode_group_info,
    encode_group_info,
    read_group_info,
)
from tests.store.worlds import pipeline, save, save_id

REAL = Path(__file__).parent / "data" / "group_info.pb"  # written by MindSpore 2.10's own message class
RANKS = st.lists(st.integers(0, 2**31 - 1), max_size=9).map(tuple)


def test_a_file_of_mindspores_is_read_and_written_alike() -> None:
    info = read_group_info(REAL)
    assert info.ranks == (0, 4)
    assert info.groups == {
        "4-301914489238474646": (0, 4),
        "4-9223372036854775807": (0, 1, 2, 3),
        "hccl_world_group": tuple(range(8)),
    }
    assert encode_group_info(info) == REAL.read_bytes()


@given(st.dictionaries(st.text(max_size=20), RANKS, max_size=5), RANKS)
def test_what_is_written_is_read(groups: dict[str, tuple[int, ...]], ranks: tuple[int, ...]) -> None:
    info = GroupInfo(groups, ranks)
    assert decode_group_info(encode_group_info(info), "x") == info


def test_packed_numbers_and_unknown_fields() -> None:
    packed = b"\x12\x05\x0a\x03\x01\xac\x02"  # ckpt_restore_rank_list {dim: 1, 300}, packed
    assert decode_group_info(packed, "x").ranks == (1, 300)
    assert decode_group_info(packed + b"\x18\x07" + b"\x25abcd" + b"\x29abcdefgh", "x").ranks == (1, 300)


@given(st.binary(max_size=80))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        found = decode_group_info(data, "x")
    except CheckpointInvalid as error:
        assert "x: not a group_info file" in str(error)
    else:
        assert all(rank < 2**31 for rank in found.ranks)


def test_a_cut_file_never_gives_another_answer() -> None:
    data = REAL.read_bytes()
    for stop in range(len(data)):
        with pytest.raises(CheckpointInvalid):
            decode_group_info(data[:stop], "x")


def test_a_rank_list_in_many_pieces_takes_no_longer_than_in_one() -> None:
    """Regression: each piece made a new tuple of all pieces before it, so a file of a megabyte took minutes."""
    count = RANKS_TOLD_MAX
    assert decode_group_info(b"\x12\x02\x08\x01" * count, "x").ranks == (1,) * count


@pytest.mark.parametrize(
    "made",
    [
        lambda limit: b"\x12\x02\x08\x01" * (limit + 1),
        lambda limit: encode_group_info(GroupInfo({}, (1,) * (limit + 1))),
        lambda limit: encode_group_info(GroupInfo({str(k): (1,) * (limit // 4) for k in range(4)}, ())),
        lambda limit: encode_group_info(GroupInfo({"0": (1,) * (limit + 1)}, ())),
    ],
)
@pytest.mark.parametrize("limit", [4096, pytest.param(RANKS_TOLD_MAX, marks=pytest.mark.more)])
def test_more_ranks_than_any_job_has_are_refused(
    monkeypatch: pytest.MonkeyPatch, made: Callable[[int], bytes], limit: int
) -> None:
    """The real limit takes seconds of work."""
    monkeypatch.setattr("holdfast.store.mindspore.group_info.RANKS_TOLD_MAX", limit)
    data = made(limit)
    with pytest.raises(CheckpointInvalid, match=f"more than {limit} ranks"):
        decode_group_info(data, "x")


def test_only_a_file_of_a_sensible_size_is_read(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(REAL)
    assert read_group_info(tmp_path / "link").ranks == (0, 4)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(FILE_SIZE_BYTES_MAX + 1)
    os.mkfifo(tmp_path / "pipe")
    for name, reason in {"large": "at most", "pipe": "no regular file", ".": "a directory"}.items():
        with pytest.raises(UsageError, match=reason):
            read_group_info(tmp_path / name)


def test_the_command_gives_our_own_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, pipeline(), save_id())
    ours = next(h for h in holdings(tmp_path / save_id().directory()) if h.fqn == "stage1.weight")
    file = tmp_path / "group_info.pb"
    file.write_bytes(encode_group_info(GroupInfo({"2-1": ours.ranks}, ours.ranks)))
    assert answer(["ckpt", "holders", "--group-info", str(file)]) == 0
    theirs = capsys.readouterr().out.strip()
    assert answer(["ckpt", "holders", str(tmp_path), "stage1*"]) == 0
    assert capsys.readouterr().out.split()[-1] == theirs == "2-3"
    assert answer(["ckpt", "holders", "--group-info", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == [2, 3]
    for arguments in (
        [],
        ["--group-info", str(tmp_path / "none")],
        [str(tmp_path), "--group-info", str(file)],
    ):
        assert answer(["ckpt", "holders", *arguments]) == 2
    with pytest.raises(UsageError):
        read_group_info(tmp_path / "none")
