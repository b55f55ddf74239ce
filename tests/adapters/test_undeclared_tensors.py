"""Tensors of a script that carry state from step to step outside of the session, and tensors that do not."""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from holdfast.frameworks.torch.state.state import TorchState
from holdfast.frameworks.torch.steps.undeclared_tensors import UndeclaredTensors

pytestmark = pytest.mark.torch

Variables = dict[str, object]
Update = Callable[[nn.Module], None]


class Average:
    """An average in a dict whose tensors are replaced."""

    __slots__ = ("__dict__", "decay", "shadow")

    def __init__(self, model: nn.Module) -> None:
        self.decay = 0.9
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def replace(self, model: nn.Module) -> None:
        """Put new tensors into the dict."""
        for name, p in model.named_parameters():
            self.shadow[name] = self.decay * self.shadow[name] + (1 - self.decay) * p.detach()

    def write(self, model: nn.Module) -> None:
        """Write into the tensors, past torch's count of writes."""
        for name, p in model.named_parameters():
            self.shadow[name].data.lerp_(p.detach(), 0.1)


class Center(nn.Module):
    """A loss with a registered center that each step moves."""

    center: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, 3))

    def move(self, model: nn.Module) -> None:
        """Move the center."""
        self.center.add_(next(model.parameters()).mean())


class Wrapped(torch.optim.SGD):
    """An optimizer with an average in an attribute."""

    average: list[torch.Tensor]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))


class Script:
    """A training of three steps, looked at before each of them.

    Args:
        make: makes the script's variables and the update at the end of each step.
        declared: names of variables that are given to the session.
    """

    def __init__(
        self,
        make: Callable[[nn.Module], tuple[Variables, Update]],
        declared: tuple[str, ...] = (),
        model: nn.Module | None = None,
    ) -> None:
        self.model = model or net()
        self.optimizer = Wrapped(self.model.parameters(), lr=0.1, momentum=0.9)
        self.variables, self.update = make(self.model)
        extras: dict[str, Any] = {name: self.variables[name] for name in declared}
        self.state = TorchState(self.model, {"optimizer": self.optimizer}, extras=extras)
        self.undeclared = UndeclaredTensors(self.state, self.model)
        self.renewed: frozenset[str] = frozenset()  # variables whose container each step replaces

    def look(self) -> list[str]:
        """Look at all variables of the script."""
        own = {"model": self.model, "optimizer": self.optimizer, "state": self.state}
        return self.undeclared.changed({**own, **self.variables}, self.renewed)

    def step(self) -> list[str]:
        """Train one step, and look."""
        self.optimizer.zero_grad()
        self.model(torch.ones(4, 3)).square().sum().backward()
        self.optimizer.step()
        self.update(self.model)
        return self.look()


def averaged_module(model: nn.Module) -> tuple[Variables, Update]:
    average = AveragedModel(model)
    return {"ema": average}, average.update_parameters


def replaced(model: nn.Module) -> tuple[Variables, Update]:
    average = Average(model)
    return {"trainer": {"helpers": (average,)}}, average.replace


def written(model: nn.Module) -> tuple[Variables, Update]:
    average = Average(model)
    return {"step": functools.partial(average.write, model)}, average.write


def closed_over(model: nn.Module) -> tuple[Variables, Update]:
    kept = [p.detach().clone() for p in model.parameters()]

    def update(model: nn.Module) -> None:
        torch._foreach_lerp_(kept, [p.detach() for p in model.parameters()], 0.1)

    return {"update": update}, update


def arrays(model: nn.Module) -> tuple[Variables, Update]:
    kept = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}

    def update(model: nn.Module) -> None:
        for name, p in model.named_parameters():
            kept[name] = 0.9 * kept[name] + 0.1 * p.detach().numpy()

    return {"kept": kept}, update


def in_a_namespace(model: nn.Module) -> tuple[Variables, Update]:
    average = AveragedModel(model)
    return {"args": types.SimpleNamespace(ema=average)}, average.update_parameters


def center(model: nn.Module) -> tuple[Variables, Update]:
    loss = Center()
    return {"loss": loss}, loss.move


FOUND = {
    "ema (AveragedModel)": averaged_module,
    "trainer['helpers'][0].shadow['0.weight'] (and 3 tensors more)": replaced,
    "step.shadow['0.weight'] (and 3 tensors more)": written,
    "kept[0] (and 3 tensors more)": closed_over,
    "kept['0.weight'] (and 3 tensors more)": arrays,
    "args.ema (AveragedModel)": in_a_namespace,
    "loss (Center)": center,
}


@pytest.mark.parametrize(("name", "make"), FOUND.items())
def test_state_outside_of_the_session_is_found_at_each_step(
    name: str, make: Callable[[nn.Module], tuple[Variables, Update]]
) -> None:
    script = Script(make)
    assert script.look() == []
    assert [script.step(), script.step()] == [[name], [name]]


