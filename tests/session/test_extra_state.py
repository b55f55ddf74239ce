"""``get_extra_state`` of modules: part of a model's state, as in torch's own ``state_dict``."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import holdfast
from holdfast.errors import CheckpointMismatch, StateError
from holdfast.frameworks.common import weight_selection
from holdfast.frameworks.torch.files.exports import Form, export_checkpoint
from holdfast.frameworks.torch.files.imports import import_checkpoint
from holdfast.frameworks.torch.state.snapshot import Snapshot
from holdfast.frameworks.torch.state.state import TorchState
from holdfast.store.backends.location import place_of
from tests.adapters.test_state import copy_over

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


class Counting(nn.Linear):
    """A module that counts its calls and keeps their largest values, outside of parameters and buffers."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.calls = 0
        self.history: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Count the call, and return an output that depends on the count."""
        self.calls += 1
        self.history = [*self.history, x.detach().amax()]
        out: Tensor = super().forward(x)
        return out * self.calls

    def get_extra_state(self) -> Any:
        """Return the counts."""
        return {"calls": self.calls, "history": self.history}

    def set_extra_state(self, state: Any) -> None:
        """Take the counts back."""
        self.calls, self.history = state["calls"], state["history"]


class Packed(Counting):
    """A module with its extra state in one tensor of bytes, as in TransformerEngine."""

    def get_extra_state(self) -> Any:
        """Return one tensor."""
        return torch.tensor([self.calls] * self.calls, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Take the state from one tensor."""
        self.calls = len(state)


class Job:
    """A model with one module used twice, and one of the other kind."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        first, second = Counting(), Packed()
        self.net = nn.Sequential(first, nn.Tanh(), first, second)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.data = [torch.full((2, 4), float(n)) for n in range(6)]

    def train(self, until: int, **arguments: Any) -> None:
        """Train."""
        with holdfast.session(model=self.net, optimizer=self.optimizer, **arguments) as s:
            for step in s.steps(self.data, until=until):
                with step as x:
                    self.net(x).square().mean().backward()
                    self.optimizer.step()
                    self.optimizer.zero_grad()

    def extra(self) -> list[Any]:
        """Return the state outside of parameters and buffers."""
        first, second = self.net[0], self.net[3]
        assert isinstance(first, Counting) and isinstance(second, Packed)
        return [first.calls, [float(v) for v in first.history], second.calls]


def test_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole, begun, again = Job(), Job(), Job()
    whole.train(6)
    begun.train(3, checkpoint=tmp_path)
    again.train(6, checkpoint=tmp_path)
    assert again.extra() == whole.extra() and whole.extra()[0] == 12
    assert all(map(torch.equal, again.net.parameters(), whole.net.parameters()))


def test_an_aborted_step_takes_it_back() -> None:
    job = Job()
    job.net(torch.ones(2, 4))
    state = TorchState(job.net, {"default": job.optimizer})
    snapshot = Snapshot(state)
    snapshot.take()
    before, size = job.extra(), snapshot.size()
    job.net(torch.ones(2, 4))
    frozen = state.collect(snapshot.copies())
    assert frozen.values["modules"]["0._extra_state"]["calls"] == 2
    assert frozen.tensors["3._extra_state"].tolist() == [1]
    snapshot.restore()
    assert job.extra() == before
    job.net(torch.ones(2, 4))
    snapshot.take()
    assert snapshot.size() == size + 3  # the layouts are published again


def test_load_takes_it_or_says_that_it_is_not_there(tmp_path: Path) -> None:
    job, other = Job(), Job()
    job.train(2, checkpoint=tmp_path / "a")
    holdfast.load(tmp_path / "a", other.net)
    assert other.extra() == job.extra()
    plain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
    mine = nn.Sequential(Counting(), nn.Linear(4, 4))
    both = {"first": plain}, {"first": mine}
    optimizers = [torch.optim.SGD(model["first"].parameters(), lr=0.1) for model in both]
    for index, (model, optimizer) in enumerate(zip(both, optimizers, strict=True)):
        with holdfast.session(model=model, optimizer=optimizer, checkpoint=tmp_path / f"{index}") as s:
            for step in s.steps([torch.ones(1, 4)]):
                with step as x:
                    model["first"](x).sum().backward()
                    optimizer.step()
    name = "first.0._extra_state"
    for target, source, why in ((mine, "0", "missing"), (plain, "1", "unexpected")):
        with pytest.raises(CheckpointMismatch, match=rf"\(1 differences\):\n  {why}: {name}"):
            holdfast.load(tmp_path / source, {"first": target})
        report = holdfast.load(tmp_path / source, {"first": target}, optional=["*._extra_state"])
        assert (*report.missing, *report.unexpected) == (name,)
    assert mine[0].calls == 1
    with pytest.raises(CheckpointMismatch, match=f"holds no {name}"):
        with holdfast.session(model=both[1], optimizer=optimizers[1], checkpoint=tmp_path / "0"):
            pass
    with pytest.raises(CheckpointMismatch, match=f"unexpected: {name}"):
        with holdfast.session(model=both[0], optimizer=optimizers[0], checkpoint=tmp_path / "1"):
            pass


class Without(nn.Linear):
    """A module as Megatron's are on a CPU: it has the method, and nothing to say."""

    def get_extra_state(self) -> Any:
        """Return None."""
        return None

    def set_extra_state(self, state: Any) -> None:
        """Do nothing."""


