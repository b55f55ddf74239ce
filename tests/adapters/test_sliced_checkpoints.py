"""MindSpore's sliced checkpoints: merged for any grid, or refused by name with nothing written."""

from __future__ import annotations

import shutil
import tempfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdfast.cli.main import answer
from holdfast.errors import CheckpointInvalid, UsageError
from holdfast.frameworks.common.numpy_state import NumpyState, Shard
from holdfast.frameworks.mindspore.sliced_checkpoints import import_slices, read_slices, session_name
from holdfast.store.layouts.layout import Box
from holdfast.store.manage.checkpoint_root import Root
from holdfast.store.mindspore.slice_file import read_slice_file
from holdfast.store.mindspore.strategy import FILE_SIZE_BYTES_MAX, RANKS_MAX, decode_strategy, read_strategy
from holdfast.store.read.load import load_catalogue, load_into
from tests.store.sliced import Told, ckpt_bytes, strategy_bytes, strategy_json, write_slices

Array = NDArray[Any]
STEP = {"global_step": np.array([12], np.int32)}
GRID = {"w": Told([2, 2], [-1, 0]), "moments.w": Told([2, 2], [-1, 0])}
"""Two copies of two columns: ranks 0 and 2 hold the same, ranks 1 and 3 too."""


def numbers(*shape: int, start: int = 1) -> Array:
    """Return an array of distinct numbers."""
    return np.arange(start, start + prod(shape), dtype=np.float32).reshape(shape)


WHOLES = {"w": numbers(3, 4), "moments.w": numbers(3, 4, start=50), **STEP}


def merged(source: Path, strategy: Path) -> dict[str, Array]:
    """Return the merged tensors."""
    found = read_slices(source, strategy, lambda line: None)
    return {name: tensor.bits() for name, tensor in found.tensors.items()}


def same(found: dict[str, Array], wholes: dict[str, Array]) -> bool:
    """Return whether tensors are equal, bit for bit."""
    return found.keys() == wholes.keys() and all(
        np.array_equal(found[n], a.view(found[n].dtype)) for n, a in wholes.items()
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Write slices of four ranks in two files each, and their strategy file."""
    write_slices(tmp_path / "out", WHOLES, GRID, name="net-1_12.ckpt")
    write_slices(tmp_path / "out", {**WHOLES, "w": numbers(3, 4, start=900)}, GRID, name="net-1_9.ckpt")
    (tmp_path / "s.ckpt").write_bytes(strategy_bytes(GRID))
    return tmp_path / "out"


@st.composite
def grids(draw: st.DrawFn) -> tuple[dict[str, Told], dict[str, Array]]:
    """Draw parameters with any cut over one grid."""
    devices = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=1, max_size=3))
    told: dict[str, Told] = {}
    wholes: dict[str, Array] = {}
    for number in range(draw(st.integers(1, 3))):
        free = draw(st.permutations(range(len(devices))))
        dimensions = draw(st.integers(1, 3))
        axes: list[list[int]] = [[] for _ in range(dimensions)]
        # In protobuf, several axes of the one dimension of a vector have the same form as one axis of each of several
        # dimensions.
        for axis in free[: draw(st.integers(0, len(free) if dimensions > 1 else 1))]:
            axes[draw(st.integers(0, dimensions - 1))].append(axis)
        map_ = [[len(devices) - 1 - a for a in own] or [-1] for own in axes]
        flat = [entry[0] for entry in map_] if all(len(entry) == 1 for entry in map_) else map_
        shape = [prod(devices[a] for a in own) * draw(st.integers(1, 2)) for own in axes]
        rows: list[int] = []
        step = size = 0
        copied = [a for a in range(len(devices)) if a not in {x for own in axes for x in own}]
        kind = draw(st.sampled_from(["even", "uneven", "optimizer"]))
        if kind == "uneven" and len(axes[0]) == 1 and all(not own for own in axes[1:]):
            rows = [draw(st.integers(1, 4)) for _ in range(devices[axes[0][0]])]
            shape[0] = sum(rows)
        last = [a for a in copied if devices[a] > 1][-1:]
        used = [a for own in axes for a in own if devices[a] > 1]
        if kind == "optimizer" and last and used == sorted(used):
            size = draw(st.sampled_from([-1, devices[last[0]]]))
            step = prod(devices[last[0] + 1 :])
            shape[0] *= prod(devices[a] for a in copied)
        name = f"w{number}"
        told[name] = Told(devices, flat, rows, step, size)
        wholes[name] = numbers(*shape)
    return told, wholes | STEP


@settings(deadline=None, max_examples=60)
@given(grids(), st.booleans(), st.integers(1, 3))
def test_any_grid_is_merged(
    made: tuple[dict[str, Told], dict[str, Array]], as_json: bool, pieces: int
) -> None:
    told, wholes = made
    with tempfile.TemporaryDirectory() as folder:
        strategy = Path(folder) / ("s.json" if as_json else "s.ckpt")
        strategy.write_bytes((strategy_json if as_json else strategy_bytes)(told))
        write_slices(Path(folder) / "out", wholes, told, pieces=pieces)
        assert same(merged(Path(folder) / "out", strategy), wholes)


def test_the_command_writes_a_verified_checkpoint(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The names ``moments.w`` and ``global_step`` identify optimizer state and step.

    Any layout can load the checkpoint.
    """
    root = tmp_path / "ckpts"
    arguments = ["ckpt", "import", "--strategy", str(tmp_path / "s.ckpt"), str(source), str(root)]
    assert answer(arguments) == 0
    (made,) = capsys.readouterr().out.split()
    assert answer(["ckpt", "verify", str(root)]) == 0
    newest = Root(root).newest_valid().require()
    assert newest.step == 12 and str(newest.path) == made
    names = {t.fqn for t in load_catalogue(newest.path).tensors}
    assert names == {"w", "optimizer.moments.w", "optimizer.global_step"}
    for rank in range(3):  # three ranks, with rows cut
        row = Shard("w", (3, 4), Box((rank, 0), (1, 4)), np.zeros((1, 4), np.float32))
        state = NumpyState([row])
        load_into(newest.path, state.targets(), known=names - {"w"})
        assert np.array_equal(row.array, WHOLES["w"][rank : rank + 1])
    assert answer(arguments) == 2
    assert "exists" in capsys.readouterr().err
    assert answer([*arguments, "--map", "a=model"]) == 2
    assert answer([*arguments, "--step", "40"]) == 0
    assert Root(root).newest_valid().require().step == 40


@pytest.mark.torch
def test_a_module_of_torch_takes_the_weights(source: Path, tmp_path: Path) -> None:
    import torch

    import holdfast

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(3, 4))

    import_slices(source, tmp_path / "s.ckpt", tmp_path / "ckpts")
    net = Net()
    holdfast.load(tmp_path / "ckpts", net)
    assert np.array_equal(net.w.detach().numpy(), WHOLES["w"])