def test_an_average_in_an_attribute_of_the_optimizer_is_found() -> None:
    script = Script(lambda model: ({}, lambda model: None))
    average = script.optimizer.average = [p.detach().clone() for p in script.model.parameters()]
    script.update = lambda model: torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], 0.1)
    assert script.look() == []
    assert script.step() == ["optimizer.average[0] (and 3 tensors more)"]


@pytest.mark.parametrize("make", [averaged_module, center])
def test_what_the_session_has_is_not_named(
    make: Callable[[nn.Module], tuple[Variables, Update]],
) -> None:
    script = Script(make, declared=tuple(make(net())[0]))
    assert [script.look(), script.step(), script.step()] == [[], [], []]


def test_the_innermost_module_with_all_changes_is_named() -> None:
    def make(model: nn.Module) -> tuple[Variables, Update]:
        task = nn.Module()
        task.model, task.average = model, AveragedModel(model)
        return {"task": task}, task.average.update_parameters

    script = Script(make)
    assert [script.look(), script.step()] == [[], ["task.average (AveragedModel)"]]


class CountedAverage:
    """YOLO's ``ModelEMA``: an average in an attribute, and a counter that decides on its decay."""

    def __init__(self, model: nn.Module) -> None:
        self.ema = AveragedModel(model)
        self.updates = 0
        self.decay = 0.9

    def update(self, model: nn.Module) -> None:
        """Count, and update the average."""
        self.updates += 1
        self.ema.update_parameters(model)


class CountedModule(nn.Module, CountedAverage):
    """The same as a module."""

    def __init__(self, model: nn.Module) -> None:
        nn.Module.__init__(self)
        CountedAverage.__init__(self, model)


@pytest.mark.parametrize("kind", [CountedAverage, CountedModule])
def test_a_counter_beside_an_average_of_the_session_is_found(kind: type[CountedAverage]) -> None:
    def make(model: nn.Module) -> tuple[Variables, Update]:
        average = kind(model)
        return {"average": average, "module": average.ema}, average.update

    script = Script(make, declared=("module",))
    assert script.look() == [] and not script.undeclared.counters
    for _ in range(2):
        assert script.step() == [] and script.undeclared.counters == ["average.updates"]


def test_a_counter_of_the_training_loop_is_left_alone() -> None:
    """A trainer counts its steps for its own log; it holds the model as well."""

    def make(model: nn.Module) -> tuple[Variables, Update]:
        trainer: Any = CountedAverage(model)
        trainer.model = model
        return {"trainer": trainer, "module": trainer.ema}, trainer.update

    script = Script(make, declared=("module",))
    assert [script.look(), script.step(), script.step()] == [[], [], []] and not script.undeclared.counters


def test_a_counter_beside_a_small_value_of_the_session_is_left_alone() -> None:
    """Regression: a progress bar was named, because its attributes and the session's scaler were None."""

    class Bar:
        def __init__(self) -> None:
            self.scaler, self.total, self.unit, self.n = None, 12, "it", 0

    def make(model: nn.Module) -> tuple[Variables, Update]:
        bar = Bar()

        def update(model: nn.Module) -> None:
            bar.n += 1

        return {"bar": bar, "seen": 12, "unit": "it"}, update

    script = Script(make, declared=("seen", "unit"))
    assert script.look() == script.step() == script.step() == [] and not script.undeclared.counters


def test_a_counter_that_the_session_also_has_is_left_alone() -> None:
    def make(model: nn.Module) -> tuple[Variables, Update]:
        average, counts = CountedAverage(model), {"updates": 0}

        def update(model: nn.Module) -> None:
            average.updates = counts["updates"]
            average.update(model)
            counts["updates"] = average.updates

        return {"average": average, "module": average.ema, "counts": counts}, update

    script = Script(make, declared=("module", "counts"))
    assert [script.look(), script.step(), script.step()] == [[], [], []] and not script.undeclared.counters


def test_plain_state_is_known_by_its_memory() -> None:
    def make(model: nn.Module) -> tuple[Variables, Update]:
        average = Average(model)
        return {"average": average, "shadow": average.shadow}, average.write

    script = Script(make, declared=("shadow",))
    assert [script.look(), script.step(), script.step()] == [[], [], []]


def frozen(model: nn.Module) -> tuple[Variables, Update]:
    return {"teacher": copy.deepcopy(model)}, lambda model: None


def scratch(model: nn.Module) -> tuple[Variables, Update]:
    variables: Variables = {}

    def update(model: nn.Module) -> None:
        variables["old"] = [p.detach().clone() for p in model.parameters()]

    return variables, update


