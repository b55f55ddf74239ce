"""``holdfast.load``: conversions, omissions, and refusals that change nothing."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.errors import CheckpointMismatch, UsageError
from holdfast.frameworks.torch.files.imports import import_checkpoint
from holdfast.store.backends.location import Place
from tests.store.test_damage import flip

pytestmark = pytest.mark.torch


def net(out: int = 1) -> nn.Sequential:
    """Return a small model, whose layer ``2`` is its head."""
    torch.manual_seed(out)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, out))


def stored(folder: Path, state: dict[str, Tensor]) -> Place:
    """Make a checkpoint of these weights."""
    folder.mkdir()
    torch.save(state, folder / "w.pt")
    return import_checkpoint(folder / "w.pt", folder / "ckpts")


def copies(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the present weights."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(model: nn.Module, state: dict[str, Tensor]) -> bool:
    """Return whether the weights are equal, bit for bit."""
    return all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_converts_only_on_request(tmp_path: Path) -> None:
    state = copies(net())
    path = stored(tmp_path / "a", state)
    half = net().to(torch.bfloat16)
    before = copies(half)
    for strict in (True, False):
        with pytest.raises(CheckpointMismatch, match=r"F32.*BF16") as refused:
            holdfast.load(path, half, strict)
        assert "cast=True" in refused.value.hint
    assert equal(half, before)
    holdfast.load(path, half, cast=True)
    assert equal(half, {name: value.to(half.state_dict()[name].dtype) for name, value in state.items()})
    wide = net().double()
    holdfast.load(path, wide, cast=True)
    assert torch.equal(wide.state_dict()["0.weight"], state["0.weight"].double())
    counted = net()
    counted.get_submodule("1").num_batches_tracked = torch.zeros((), dtype=torch.int32)
    with pytest.raises(CheckpointMismatch, match="num_batches_tracked is I64"):
        holdfast.load(path, counted, cast=True)


def test_a_number_that_does_not_fit_is_refused_before_anything_changes(tmp_path: Path) -> None:
    state = copies(net())
    state["2.weight"][0, 1] = 70_000.0
    path = stored(tmp_path / "a", state)
    half = net(1).half()
    before = copies(half)
    with pytest.raises(
        CheckpointMismatch, match=r"2\.weight: it has numbers that torch\.float16 cannot hold"
    ):
        holdfast.load(path, half, cast=True)
    assert equal(half, before)
    mixed = net(2)
    state = copies(mixed)
    state["0.weight"][0, 1] = 70_000.0
    mixed.get_submodule("0").half()
    with torch.no_grad():
        for value in mixed.state_dict().values():
            value.zero_()
    before = copies(mixed)
    path = stored(tmp_path / "b", state)
    with pytest.raises(CheckpointMismatch, match=r"0\.weight: it has numbers"):
        holdfast.load(path, mixed, cast=True)
    assert equal(mixed, before)
    with pytest.raises(CheckpointMismatch, match=r"0\.weight: it has numbers"):
        holdfast.load(path, mixed, cast=True, strict=False)
    assert equal(mixed, before)
    mixed[0] = nn.Linear(1, 1).half()  # of another shape, so its values do not matter
    report = holdfast.load(path, mixed, cast=True, optional=["0.*"])
    assert (
        set(report.mismatched) == {"0.weight", "0.bias"} and mixed.get_parameter("2.weight").count_nonzero()
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_infinity_stays_infinity_or_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    path = stored(tmp_path / "a", {"weight": torch.tensor([[1.0, torch.inf, torch.nan]])})
    layer = nn.Linear(3, 1, bias=False).to(dtype)
    if dtype.itemsize == 1:
        with pytest.raises(CheckpointMismatch, match="cannot hold"):
            holdfast.load(path, layer, cast=True)
        return
    holdfast.load(path, layer, cast=True)
    assert str(layer.weight.tolist()) == "[[1.0, inf, nan]]"


def test_another_head_on_request(tmp_path: Path) -> None:
    state = copies(net())
    path = stored(tmp_path / "a", state)
    mine = net(5)
    mine.register_parameter(
        "extra", nn.Parameter(torch.ones(3, 4).t())
    )  # not contiguous: read through a copy
    before = copies(mine)
    with pytest.raises(CheckpointMismatch) as refused:
        holdfast.load(path, mine)
    assert "(3 differences)" in str(refused.value) and "missing: extra" in str(refused.value)
    assert "optional=['head.*']" in refused.value.hint
    with pytest.raises(CheckpointMismatch, match=r"\(2 differences\)"):
        holdfast.load(path, mine, strict=False)
    with pytest.raises(CheckpointMismatch, match=r"\(1 differences\)"):
        holdfast.load(path, mine, optional=["2.*"])
    assert equal(mine, before)
    report = holdfast.load(path, mine, strict=False, optional=["2.*"])
    assert report.missing == ("extra",) and report.unexpected == ()
    assert set(report.mismatched) == {"2.weight", "2.bias"}
    assert equal(mine, {**state, **{name: before[name] for name in ("2.weight", "2.bias", "extra")}})


def test_a_part_of_a_model(tmp_path: Path) -> None:
    state = copies(net())
    path = stored(tmp_path / "a", state)
    part = net()[:1]
    report = holdfast.load(path, part, strict=False)
    assert set(report.unexpected) == {name for name in state if not name.startswith("0.")}
    assert equal(part, state) and report.missing == report.mismatched == ()
    assert holdfast.load(path, part, optional=["1.*", "2.*"]).unexpected == report.unexpected
    with pytest.raises(CheckpointMismatch, match=r"unexpected: 2\.weight"):
        holdfast.load(path, part, optional=["1.*"])
    with pytest.raises(UsageError, match="not a list"):
        holdfast.load(path, part, optional="1.*")


def test_newer_checkpoints_that_are_passed_over_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = copies(net())
    root = stored(tmp_path / "a", state).parent
    newer = import_checkpoint(tmp_path / "a" / "w.pt", root, step=5)
    flip(Path(str(newer)) / "shard-r00000-000.safetensors", 9)
    model = net()
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert holdfast.load(str(root), model).step == 0
    assert equal(model, state)
    assert f"{newer} is newer and was passed over" in caplog.text
    assert f"holdfast ckpt repair --dry-run {newer}" in caplog.text


def test_what_was_healed_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=8)
    with holdfast.session(model=model, optimizer=optimizer, checkpoint=tmp_path / "a", copies=2) as s:
        for step in s.steps(loader, until=1):
            with step as (x,):
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    (path,) = (tmp_path / "a").iterdir()
    flip(path / "catalogue.json", 60)
    with caplog.at_level(logging.WARNING, "holdfast"):
        report = holdfast.load(path, net())
    assert len(report.healed) == 1 and f"{path / 'catalogue.json'}: " in caplog.text
    assert f"another copy was used; next: holdfast ckpt repair --dry-run {path}" in caplog.text


def test_an_empty_place_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unset shell variable gives an empty text. Regression: an empty text meant the current directory."""
    monkeypatch.chdir(tmp_path)
    model = net()
    with pytest.raises(UsageError, match="empty text"):
        holdfast.session(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), checkpoint="")
    with pytest.raises(UsageError, match="empty text"):
        holdfast.load("", model)
    assert not list(tmp_path.iterdir())


def test_a_place_that_no_message_can_name_is_refused_on_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name has bytes of another encoding.

    Regression: the first periodic save ended the training with an encoder error.
    """
    odd = tmp_path / os.fsdecode(b"models \xe9t\xe9")
    odd.mkdir()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(UsageError, match="is no valid Unicode"):
        holdfast.session(model=model, optimizer=optimizer, checkpoint=odd)
    with pytest.raises(UsageError, match="is no valid Unicode"):
        holdfast.load(odd, model)
    link = tmp_path / "models"
    link.symlink_to(odd)
    with holdfast.session(model=model, optimizer=optimizer, checkpoint=link, save=1) as session:
        for step in session.steps(range(2)):
            with step:
                optimizer.zero_grad()
                model(torch.ones(4, 4)).sum().backward()
                optimizer.step()
    assert holdfast.load(link, net()).step == 2
    monkeypatch.chdir(odd)
    with pytest.raises(UsageError, match="is no valid Unicode"):
        holdfast.session(model=model, optimizer=optimizer, checkpoint="checkpoints")