def test_pipeline_stages(tmp_path: Path) -> None:
    """Stage 1 also holds the embedding. The file of a rank may hold stale values of another stage."""
    first = {"embedding": Told([2], [0, -1]), "w": Told([2], [-1, 0])}
    second = {"embedding": Told([2], [0, -1]), "v": Told([2], [-1], step=1, size=-1)}
    wholes = {"embedding": numbers(4, 2), "w": numbers(2, 2), "v": numbers(6), **STEP}
    write_slices(
        tmp_path / "out", {n: a for n, a in wholes.items() if n != "v"} | {"v": numbers(6) * 0}, first
    )
    write_slices(tmp_path / "out", {n: a for n, a in wholes.items() if n != "w"}, second, stage=1)
    folder = tmp_path / "strategies"
    folder.mkdir()
    for rank in range(4):
        told, stage = (first, 0) if rank < 2 else (second, 1)
        (folder / f"src_strategy_{rank}.ckpt").write_bytes(strategy_bytes(told, stage))
    joined = {f"{stage}-{n}": one for stage, told in enumerate((first, second)) for n, one in told.items()}
    (tmp_path / "merged.ckpt").write_bytes(strategy_bytes(joined))
    (tmp_path / "merged.json").write_bytes(strategy_json(joined))
    for strategy in (folder, tmp_path / "merged.ckpt", tmp_path / "merged.json"):
        assert same(merged(tmp_path / "out", strategy), wholes)
    with pytest.raises(UsageError, match=r"describes 2 ranks.*rank_2 is of another one"):
        merged(tmp_path / "out", folder / "src_strategy_0.ckpt")
    write_slices(
        tmp_path / "out", {"embedding": numbers(4, 2) + 1, "v": wholes["v"], **STEP}, second, stage=1
    )
    with pytest.raises(CheckpointInvalid, match="embedding differs between pipeline stages"):
        merged(tmp_path / "out", folder)
    (folder / "src_strategy_1.ckpt").write_bytes(strategy_bytes(first | {"u": Told([2], [0])}))
    with pytest.raises(
        CheckpointInvalid, match=r"src_strategy_1.*src_strategy_0.*different things of stage 0"
    ):
        read_strategy(folder)


