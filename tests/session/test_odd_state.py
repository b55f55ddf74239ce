"""State in unusual forms: it is restored, or refused by name when the session is entered."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.errors import StateError
from holdfast.frameworks.torch.files.imports import import_checkpoint
from holdfast.frameworks.torch.state.snapshot import Snapshot
from holdfast.frameworks.torch.state.state import TorchState, arrays_in
from holdfast.frameworks.torch.state.untrained_weights import SMALL_NUMEL

pytestmark = pytest.mark.torch


def net(**buffers: torch.Tensor) -> nn.Module:
    """Return a small model with these buffers."""
    torch.manual_seed(2)
    made = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    for name, buffer in buffers.items():
        made.register_buffer(name, buffer)
    return made


def train(model: nn.Module, until: int, folder: Path, state: dict[str, Any] | None = None) -> None:
    """Train in a session."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.arange(96.0).reshape(24, 4)), batch_size=4)
    with holdfast.session(model=model, optimizer=optimizer, checkpoint=folder, state=state) as s:
        for step in s.steps(loader, until=until):
            with step as (x,):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()


def test_conjugated_views(tmp_path: Path) -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    first = {"phase": numbers.conj(), "sign": numbers.conj().imag}
    assert first["phase"].is_conj() and first["sign"].is_neg()
    train(net(**first), 2, tmp_path / "a", state={"seen": {"it": numbers.conj()}})
    zeros = torch.zeros(2, dtype=torch.complex64)
    second = net(phase=zeros.conj(), sign=zeros.clone().conj().imag)
    state = {"seen": {"it": torch.zeros(0)}}
    train(second, 3, tmp_path / "a", state)
    for found in (second.get_buffer("phase"), state["seen"]["it"]):
        assert found.tolist() == [1 - 2j, 3 + 4j]
    assert second.get_buffer("sign").tolist() == [-2.0, 4.0]
    torch.save({"0.weight": first["phase"]}, tmp_path / "w.pt")
    target = nn.Sequential(nn.Linear(2, 1, bias=False))
    target[0].weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    holdfast.load(import_checkpoint(tmp_path / "w.pt", tmp_path / "b"), target)
    assert target[0].weight.tolist() == [1 - 2j, 3 + 4j]


def test_elements_that_share_memory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"mask: elements of this \[5\] share memory") as refused:
        train(net(mask=torch.zeros(1).expand(5)), 1, tmp_path)
    assert "contiguous()" in refused.value.hint
    fine = {"one": torch.arange(3).expand(1, -1), "none": torch.zeros(1, 0).expand(3, 0)}
    train(net(**fine), 2, tmp_path)
    again = net(**fine)
    train(again, 3, tmp_path, {"wide": torch.zeros(1).expand(3)})
    train(again, 4, tmp_path, {"wide": torch.zeros(1).expand(3)})
    assert again.get_buffer("one").tolist() == [[0, 1, 2]]


