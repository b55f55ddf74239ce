"""Slices and strategy files that MindSpore itself wrote, merged to the same bits as by MindSpore's own tools."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore.train.node_strategy_pb2 import ParallelStrategyMap
from numpy.typing import NDArray

import holdfast.mindspore
from holdfast.errors import CheckpointInvalid
from holdfast.frameworks.mindspore.sliced_checkpoints import import_slices, read_slices
from tests.frameworks.mindspore.test_files import cell, values
from tests.store.sliced import Told

Arrays = dict[str, NDArray[Any]]
RANDOM = np.random.default_rng(1)
WHOLES: Arrays = {
    "w": RANDOM.random((8, 12), np.float32),
    "moments.w": RANDOM.random((8, 12), np.float32),
    "v": RANDOM.random((24, 2), np.float32),
    "b": RANDOM.random(6, np.float32),
    "global_step": np.array([7], np.int32),
}
GRIDS: dict[str, dict[str, Told]] = {
    "copies": {"w": Told([2, 2], [-1, 0]), "moments.w": Told([2, 2], [-1, 0]), "v": Told([2, 2], [-1, -1])},
    "both dimensions, swapped": {
        "w": Told([2, 3], [1, 0]), "moments.w": Told([2, 3], [1, 0]), "v": Told([2, 3], [0, 1]),
    },
    "three axes": {
        "w": Told([2, 2, 3], [2, 0]), "moments.w": Told([2, 2, 3], [-1, 1]), "v": Told([2, 2, 3], [0, -1]),
    },
    "two axes of one dimension": {
        "w": Told([2, 2, 2], [[2, 0], [-1]]), "moments.w": Told([2, 2, 2], [[0, 1], [2]]),
        "v": Told([2, 2, 2], [[1], [0]]),
    },
    "optimizer parallel": {
        "w": Told([2, 2, 2], [-1, 0], step=2, size=-1), "moments.w": Told([2, 2, 2], [0, -1], step=2, size=2),
        "v": Told([2, 2, 2], [1, -1], step=1, size=-1), "b": Told([2, 2, 2], [-1], step=1, size=2),
    },
    "a dimension of odd parts": {
        "w": Told([3, 2], [0, 1]), "moments.w": Told([3, 2], [-1, 1]), "v": Told([3, 2], [1, -1], step=1, size=2),
    },
}  # fmt: skip


def strategy(told: dict[str, Told], stage: int = 0) -> bytes:
    """Return a strategy file, made by MindSpore's own message classes."""
    made = ParallelStrategyMap()
    made.current_stage = stage
    operator = made.parallel_strategy_item.add()
    operator.node_name = "MatMul-op0"
    operator.parallel_strategys.stage = stage
    operator.parallel_strategys.parallel_strategy.add().dim.extend([1, 1])
    for name, one in told.items():
        item = made.parallel_layout_item.add()
        item.param_name = name
        layout = item.parallel_layouts
        layout.dev_matrix.add().dim.extend(one.devices)
        nested = any(isinstance(entry, list) for entry in one.tensor_map)
        for entry in one.tensor_map if nested else [one.tensor_map]:
            layout.tensor_map.add().dim.extend(entry)
        layout.param_split_shape.add().dim.extend(one.rows)
        layout.indices_offset.add()
        layout.field = one.field
        layout.opt_weight_shard_step, layout.opt_weight_shard_size = one.step, one.size
    return bytes(made.SerializeToString())


def save(file: Path, arrays: Arrays, **given: Any) -> None:
    """Save with MindSpore's own ``save_checkpoint``."""
    file.parent.mkdir(parents=True, exist_ok=True)
    listed = [{"name": name, "data": ms.Tensor(array)} for name, array in arrays.items()]
    ms.save_checkpoint(listed, str(file), **given)


def sliced(folder: Path, wholes: Arrays, told: Path) -> Path:
    """Return the folder of the slices that ``transform_checkpoints`` makes of one whole file."""
    save(folder / "whole" / "rank_0" / "m.ckpt", wholes)
    ms.transform_checkpoints(str(folder / "whole"), str(folder / "out"), "m_", None, str(told))
    return folder / "out"


def merged(source: Path, told: Path) -> Arrays:
    """Return the tensors as Holdfast merges them."""
    found = read_slices(source, told, lambda line: None)
    return {
        n: t.bits().view(WHOLES[n].dtype if n in WHOLES else np.float32) for n, t in found.tensors.items()
    }


def same(found: Arrays, wholes: Arrays) -> bool:
    """Return whether tensors are equal, bit for bit."""
    return found.keys() == wholes.keys() and all(np.array_equal(found[n], a) for n, a in wholes.items())


@pytest.mark.parametrize("grid", GRIDS)
def test_slices_of_transform_checkpoints(tmp_path: Path, grid: str) -> None:
    """Holdfast's merge equals the tensors that were cut, and MindSpore's own merge."""
    told = tmp_path / "s.ckpt"
    told.write_bytes(strategy(GRIDS[grid]))
    source = sliced(tmp_path, WHOLES, told)
    found = merged(source, told)
    assert same(found, WHOLES)
    ms.transform_checkpoints(str(source), str(tmp_path / "again"), "w_", str(told), None)
    (file,) = (tmp_path / "again").rglob("*.ckpt")
    theirs = {name: parameter.asnumpy() for name, parameter in ms.load_checkpoint(str(file)).items()}
    assert same(found, theirs)