def test_a_copy_stands_in_for_a_rank_without_a_file(source: Path, tmp_path: Path) -> None:
    shutil.rmtree(source / "rank_2")
    assert same(merged(source, tmp_path / "s.ckpt"), WHOLES)
    shutil.rmtree(source / "rank_0")
    with pytest.raises(CheckpointInvalid, match=r"its part \[0:3, 0:2\] is missing.*rank 0, 2 "):
        merged(source, tmp_path / "s.ckpt")


def rewrite(source: Path, rank: int, **changed: Array) -> None:
    """Write the file of a rank with other tensors."""
    halves = {n: WHOLES[n][:, 2 * (rank % 2) : 2 * (rank % 2) + 2] for n in ("w", "moments.w")}
    tensors = {n: np.ascontiguousarray(a) for n, a in {**halves, **STEP, **changed}.items()}
    (source / f"rank_{rank}" / "net-1_12.ckpt").write_bytes(ckpt_bytes(tensors))


def truncate(source: Path) -> None:
    file = source / "rank_1" / "net-1_12.ckpt"
    file.write_bytes(file.read_bytes()[:-9])


def rename(source: Path) -> None:
    (source / "rank_3" / "net-1_12.ckpt").rename(source / "rank_3" / "net-1_13.ckpt")


def without_a_part(source: Path) -> None:
    for rank in (1, 3):
        shutil.rmtree(source / f"rank_{rank}")


def add_unnamed(source: Path) -> None:
    (source / "rank_3" / "last.ckpt").write_bytes(b"")


def whole_files(source: Path) -> None:
    for rank in range(4):
        (source / f"rank_{rank}" / "net-1_12.ckpt").write_bytes(ckpt_bytes(WHOLES))


def told(**others: Told) -> Callable[[Path], None]:
    """Return a function that writes another strategy."""

    def write(source: Path) -> None:
        (source.parent / "s.ckpt").write_bytes(strategy_bytes(GRID | others))

    return write