def test_arrays(tmp_path: Path) -> None:
    fixed = np.arange(6).reshape(2, 3).T
    fixed.flags.writeable = False
    made: dict[str, Any] = {
        "none": np.array(3.5),
        "fixed": fixed,
        "back": np.arange(4)[::-1],
        "text": np.str_(""),
        "when": np.datetime64("2020-01-01"),
        "i": np.int32(7),
    }
    train(net(), 2, tmp_path, {"it": made})
    state: dict[str, Any] = {"it": {}}
    train(net(), 3, tmp_path, state)
    for key, value in made.items():
        found = state["it"][key]
        assert type(found) is type(value) and found.dtype == value.dtype and found.shape == value.shape
        assert np.array_equal(found, value)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (np.array(["a"]), r"state\.it\.0: a numpy\.ndarray of <U1"),
        (np.array([object()]), r"state\.it\.0: a numpy\.ndarray of object"),
        (np.arange(3).astype(">i4"), r"state\.it\.0: a numpy\.ndarray of >i4"),
        (np.ma.masked_array([1, 2], mask=[True, False]), r"state\.it\.0: a numpy\.ma.*MaskedArray of int64"),
        (np.zeros(1, dtype=[("a", "i4")])[0], r"state\.it\.0: an object of type numpy\.void"),
        ({np.int64(3): 1}, r"key np\.int64\(3\) of values\['state'\]\['it'\]\[0\] is a numpy\.int64"),
        ("\ud800", r"values\['state'\]\['it'\]\[0\] holds text that is not valid Unicode"),
        ({"\ud800": 1}, r"a key of values\['state'\]\['it'\]\[0\] holds text"),
        ({"a\nb": torch.ones(1)}, r"'state\.it\.0\.a\\nb' is reserved or holds control characters"),
        ({"k" * 1030: torch.ones(1)}, r"tensor name of 1041 characters \('state\.it\.0\.kkk"),
        (torch.ones([1] * 40), r"tensor 'state\.it\.0': impossible shape"),
        (10**4000, r"\['it'\]\[0\] is an integer of more than 4000 digits"),
        (-(10**9999), r"\['it'\]\[0\] is an integer of more than 4000 digits"),
        ({"@": 1}, r"state\.it\.0: the key '@' is reserved"),
    ],
    ids=range(14),
)
def test_what_cannot_be_saved_is_refused_on_entry(tmp_path: Path, value: Any, why: str) -> None:
    with pytest.raises(StateError, match=why) as refused:
        train(net(), 1, tmp_path, {"it": [value]})
    assert refused.value.message and not list(tmp_path.iterdir())


def test_a_buffer_whose_name_is_no_text_is_refused_on_entry(tmp_path: Path) -> None:
    module = net()
    module.register_buffer("b\udcff", torch.ones(1))
    with pytest.raises(StateError, match=r"'b\\udcff' is no valid Unicode"):
        train(module, 1, tmp_path, {})
    assert not list(tmp_path.iterdir())


def held() -> dict[str, Any]:
    """Return state that the script also holds references to."""
    return {
        "ema": torch.zeros(3),
        "array": np.zeros((2, 2)),
        "alone": np.array(0.0),
        "seen": set(),
        "last": deque(maxlen=2),
        "nested": {"inner": [torch.zeros(2), {"count": Counter()}], "spread": torch.zeros(1).expand(2)},
        "best": 0.0,
        "pair": (0, torch.zeros(1)),
        "grows": torch.zeros(1),
    }


def change(mine: dict[str, Any], state: dict[str, Any]) -> None:
    """Change the state as a script does: in place if possible, otherwise by the session's ``state``."""
    mine["ema"].add_(1)
    mine["array"][0, 1] += 2
    mine["alone"] += 3
    mine["seen"].add(4)
    mine["last"].append(5)
    mine["nested"]["inner"][0].add_(6)
    mine["nested"]["inner"][1]["count"]["x"] += 7
    state["nested"]["spread"] = torch.tensor([8.0, 9.0])
    state["best"] += 10.0
    state["pair"] = (state["pair"][0] + 11, torch.ones(1))
    state["grows"] = torch.cat([state["grows"], torch.ones(1)])


def told(state: dict[str, Any]) -> str:
    """Return the state in a form that can be compared."""
    return repr(state)


def test_what_the_script_holds_is_filled(tmp_path: Path) -> None:
    saved = held()
    state = dict(saved)
    change(saved, state)
    change(saved, state)
    train(net(), 2, tmp_path, state)
    mine = held()
    again = dict(mine)
    inner = mine["nested"]["inner"]
    first, counts = inner[0], inner[1]["count"]
    train(net(), 3, tmp_path, again)
    assert told(again) == told(state)
    kept = ("ema", "array", "alone", "seen", "last", "nested")
    assert all(again[name] is mine[name] for name in kept) and mine["ema"].tolist() == [2.0] * 3
    assert mine["nested"]["inner"] is inner and inner[0] is first and inner[1]["count"] is counts
    assert (first.tolist(), counts, mine["last"].maxlen) == ([12.0] * 2, Counter(x=14), 2)


