"""Meters and metrics of libraries: their content, and the calls that change them."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import UsageError
from holdfast.session.variables.deciding_variables import lasting_variables, placed_variables
from holdfast.session.variables.library_meters import changes_meter, meter_states
from holdfast.session.variables.unassigned_variables import NotComputed, _told

torch = pytest.importorskip("torch")

from holdfast.frameworks.torch.state.state import TorchState  # noqa: E402
from tests.session.library import AverageMeter, Metric  # noqa: E402

STEPS = """
for epoch in s.epochs(9):
    for step in s.steps(loader):
        with step as batch:
            loss = train(batch)
            loss.backward()
            optimizer.step()
"""
LOOP = f"""{STEPS}        meter.update(loss)
    scheduler.step(meter.compute())
"""
EVALUATED = f"""{STEPS}    meter.reset()
    for batch in other:
        meter(evaluated(batch))
    scheduler.step(meter.compute())
"""


class Own(AverageMeter):  # type: ignore[misc]
    """A meter of the script: its methods are inlined, and only its base is of a library."""

    def update(self, value: float) -> None:
        """Add ``value``."""
        self.sum += 2 * value


@pytest.mark.parametrize("meter", [AverageMeter(), Metric()])
@pytest.mark.parametrize(
    ("text", "found"), [(LOOP, True), (LOOP.replace(".update", ""), True), (EVALUATED, False)]
)
def test_a_meter_that_a_schedule_depends_on(tmp_path: Path, meter: Any, text: str, found: bool) -> None:
    """Regression: its sums began again in a replacement, and the learning rate was another one: exit code 0."""
    (file := tmp_path / "train.py").write_text(text)
    place = str(file), 7
    names = {each.name.split(".")[0] for each in placed_variables((place,), update=True)}
    assert ("meter" in names) == (found and meter is not None)


def test_no_code_of_the_script_runs_in_the_search(tmp_path: Path) -> None:
    """Regression: the attribute of a variable that no block has assigned was read, with a warning."""
    metrics = NotComputed("metrics")
    (file := tmp_path / "train.py").write_text(f"{LOOP}    print(metrics.items())\n")
    assert placed_variables(((str(file), 7),), update=True) == () and metrics is not None
    assert "metrics" not in _told


def test_a_meter_is_reset_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    meter, kept = Metric(), []
    for name, text in {"sums.py": LOOP, "resets.py": f"{LOOP}    meter.reset()\n"}.items():
        (file := tmp_path / name).write_text(text)
        kept.append("meter" in lasting_variables(((str(file), 7),)))
    assert kept == [True, False] and meter is not None


def test_the_content_of_meters() -> None:
    meter, metric = AverageMeter(), Metric()
    metric.update(2.0)
    both = torch.nn.ModuleDict({"a": metric, "b": Metric()})
    assert meter_states(meter) == {"sum": 0.0, "count": 0}
    assert meter_states(metric) == {"total": torch.tensor(2.0)}
    assert list(meter_states(both) or ()) == ["a.total", "b.total"]
    assert meter_states(torch.nn.ModuleDict({"a": metric, "b": torch.nn.Linear(1, 1)})) is None
    scaler = torch.amp.GradScaler("cpu")
    others: list[object] = [scaler, torch.nn.MSELoss(), torch.zeros(2), 3, {}, Path(), Namespace(a=1)]
    assert all(meter_states(each) is None for each in others)


def test_methods_of_the_script_are_inlined_and_not_counted() -> None:
    assert changes_meter(AverageMeter(), "update")
    assert not changes_meter(Own(), "update") and not changes_meter(AverageMeter(), "sum")


def test_a_metric_in_the_state_that_keeps_nothing_is_refused() -> None:
    """Regression: a replacement began with an empty metric, although the session had it."""
    model, kept = torch.nn.Linear(1, 1), Metric()
    optimizers = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with pytest.raises(
        UsageError, match=r"state=\{'meter': ...\}: the state_dict\(\) of this Metric is empty"
    ):
        TorchState(model, optimizers, extras={"meter": Metric()})
    kept.register_buffer("total", kept.__dict__.pop("total"))
    TorchState(model, optimizers, extras={"meter": kept, "loss": torch.nn.MSELoss()})
