"""MindSpore's own tools on files that Holdfast wrote, and MindSpore's files as a start for Holdfast."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from mindspore.train.node_strategy_pb2 import ParallelStrategyMap
from numpy.typing import NDArray

import holdfast.mindspore
from holdfast.core.ids import Generation, SaveId
from holdfast.errors import CheckpointInvalid, StateError, UsageError
from holdfast.frameworks.common.numpy_state import NumpyState, Shard
from holdfast.frameworks.mindspore.checkpoint_files import describe
from holdfast.store.layouts.layout import Box, Catalogue, TensorEntry
from holdfast.store.layouts.save_plan import plan
from holdfast.store.manage.checkpoint_root import Root
from holdfast.store.write.writer import write_share

FULL: dict[str, NDArray[Any]] = {
    "w1": np.arange(256, dtype=np.float32).reshape(8, 32),
    "w2": np.arange(128, dtype=np.float32).reshape(32, 4),
    "b": np.arange(4, dtype=np.float32),
    "optimizer.moments.w1": np.arange(256, dtype=np.float32).reshape(8, 32) / 7,
    "optimizer.global_step": np.array([12], np.int32),
    "optimizer.learning_rate": np.array(0.5, np.float32),
}
CUT = {"w1": 1, "w2": 0, "optimizer.moments.w1": 1}
WORLD = 4  # 2 replicas of 2 parts: ranks 0 and 2 hold the same part, ranks 1 and 3 the other


class Net(nn.Cell):  # type: ignore[misc]
    """A cell with parameters to load into."""

    def __init__(self) -> None:
        super().__init__()
        for fqn, array in FULL.items():
            name = fqn.removeprefix("optimizer.")
            setattr(self, name.replace(".", "_"), ms.Parameter(np.zeros_like(array), name=name))


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """Export a checkpoint of four ranks to MindSpore's files. Return their folder."""
    states = {}
    for rank in range(WORLD):
        shards = []
        for fqn, array in FULL.items():
            box = Box.whole(array.shape)
            if fqn in CUT:
                half = array.shape[CUT[fqn]] // 2
                offsets = tuple(half * (rank % 2) if d == CUT[fqn] else 0 for d in range(array.ndim))
                sizes = tuple(half if d == CUT[fqn] else n for d, n in enumerate(array.shape))
                box = Box(offsets, sizes)
            part = array[tuple(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True))]
            shards.append(Shard(fqn, array.shape, box, np.array(part, order="C")))
        states[rank] = NumpyState(shards)
    catalogue = Catalogue.from_layouts({rank: state.layout(rank, WORLD) for rank, state in states.items()})
    save_id = SaveId("t", Generation(1, 1), 12, 0, "request")
    everybody = plan(catalogue, frozenset(range(WORLD)))
    for rank, state in states.items():
        write_share(tmp_path / "ckpts", save_id, catalogue, everybody, rank, state, {}, {rank: {}})
    files = holdfast.mindspore.export_checkpoint(tmp_path / "ckpts", tmp_path / "out", name="m")
    assert [file.parent.name for file in files] == [f"rank_{rank}" for rank in range(WORLD)]
    return tmp_path / "out"


def same(loaded: dict[str, Any]) -> bool:
    """Return whether ``loaded`` has every tensor, whole and equal."""
    names = {fqn.removeprefix("optimizer."): array for fqn, array in FULL.items()}
    return set(loaded) == set(names) and all(np.array_equal(loaded[n].asnumpy(), a) for n, a in names.items())


def test_group_info_names_the_holders(exported: Path) -> None:
    for rank in range(WORLD):
        found = ms.restore_group_info_list(str(exported / f"rank_{rank}" / "group_info.pb"))
        assert sorted(found) == [rank % 2, rank % 2 + 2]


def test_strategy_files_say_how_slices_lie(exported: Path) -> None:
    found = ms.build_searched_strategy(str(exported / "strategy" / "src_strategy_0.ckpt"))
    lines = {name: (list(s.dev_matrix[0].dim), list(s.tensor_map[0].dim)) for name, s in found.items()}
    assert lines["w1"] == ([2, 2], [-1, 0]) and lines["w2"] == ([2, 2], [0, -1])
    ms.merge_pipeline_strategys(str(exported / "strategy"), str(exported / "merged.ckpt"))
    merged = ParallelStrategyMap.FromString((exported / "merged.ckpt").read_bytes())
    assert len(merged.parallel_layout_item) >= len(found)


def test_transform_checkpoints(exported: Path, tmp_path: Path) -> None:
    ranks = tmp_path / "ranks"
    for rank in range(WORLD):
        (ranks / f"rank_{rank}").mkdir(parents=True)
        shutil.copy(exported / f"rank_{rank}" / "m.ckpt", ranks / f"rank_{rank}" / "m.ckpt")
    strategy = str(exported / "strategy" / "src_strategy_0.ckpt")
    ms.transform_checkpoints(str(ranks), str(tmp_path / "whole"), "w_", strategy, None)
    (file,) = (tmp_path / "whole").rglob("*.ckpt")
    assert same(ms.load_checkpoint(str(file)))


