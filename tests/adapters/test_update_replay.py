"""Updates that are computed again, compared with torch's own: equal bit for bit, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.errors import CheckpointInvalid, StateError
from holdfast.frameworks.torch.adapter import TorchAdapter
from holdfast.frameworks.torch.state.update_replay import UpdateReplay
from holdfast.store.shared_memory.update_log import Update

pytestmark = pytest.mark.torch

Make = Callable[[Any], torch.optim.Optimizer]


def in_two(parameters: Any) -> Any:
    """Return two groups with different settings."""
    return [{"params": parameters[:1], "lr": 0.02}, {"params": parameters[1:]}]


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "two-groups": lambda p: torch.optim.AdamW(in_two(p), lr=0.01),
}


class Job:
    """A training of two layers and a frozen one, with clipping and a schedule, whose updates are recorded."""

    def __init__(self, make: Make, kind: torch.dtype = torch.float32) -> None:
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 6)).to(kind)
        self.net[2].bias.requires_grad_(False)
        self.optimizer = make(list(self.net.parameters()))
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.adapter = TorchAdapter(self.net, self.optimizer, None, None, {}, seed=0)
        self.updates: UpdateReplay = self.adapter.updates
        self.updates.settle()
        self.kind = kind

    def step(self, number: int, *, foretell: bool = False) -> Update:
        """Run one step of the script. Return the inputs of its update, copied."""
        x = torch.linspace(-1, 1, 24).reshape(4, 6).to(self.kind) * (number + 1)
        self.updates.begin()
        self.optimizer.zero_grad()
        self.net(x).square().sum().backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
        self.updates.comes()
        taken = self.updates.take(number)
        kept = taken._replace(
            gradients=tuple(g._replace(data=memoryview(bytes(g.data))) for g in taken.gradients)
        )
        if foretell:
            self.updates.foretell(kept)
        self.optimizer.step()
        self.updates.made()
        self.schedule.step()
        return kept

    def bits(self) -> list[bytes]:
        """Return the bits of everything that the optimizer changes."""
        found: list[Any] = [*self.net.parameters()]
        for p in self.net.parameters():
            found += [v for v in self.optimizer.state.get(p, {}).values() if isinstance(v, Tensor)]
        return [t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in found]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_made_again_give_the_same_bits(name: str, kind: torch.dtype) -> None:
    job = Job(OPTIMIZERS[name], kind)
    job.step(0)
    other = Job(OPTIMIZERS[name], kind)
    other.net.load_state_dict(job.net.state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(job.optimizer.state_dict()))
    taken = [job.step(number) for number in range(1, 6)]
    other.updates.replay(taken)
    assert other.bits() == job.bits()
    assert all(p.grad is None for p in other.net.parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_is_foretold_without_effect(name: str) -> None:
    job, alone = Job(OPTIMIZERS[name]), Job(OPTIMIZERS[name])
    for number in range(3):
        job.step(number, foretell=True)
        alone.step(number)
        assert job.updates.as_foretold() == ""
        assert job.bits() == alone.bits()


def test_a_block_without_an_update_is_made_again_as_none() -> None:
    job = Job(OPTIMIZERS["adamw"])
    job.step(0)
    before = job.bits()
    job.updates.begin()
    taken = job.updates.take(1)
    assert taken.gradients == ()
    job.updates.replay([taken])
    assert job.bits() == before


class Noisy(torch.optim.SGD):
    """An optimizer that adds random numbers, as stochastic rounding does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.add_(torch.randn_like(p) * 1e-3)


class Counting(torch.optim.SGD):
    """An optimizer that keeps state where no checkpoint finds it."""

    calls = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        Counting.calls += 1
        self.param_groups[0]["lr"] = 0.1 / Counting.calls
        super().step()


@pytest.mark.parametrize("kind", [Noisy, Counting])
def test_an_update_that_depends_on_more_than_the_log_is_found_out(kind: type[torch.optim.SGD]) -> None:
    job = Job(lambda p: kind(p, lr=0.1))
    job.step(0, foretell=True)
    assert job.updates.as_foretold() == "0.weight"