def renewed(model: nn.Module) -> tuple[Variables, Update]:
    variables: Variables = {"ema": {name: p.detach().clone() for name, p in model.named_parameters()}}

    def update(model: nn.Module) -> None:
        old: Any = variables["ema"]
        variables["ema"] = {name: 0.9 * old[name] + 0.1 * p.detach() for name, p in model.named_parameters()}

    return variables, update


def test_an_average_in_a_container_that_follows_from_the_one_before_is_found() -> None:
    """Regression: each step makes a new dict, as it does with the weights before an update, which are no state."""
    script = Script(renewed)
    script.renewed = frozenset({"ema"})
    assert script.look() == []
    assert script.step() == script.step() == ["ema['0.weight'] (and 3 tensors more)"]


def renewed_lists(model: nn.Module) -> tuple[Variables, Update]:
    variables: Variables = {"emas": [[p.detach().clone() for p in model.parameters()] for _ in range(2)]}

    def update(model: nn.Module) -> None:
        old: Any = variables["emas"]
        variables["emas"] = [
            [0.9 * a + 0.1 * p.detach() for a, p in zip(o, model.parameters(), strict=True)] for o in old
        ]

    return variables, update


def renewed_entries(model: nn.Module) -> tuple[Variables, Update]:
    emas = {rate: [p.detach().clone() for p in model.parameters()] for rate in (0.9, 0.99)}

    def update(model: nn.Module) -> None:
        for rate, kept in emas.items():
            emas[rate] = [
                rate * a + (1 - rate) * p.detach() for a, p in zip(kept, model.parameters(), strict=True)
            ]

    return {"emas": emas}, update


@pytest.mark.parametrize("make", [renewed_lists, renewed_entries])
def test_averages_at_several_rates_are_found(make: Callable[[nn.Module], tuple[Variables, Update]]) -> None:
    """Regression: the average lies two containers deep (diffusion models), and was taken for scratch."""
    script = Script(make)
    script.renewed = frozenset({"emas"})
    script.look()
    found = script.step(), script.step()
    assert all(len(each) == 1 and each[0].startswith("emas[0") for each in found)


def sums(model: nn.Module) -> tuple[Variables, Update]:
    total = torch.zeros(2)  # of the shape of a bias
    history = np.zeros(100)

    def update(model: nn.Module) -> None:
        total.add_(1)
        history[:] += 1

    return {"total": total, "history": history, "metrics": {"loss": total}}, update


@pytest.mark.parametrize("make", [frozen, scratch, sums])
def test_what_is_no_copy_of_weights_or_does_not_change_is_left_alone(
    make: Callable[[nn.Module], tuple[Variables, Update]],
) -> None:
    script = Script(make)
    assert [script.look(), script.step(), script.step(), script.step()] == [[], [], [], []]


def conjugated(model: nn.Module) -> tuple[Variables, Update]:
    module = nn.Module()
    module.register_buffer("phase", torch.tensor([1 + 2j, 3 - 4j]).conj())
    module.register_buffer("sign", torch.tensor([1 + 2j, 3 - 4j]).conj().imag)

    def update(model: nn.Module) -> None:
        module.get_buffer("sign").mul_(2)

    return {"module": module}, update


def test_views_that_conjugate_and_negate_are_read() -> None:
    script = Script(conjugated)
    assert [script.look(), script.step()] == [[], ["module (Module)"]]


def test_weights_that_forward_computes_are_no_state() -> None:
    model = nn.Sequential(
        *(torch.nn.utils.spectral_norm(each) if isinstance(each, nn.Linear) else each for each in net())
    )
    script = Script(lambda model: ({}, lambda model: None), model=model)
    assert [script.look(), script.step(), script.step()] == [[], [], []]


def test_nothing_is_kept_alive() -> None:
    script = Script(averaged_module)
    script.look()
    gone = weakref.ref(script.variables.pop("ema"))
    script.update = lambda model: None
    assert gone() is None
    assert script.step() == []


class Standin:
    """A proxy that may not be asked."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise AssertionError

    def __getattr__(self, name: str) -> object:
        raise AssertionError(name)


class Lazy(dict[str, object]):
    """A mapping that imports what it maps to."""

    def items(self) -> Any:
        """Raise, as an import of a missing library does."""
        raise AssertionError

    __iter__ = __len__ = items


def test_no_code_of_the_script_runs() -> None:
    """Regression: a registry of transformers imported all its models, some of which could not be imported."""
    script = Script(
        lambda model: ({"proxy": Standin(), "registry": Lazy(a=[1]), "cyclic": []}, lambda model: None)
    )
    script.variables["cyclic"].append(script.variables)  # type: ignore[attr-defined]
    assert [script.look(), script.step()] == [[], []]