def test_load_distributed_checkpoint(exported: Path) -> None:
    net = Net()
    files = [str(exported / f"rank_{rank}" / "m.ckpt") for rank in range(WORLD)]
    strategy = str(exported / "strategy" / "src_strategy_0.ckpt")
    ms.load_distributed_checkpoint(net, files, None, strategy)
    # a scalar, which MindSpore does not load
    net.learning_rate.set_data(ms.Tensor(FULL["optimizer.learning_rate"]))
    assert same(net.parameters_dict())


def test_get_ckpt_path_with_strategy(exported: Path) -> None:
    """The file of rank 0 is removed. The function names the file of a rank with the same slices."""
    shutil.rmtree(exported / "rank_0")
    strategy = str(exported / "strategy" / "src_strategy_0.ckpt")
    found = ms.get_ckpt_path_with_strategy(str(exported / "rank_0" / "m.ckpt"), strategy)
    assert found == str(exported / "rank_2" / "m.ckpt")


def test_uneven_layouts_are_refused_by_name() -> None:
    tensor = TensorEntry("w", "F32", (5, 2), 0)
    with pytest.raises(StateError, match=r"'w'.*no even grid"):
        describe(tensor, [Box((0, 0), (3, 2)), Box((3, 0), (2, 2))])
    with pytest.raises(StateError, match=r"'v'.*no even grid"):
        swapped = TensorEntry("v", "F32", (4, 2), 0)
        describe(
            swapped, [Box((0, 0), (2, 2)), Box((2, 0), (2, 2)), Box((2, 0), (2, 2)), Box((0, 0), (2, 2))]
        )


def test_a_grid_in_two_dimensions() -> None:
    """Eight ranks: rows are cut by the second axis, columns by the fourth; the other axes replicate."""
    tensor = TensorEntry("w", "F32", (4, 6), 0)
    boxes = [Box((2 * (rank // 4 % 2), 3 * (rank % 2)), (2, 3)) for rank in range(8)]
    assert describe(tensor, boxes) == ([2, 2, 2], [2, 0])


def cell() -> Any:
    """Return a training cell with optimizer state."""
    ms.set_seed(1)
    net = nn.SequentialCell(nn.Dense(4, 3), nn.ReLU(), nn.Dense(3, 1))
    return nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), nn.Adam(net.trainable_params(), 0.1))


def values(trained: Any) -> dict[str, Any]:
    """Return all parameters by name."""
    return {p.name: p.asnumpy().copy() for p in trained.get_parameters()}


@pytest.mark.parametrize("form", ["ckpt", "safetensors"])
def test_import_and_go_on(tmp_path: Path, form: str) -> None:
    x, y = ms.Tensor(np.ones((2, 4), np.float32)), ms.Tensor(np.ones((2, 1), np.float32))
    first = cell()
    for _ in range(5):
        first(x, y)
    expected = values(first)
    ms.save_checkpoint(first, str(tmp_path / f"m.{form}"), format=form)
    holdfast.mindspore.import_checkpoint(tmp_path / f"m.{form}", cell(), tmp_path / "ckpts")
    second = cell()
    with holdfast.mindspore.session(second, checkpoint=tmp_path / "ckpts") as s:
        assert s.step == 5
        assert all(np.array_equal(values(second)[name], array) for name, array in expected.items())
        for step in s.steps(until=6):
            with step:
                second(x, y)
    first(x, y)
    assert all(np.array_equal(values(second)[name], array) for name, array in values(first).items())
    assert Root(tmp_path / "ckpts").newest_valid().require().step == 6
    (file,) = holdfast.mindspore.export_checkpoint(tmp_path / "ckpts@6", tmp_path / "out", form=form)  # type: ignore[arg-type]
    again = ms.load_checkpoint(str(file), format=form)
    assert all(np.array_equal(again[name].asnumpy(), array) for name, array in values(first).items())


def test_import_refuses_what_it_cannot_use(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no file"):
        holdfast.mindspore.import_checkpoint(tmp_path / "none.ckpt", cell(), tmp_path / "ckpts")
    (tmp_path / "bad.ckpt").write_bytes(b"\x0a\xff\xff nonsense")
    with pytest.raises(CheckpointInvalid, match=r"bad\.ckpt"):
        holdfast.mindspore.import_checkpoint(tmp_path / "bad.ckpt", cell(), tmp_path / "ckpts")
    ms.save_checkpoint(
        [{"name": "0.weight", "data": ms.Tensor(np.zeros((3, 4), np.float32))}], str(tmp_path / "few.ckpt")
    )
    with pytest.raises(CheckpointInvalid, match="lacks parameters"):
        holdfast.mindspore.import_checkpoint(tmp_path / "few.ckpt", cell(), tmp_path / "ckpts")
    assert not (tmp_path / "ckpts").exists()