def test_a_counter_may_count_in_anything(tmp_path: Path) -> None:
    first: dict[str, Any] = {"rows": np.int64(3), "loss": torch.tensor([1.5, -0.0]), "files": 2}
    train(net(), 2, tmp_path, {"seen": Counter(first)})
    found: dict[str, Any] = {"seen": Counter()}
    train(net(), 3, tmp_path, found)
    assert isinstance(found["seen"], Counter)
    assert repr(dict(found["seen"])) == repr(first)


def test_an_aborted_step_takes_plain_state_back() -> None:
    mine = held()
    state = TorchState(net(), {}, extras=dict(mine))
    change(mine, state.extras)
    snapshot, before = Snapshot(state), told(state.extras)
    snapshot.take()
    change(mine, state.extras)
    frozen = state.collect(snapshot.copies())
    assert frozen.tensors["state.ema"].tolist() == [1.0] * 3 and frozen.values["state"]["best"] == 10.0
    assert told(state.extras) != before
    snapshot.restore()
    assert told(state.extras) == before
    assert state.extras["ema"] is mine["ema"] and mine["nested"]["inner"][0].tolist() == [6.0] * 2
    change(mine, state.extras)
    snapshot.restore()  # a second time: the copies are not part of the state
    assert told(state.extras) == before


class Centered(nn.Module):
    """A loss that puts another tensor in the place of its buffer, as the losses of self-distillation do."""

    center: torch.Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("center", torch.ones(1, size))
        self.scale = nn.Parameter(torch.ones(size), requires_grad=False)

    def advance(self) -> None:
        """Change the state without a write to the tensors that hold it."""
        self.center = self.center * 0.5
        self.scale = nn.Parameter(self.scale * 2.0, requires_grad=False)


@pytest.mark.parametrize("size", [3, 2 * SMALL_NUMEL])  # copied at each step, and not
def test_an_aborted_step_takes_replaced_tensors_of_a_module_back(size: int) -> None:
    loss = Centered(size)
    state = TorchState(net(), {}, extras={"loss": loss})
    snapshot = Snapshot(state)
    for step in range(12):  # longer than a tensor is watched that does not change
        loss.advance()
        before = {name: value.clone() for name, value in loss.state_dict().items()}
        places = (loss.center, loss.scale)
        snapshot.take()
        for _ in range(2):  # the block runs again after it was put back
            loss.advance()
            frozen = state.collect(snapshot.copies())
            for name, value in before.items():
                assert torch.equal(frozen.tensors[f"state.loss.{name}"], value), (step, name)
            snapshot.restore()
            assert all(torch.equal(loss.state_dict()[name], value) for name, value in before.items()), step
            assert loss.center is places[0] and loss.scale is places[1]
            snapshot.take()
        loss.advance()
        snapshot.averages.settle()


class Position:
    """An object that declares that its state is always that of committed steps."""

    shows_committed_steps = True

    def __init__(self) -> None:
        self.asked = 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"lines": [{"loss": 1.0, "place": torch.ones(2)}]}

    def load_state_dict(self, value: dict[str, Any]) -> None:
        raise AssertionError("an aborted step changes nothing of it")


def test_what_shows_committed_steps_is_not_copied_at_each() -> None:
    position = Position()
    state = TorchState(net(), {}, extras={"loop": position})
    snapshot, asked = Snapshot(state), position.asked
    snapshot.take()
    snapshot.restore()
    assert position.asked == asked
    assert state.collect(snapshot.copies()).tensors["state.loop.lines.0.place"].tolist() == [1.0] * 2


def test_arrays_are_found_wherever_they_may_lie() -> None:
    tree = {"a": [1, {"b": torch.ones(2)}], "c": (deque([np.ones(3), "text"]), OrderedDict(d=torch.ones(())))}
    found = {path: tuple(array.shape) for path, array in arrays_in(tree, "x")}
    assert found == {"x.a.1.b": (2,), "x.c.0.0": (3,), "x.c.1.d": ()}