@pytest.mark.parametrize("past_the_count", [False, True])
def test_weights_that_the_script_changes_are_found_out(past_the_count: bool) -> None:
    job = Job(OPTIMIZERS["adamw"])
    job.step(0, foretell=True)
    assert job.updates.undisturbed()
    weight: Any = job.net.get_parameter("0.weight")
    (weight.data if past_the_count else weight.detach()).clamp_(-0.01, 0.01)
    assert not job.updates.undisturbed()
    assert job.updates.as_foretold() == "0.weight"
    job.updates.settle()
    assert job.updates.undisturbed()
    job.optimizer.state[weight]["exp_avg"] = torch.zeros_like(weight)
    assert not job.updates.undisturbed()


def test_nothing_is_recorded_after_a_rest() -> None:
    """Regression: counts and samples of all weights took 10 % of a step on a GPU, where no log needs them."""
    job = Job(OPTIMIZERS["adamw"])
    job.step(0)
    job.updates.rest()
    job.step(1)
    with torch.no_grad():
        job.net.get_parameter("0.weight").add_(1.0)
    assert job.updates.undisturbed(), "the update did not begin a new record"
    job.updates.settle()
    with torch.no_grad():
        job.net.get_parameter("0.weight").add_(1.0)
    assert not job.updates.undisturbed()


def test_forward_and_backward_disturb_nothing() -> None:
    job = Job(OPTIMIZERS["adamw"])
    job.step(0)
    job.net(torch.ones(4, 6)).sum().backward()
    job.optimizer.zero_grad()
    assert job.updates.undisturbed()


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda job: job.updates.refuse("a step runs in parts"), "a step runs in parts"),
        (lambda job: setattr(job.adapter.state, "scaler", torch.amp.GradScaler("cpu")), "a GradScaler"),
        (lambda job: job.optimizer.register_step_post_hook(lambda *_: None), "another hook"),
        (lambda job: job.optimizer.param_groups[0].update(lr=torch.tensor(0.1)), "setting of the optimizer is a"),
        (lambda job: setattr(job.net[0].weight, "grad", torch.zeros(33, 6).to_sparse()), "gradient of 0.weight"),
    ],
)  # fmt: skip
def test_what_no_log_holds_is_refused_by_name(spoil: Callable[[Job], Any], what: str) -> None:
    job = Job(OPTIMIZERS["adamw"])
    job.updates.comes()
    spoil(job)
    with pytest.raises(StateError, match=what):
        job.updates.take(0)


def test_a_step_that_was_replaced_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(OPTIMIZERS["sgd"])  # with a schedule, which also replaces it
    assert not job.updates.why_not()
    monkeypatch.setattr(job.optimizer, "step", lambda: None)
    assert "was replaced" in job.updates.why_not()


def test_numbers_that_are_none_disturb_nothing() -> None:
    job = Job(OPTIMIZERS["sgd"])
    with torch.no_grad():
        job.net.get_parameter("0.weight").fill_(float("nan"))
    job.updates.settle()
    assert job.updates.undisturbed()


def test_several_optimizers_are_refused() -> None:
    net = nn.Linear(2, 2)
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in net.parameters()]
    assert TorchAdapter(net, optimizers, None, None, {}, seed=0).updates.why_not() == "there are 2 optimizers"


def test_an_update_of_another_model_is_refused() -> None:
    taken = Job(OPTIMIZERS["sgd"]).step(0)
    wrong = taken._replace(gradients=(taken.gradients[0]._replace(shape=(6, 33)),))
    other = taken._replace(gradients=(taken.gradients[0]._replace(name="9.weight"),))
    job = Job(OPTIMIZERS["sgd"])
    for update in (wrong, other):
        with pytest.raises(CheckpointInvalid, match=r"update of step 0: .*\.weight is"):
            job.updates.replay([update])