def test_pipeline_stages_merged_by_mindspore(tmp_path: Path) -> None:
    """``merge_pipeline_strategys`` joins the strategy files of four ranks in two stages, as protobuf and as JSON."""
    first, second = (
        {"w": Told([2], [-1, 0])},
        {"v": Told([2], [0, -1]), "b": Told([2], [-1], step=1, size=-1)},
    )
    folder = tmp_path / "strategies"
    folder.mkdir()
    for rank in range(4):
        stage = rank // 2
        (folder / f"src_strategy_{rank}.ckpt").write_bytes(strategy((first, second)[stage], stage))
    ms.merge_pipeline_strategys(str(folder), str(tmp_path / "merged.ckpt"))
    wholes = {name: WHOLES[name] for name in ("w", "v", "b", "global_step")}
    source = sliced(tmp_path, wholes, tmp_path / "merged.ckpt")
    assert same(merged(source, tmp_path / "merged.ckpt"), wholes)
    assert same(merged(source, folder), wholes)
    jsons = tmp_path / "jsons"
    jsons.mkdir()
    for stage, told in enumerate((first, second)):
        layouts = {
            n: {"dev_matrix": t.devices, "tensor_map": t.tensor_map, "field": 0,
                "opt_weight_shard_step": t.step, "opt_weight_shard_size": t.size}
            for n, t in told.items()
        }  # fmt: skip
        operators = {f"MatMul-op{stage}": {"stage": stage, "parallel_strategy": [[1, 1]]}}
        text = json.dumps({"parallel_strategy_item": operators, "parallel_layout_item": layouts})
        (jsons / f"src_strategy_{stage}.json").write_text(text)
    assert set(ms.build_searched_strategy(str(jsons / "src_strategy_1.json"))) == set(second)
    ms.merge_pipeline_strategys(str(jsons), str(tmp_path / "merged.json"))
    assert same(merged(source, tmp_path / "merged.json"), wholes)


def test_uneven_parts_as_merge_sliced_parameter(tmp_path: Path) -> None:
    """The parts have 3, 1 and 4 rows, which MindSpore merges with ``param_split_shape``."""
    told = {"w": Told([3], [0, -1], rows=[3, 1, 4])}
    (tmp_path / "s.ckpt").write_bytes(strategy(told))
    starts = [0, 3, 4, 8]
    parts = [WHOLES["w"][a:b] for a, b in pairwise(starts)]
    for rank, part in enumerate(parts):
        save(
            tmp_path / "out" / f"rank_{rank}" / "m-1_7.ckpt",
            {"w": part},
            append_dict={"epoch_num": 1, "step_num": 7, "who": "a text"},
            crc_check=True,
        )
    found = merged(tmp_path / "out", tmp_path / "s.ckpt")
    pieces = [ms.Parameter(ms.Tensor(part), name="w") for part in parts]
    theirs = ms.merge_sliced_parameter(pieces, ms.build_searched_strategy(str(tmp_path / "s.ckpt")))
    assert same(found, {"w": theirs.asnumpy()}) and same(found, {"w": WHOLES["w"]})


def test_a_training_goes_on_from_slices(tmp_path: Path) -> None:
    """A trained cell is cut by MindSpore and imported. The next step has the bits of an undisturbed step."""
    x, y = ms.Tensor(np.ones((2, 4), np.float32)), ms.Tensor(np.ones((2, 1), np.float32))
    first = cell()
    for _ in range(5):
        first(x, y)
    whole = values(first)
    cut = Told([2, 2], [-1, 0])
    told = tmp_path / "s.ckpt"
    told.write_bytes(strategy({n: cut for n, a in whole.items() if a.shape == (3, 4)}))
    source = sliced(tmp_path, whole, told)
    holdfast.mindspore.import_checkpoint(source, cell(), tmp_path / "ckpts", strategy=told)
    import_slices(source, told, tmp_path / "by name")
    first(x, y)
    for root in ("ckpts", "by name"):
        second = cell()
        with holdfast.mindspore.session(second, checkpoint=tmp_path / root) as s:
            assert s.step == 5
            for step in s.steps(until=6):
                with step:
                    second(x, y)
        assert same(values(second), values(first))
    with pytest.raises(CheckpointInvalid, match="lacks parameters of the cell"):
        save(
            tmp_path / "few" / "rank_0" / "m.ckpt",
            {"0.weight": whole["0.weight"], "global_step": whole["global_step"]},
        )
        (tmp_path / "few.ckpt").write_bytes(strategy({"0.weight": Told([1], [-1, -1])}))
        holdfast.mindspore.import_checkpoint(
            tmp_path / "few", cell(), tmp_path / "none", strategy=tmp_path / "few.ckpt"
        )
    assert not (tmp_path / "none").exists()
