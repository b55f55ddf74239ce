"""Unsupported input is refused by one typed error, which names what is supported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

import holdfast.mindspore
from holdfast.errors import CheckpointMismatch, StateError, StepError, UnsupportedError, UsageError
from holdfast.frameworks.mindspore import adapter
from holdfast.mindspore import Slice


def cell() -> Any:
    """Return a training cell."""
    net = nn.Dense(4, 1)
    return nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), nn.SGD(net.trainable_params(), 0.1))


def enter(trained: Any, **options: Any) -> None:
    """Open and leave a session."""
    with holdfast.mindspore.session(trained, **options):
        pass


def test_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ms, "__version__", "2.3.1")
    with pytest.raises(UnsupportedError, match=r"MindSpore 2\.3\.1 is not supported; supported are 2\.10\.x"):
        enter(cell())


def test_a_device_that_was_never_tried_is_named_and_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(adapter, "DEVICES", ("Abacus",))
    enter(cell())
    assert "MindSpore on CPU is untried: tests ran on Abacus only" in caplog.text


def test_a_slice_of_no_parameter() -> None:
    with pytest.raises(StateError, match="slices= names 'wieght', which is no parameter"):
        enter(cell(), slices={"wieght": Slice((1, 4), (0, 0))})


def test_data_that_is_no_pipeline() -> None:
    with pytest.raises(UsageError, match=r"the loader is a list, not a mindspore\.dataset\.Dataset"):
        with holdfast.mindspore.session(cell()) as s:
            for _ in s.steps([1, 2], until=1):
                pass


def test_autotune_under_random_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ms.dataset.config, "get_enable_autotune", lambda: True)
    data = ms.dataset.NumpySlicesDataset(np.zeros((4, 8, 8, 3), np.uint8), ["image"])
    data = data.map(ms.dataset.vision.RandomHorizontalFlip(), "image").batch(2)
    with pytest.raises(UnsupportedError, match="autotune changes how many workers RandomHorizontalFlip has"):
        with holdfast.mindspore.session(cell()) as s:
            for _ in s.steps(data, until=1):
                pass


def test_parallel_mode() -> None:
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel")
    try:
        with pytest.raises(
            UnsupportedError, match=r"semi_auto_parallel.*supported are stand_alone, data_parallel"
        ):
            enter(nn.WithLossCell(nn.Dense(1, 1), nn.MSELoss()))
    finally:
        ms.reset_auto_parallel_context()


def test_no_training_cell() -> None:
    with pytest.raises(UnsupportedError, match="WithLossCell without `optimizer` is no training cell"):
        enter(nn.WithLossCell(nn.Dense(1, 1), nn.MSELoss()))


def test_a_slice_outside_of_its_tensor() -> None:
    with pytest.raises(StateError, match=r"'weight'.*does not lie in a tensor of shape"):
        enter(cell(), slices={"weight": Slice((1, 4), (0, 2))})


def test_guard_takes_optimizers() -> None:
    with pytest.raises(UsageError, match="not a Dense"):
        holdfast.mindspore.guard(nn.Dense(1, 1))


def test_a_callback_that_was_not_resumed() -> None:
    net = nn.Dense(4, 1)
    model = ms.train.Model(net, nn.MSELoss(), nn.SGD(net.trainable_params(), 0.1))
    data = ms.dataset.NumpySlicesDataset(
        (np.ones((4, 4), np.float32), np.ones((4, 1), np.float32)), ["x", "y"]
    ).batch(2)
    with pytest.raises(UsageError, match="begin at its first batch"):
        model.train(1, data, callbacks=[holdfast.mindspore.Callback(model)], dataset_sink_mode=False)


def test_an_update_without_a_vote(tmp_path: Path) -> None:
    """A cell that was compiled before the session began has no gate, which is the place of the vote in the graph."""
    trained = cell()
    x, y = ms.Tensor(np.ones((2, 4), np.float32)), ms.Tensor(np.ones((2, 1), np.float32))
    with pytest.raises(StepError, match="did not pass the gate"):
        with holdfast.mindspore.session(trained, checkpoint=tmp_path) as s:
            for step in s.steps(until=1):
                with step:
                    nn.WithLossCell(nn.Dense(4, 1), nn.MSELoss())(x, y)


def test_a_checkpoint_of_another_framework(tmp_path: Path) -> None:
    from holdfast.frameworks.mindspore.state import MindSporeState
    from holdfast.store.layouts.layout import Catalogue

    trained = cell()
    state = MindSporeState(trained, trained.optimizer, {}, {}, copy_all=False)
    catalogue = Catalogue.from_layouts({0: state.collect(frozen=False).layout(0, 1)})
    with pytest.raises(CheckpointMismatch, match="not written by a MindSpore training"):
        state.restore(catalogue, {"framework": "torch"})