def test_extra_state_of_none_need_not_be_in_the_checkpoint(tmp_path: Path) -> None:
    plain, mine = nn.Linear(4, 4), Without(4, 4)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with holdfast.session(model=plain, optimizer=optimizer, checkpoint=tmp_path) as s:
        for step in s.steps([torch.ones(1, 4)]):
            with step as x:
                plain(x).sum().backward()
                optimizer.step()
    holdfast.load(tmp_path, mine)
    assert torch.equal(mine.weight, plain.weight)


def test_a_checkpoint_of_before_warns(caplog: pytest.LogCaptureFixture) -> None:
    job, other = Job(), Job()
    source, target = (TorchState(each.net, {}) for each in (job, other))
    collect = source.collect

    def before() -> Any:
        collected = collect()
        del collected.values["modules"]
        return collected

    source.collect = before  # type: ignore[method-assign, assignment]
    copy_over(source, target)
    assert "holds no 0._extra_state, 3._extra_state" in caplog.text


@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_other_programs_give_and_take_it(tmp_path: Path, form: Form) -> None:
    job, torchs, back = Job(), Job(), Job()
    job.train(2, checkpoint=tmp_path / "a")
    export_checkpoint(tmp_path / "a", tmp_path / "out", form)
    if form == "torch":
        tree = torch.load(tmp_path / "out", weights_only=True)
        torchs.net.load_state_dict(tree["model"])
        assert torchs.extra() == job.extra()
    import_checkpoint(tmp_path / "out", tmp_path / "b")
    holdfast.load(tmp_path / "b", back.net)
    assert back.extra() == job.extra()
    back.train(4, checkpoint=tmp_path / "b")
    assert back.extra()[0] == 8


def test_stages_of_a_pipeline_bring_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    common: dict[str, Any] = {"aliases": {}, "optimizers": {}, "schedulers": {}, "state": {}}
    stages = [{**common, "modules": {f"{n}._extra_state": n}} for n in range(2)]
    monkeypatch.setattr(weight_selection, "load_values_of_all", lambda path, names, rank: stages)
    assert weight_selection.extra_states(weight_selection.joined_values(place_of("x"))) == {
        "0._extra_state",
        "1._extra_state",
    }
    # The state comes from a rank that asked one stage only. The tensors of the others are known by their names.
    names = ["0.weight", "1._extra_state.history.0", "1.weight"]
    assert weight_selection.beside_the_model(names, stages[0]) == {"1._extra_state.history.0"}


def test_what_cannot_be_kept_is_refused_by_name() -> None:
    class Pickles(Counting):
        def get_extra_state(self) -> Any:
            return io.BytesIO()

    class Forgets(nn.Linear):
        def get_extra_state(self) -> Any:
            return 1

    with pytest.raises(StateError, match=r"inner\._extra_state: an object of type _io\.BytesIO"):
        TorchState({"inner": Pickles()}, {})
    with pytest.raises(
        StateError, match=r"inner\._extra_state: Forgets has .* no set_extra_state"
    ) as refused:
        TorchState({"inner": Forgets(1, 1)}, {})
    assert "set_extra_state" in refused.value.hint