def only(name: str) -> Callable[[Path], None]:
    """Return a function that writes a strategy with only one parameter."""

    def write(source: Path) -> None:
        (source.parent / "s.ckpt").write_bytes(strategy_bytes({name: GRID[name]}))
        for rank in range(4):  # as before the first update: no copy differs
            rewrite(source, rank, **{"moments.w": np.zeros((3, 2), np.float32)})

    return write


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: shutil.rmtree(s), "is no directory"),
        (without_a_part, r"its part \[0:3, 2:4\] is missing"),
        (truncate, r"rank_1/net-1_12\.ckpt: truncated"),
        (rename, r"two steps.*net-1_12\.ckpt and .*net-1_13\.ckpt"),
        (
            lambda s: rewrite(s, 3, global_step=np.array([13], np.int32)),
            r"several steps.*step 12 and .*step 13",
        ),
        (add_unnamed, "several files, and their names do not tell the newest"),
        (lambda s: rewrite(s, 2, w=numbers(3, 2, start=7)), r"w: .*rank_0.*rank_2.*copies, and they differ"),
        (
            lambda s: rewrite(s, 2, w=numbers(3, 2).astype(np.int32)),
            r"has it as F32 and .*rank_2.*has it as I32",
        ),
        (lambda s: rewrite(s, 2, w=numbers(2, 2)), "says nothing of uneven parts"),
        (lambda s: rewrite(s, 2, w=numbers(6)), "ranks 0 and 2 differ in dimensions"),
        (whole_files, "these files are whole"),
        (lambda s: (s / "rank_9").mkdir(), "describes 4 ranks.*rank_9"),
        (told(other=Told([2, 2], [0])), r"lacks what .*s\.ckpt describes: other"),
        (told(w=Told([2, 2], [0])), "the strategy cuts 1 dimensions, and its slices have 2"),
        (told(w=Told([2, 2], [-1, 0], field=3)), "cut by 3 fields"),
        (told(w=Told([2, 2], [1, -1], rows=[1])), "1 lengths of uneven parts for 2 parts"),
        (told(w=Told([2, 2], [-1, 0], step=1, size=2)), "1 ranks apart do not fit"),
        (told(w=Told([2, 2], [-1, 0], step=2, size=3)), "3 parts does not fit"),
        (told(w=Told([3, 2], [-1, 0])), "w is cut over 6 ranks and moments.w over 4"),
        (only("w"), "does not say how moments.w is cut"),
        (lambda s: (s.parent / "s.ckpt").unlink(), "cannot read the strategy file"),
        (lambda s: (s.parent / "s.ckpt").write_bytes(b"{}"), "without any parameter"),
        (lambda s: (s.parent / "s.ckpt").write_bytes(b"\x1a\x7f"), "no strategy file of MindSpore's"),
    ],
)
def test_bad_input_is_one_error_and_nothing_is_written(
    source: Path, tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(source)
    with pytest.raises((CheckpointInvalid, UsageError), match=message) as found:
        import_slices(source, tmp_path / "s.ckpt", tmp_path / "ckpts")
    assert found.value.hint
    assert not (tmp_path / "ckpts").exists()


def test_files_without_a_step_need_one(tmp_path: Path) -> None:
    write_slices(tmp_path / "out", {"w": WHOLES["w"]}, {"w": GRID["w"]})
    (tmp_path / "s.ckpt").write_bytes(strategy_bytes({"w": GRID["w"]}))
    with pytest.raises(UsageError, match="does not say its step"):
        import_slices(tmp_path / "out", tmp_path / "s.ckpt", tmp_path / "ckpts")
    import_slices(tmp_path / "out", tmp_path / "s.ckpt", tmp_path / "ckpts", step=3)


def test_what_is_passed_over_is_said(source: Path, tmp_path: Path) -> None:
    """The import names ranks without a file, tensors that the strategy lacks, and unsaved optimizer state."""
    (tmp_path / "s.ckpt").write_bytes(strategy_bytes({**GRID, "moments.v": Told([2, 2], [0])}))
    for rank in range(3):
        rewrite(source, rank, v=numbers(4), epoch_num=np.array(3, np.int64))
    shutil.rmtree(source / "rank_3")
    lines: list[str] = []
    found = read_slices(source, tmp_path / "s.ckpt", lines.append)
    assert set(found.tensors) == {"w", "moments.w", "global_step", "v"}
    assert any("no file of rank 3" in line for line in lines)
    assert any("not in the strategy, taken as whole: v" in line for line in lines)
    assert any("without optimizer state, which the files do not hold: moments.v" in line for line in lines)


def test_names_of_a_session() -> None:
    names = {"w", "moments.w", "ema.w", "moments.other", "global_step"}
    spelled = [session_name(name, names) for name in sorted(names)]
    assert spelled == ["ema.w", "optimizer.global_step", "moments.other", "optimizer.moments.w", "w"]


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_a_strategy_or_refused(data: bytes) -> None:
    for one in (data, b"{" + data, strategy_bytes(GRID) + data):
        with suppress(CheckpointInvalid):
            assert decode_strategy(one, "x")


def test_a_cut_file_never_gives_other_tensors(tmp_path: Path) -> None:
    data = ckpt_bytes(WHOLES)
    file = tmp_path / "x.ckpt"
    for stop in range(len(data)):
        file.write_bytes(data[:stop])
        try:
            found = read_slice_file(file).tensors
        except CheckpointInvalid:
            continue
        assert len(found) < len(WHOLES)
        assert all(np.array_equal(t.array(), WHOLES[n].view(t.array().dtype)) for n, t in found.items())


def test_a_checksum_is_verified(tmp_path: Path) -> None:
    data = ckpt_bytes(WHOLES)
    for wrong in (0, 1):
        total = (zlib.crc32(data) ^ wrong).to_bytes(10, "big")
        (tmp_path / f"{wrong}.ckpt").write_bytes(data + b"crc_num" + total)
    assert read_slice_file(tmp_path / "0.ckpt").tensors.keys() == WHOLES.keys()
    with pytest.raises(CheckpointInvalid, match="checksum"):
        read_slice_file(tmp_path / "1.ckpt")


def test_limits(tmp_path: Path) -> None:
    """Lengths and counts beyond any training are refused before memory is allocated for them."""
    for cut, rule in {
        Told([RANKS_MAX, 2], []).layout(): "at most",
        Told([1] * 40, []).layout(): "40 axes",
        Told([2], [3]).layout(): "tensor map",
        Told([2], [0, 0]).layout(): "cuts twice",
        Told([2], [0], rows=[-1, 2]).layout(): "impossible lengths",
        Told([2], [0], size=-7, step=1).layout(): "negative",
    }.items():
        item = b"\x0a\x01w\x12" + bytes([len(cut) & 127 | 128, len(cut) >> 7]) + cut
        data = b"\x1a" + bytes([len(item) & 127 | 128, len(item) >> 7]) + item
        with pytest.raises(CheckpointInvalid, match=rule):
            decode_strategy(data, "x")
    with (tmp_path / "large.ckpt").open("wb") as large:
        large.truncate(FILE_SIZE_BYTES_MAX + 1)
    with pytest.raises(UsageError, match="at most"):
        read_strategy(tmp_path / "large.ckpt")
