"""The variables that the code before a loop sets and its updates use, found in the source of a script that runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from holdfast.session.variables.deciding_variables import all_places
from holdfast.session.variables.loop_inputs import InputOrigin, loop_inputs, unwritten_variables


class Recorder:
    """A stand-in for ``holdfast`` and its session, which searches where the loop begins."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.settings: list[str] = []

    def session(self) -> AbstractContextManager[Recorder]:
        return nullcontext(self)

    def epochs(self, count: int) -> Iterator[int]:
        yield from range(count)

    def steps(self, until: int = 0) -> Iterator[int]:
        found = loop_inputs(all_places())
        kinds = {InputOrigin.EPOCH: "", InputOrigin.SESSION: " outside"}
        self.found = [each.variable.name + kinds[each.origin] for each in found if each.origin in kinds]
        self.settings = [each.variable.name for each in found if each.origin is InputOrigin.SETTING]
        yield 0


BLOCK = """
        for step in s.steps():
            loss = model(step, {})
            loss.backward()
"""
FUNCTION = """
def train(s, model, target, weight=1):
    for step in s.steps():
        model(step, target * weight).backward()

"""
IN_FUNCTION = FUNCTION + "with holdfast.session() as s:\n    for epoch in s.epochs(1):\n"
TRAINER = """
class Trainer:
    def __init__(self, s):
        self.s, self.rate = s, 0.1

    def cluster(self):
        self.targets = 1

    def train(self):
        for step in self.s.steps():
            model(step, self.targets, self.rate).backward()

    def fit(self):
        for epoch in self.s.epochs(1):
            self.cluster()
            self.train()

with holdfast.session() as s:
    Trainer(s).fit()
"""
SESSION = "with holdfast.session() as s:\n"
EPOCHS = SESSION + "    for epoch in s.epochs(1):\n"
USED = BLOCK.format("target")


def computing(value: str) -> str:
    """Return the loop with an assignment of ``value`` to the variable that its update uses."""
    return USED.replace("loss =", f"target = {value}\n            loss =")


SCRIPTS = {
    "set in the epoch": (EPOCHS + "        target = cluster(model)" + USED, ["target"]),
    "set at some epochs": (
        "target = 0\n" + EPOCHS + "        if epoch % 5 == 0:\n            target = cluster(model)" + USED,
        ["target"],
    ),
    "through another variable": (
        EPOCHS + "        base = cluster(model)" + computing("base + 1"),
        ["base"],
    ),
    "set after the begin of the session": (
        SESSION + "    target = cluster(model)\n    for epoch in s.epochs(1):" + USED,
        ["target outside"],
    ),
    "an argument that is set after the begin of the session": (
        FUNCTION
        + SESSION
        + "    found = cluster(model)\n    for epoch in s.epochs(1):\n        train(s, model, found)\n",
        ["target outside"],
    ),
    "a setting": ("target = 1\n" + EPOCHS + "        pass" + USED, []),
    "the end of the loop": (
        "target = 9\n" + EPOCHS + "        pass" + BLOCK.format("step").replace("steps()", "steps(until=target)"),
        [],
    ),
    "a setting in an object": (
        "args = type('', (), {'target': 1})\n" + EPOCHS + "        shown = 1" + BLOCK.format("args.target"),
        [],
    ),
    "an attribute that the epoch sets": (
        "args = type('', (), {'target': 1})\n" + EPOCHS + "        args.target = 2" + BLOCK.format("args.target"),
        ["args.target"],
    ),
    "set in the loop": (
        EPOCHS + "        target = 0" + computing("cluster(step)"),
        [],
    ),
    "not used by the update": (EPOCHS + "        shown = cluster(model)" + BLOCK.format("1"), []),
    "the rate of an epoch": (
        EPOCHS + "        lr = 0.1 ** epoch" + BLOCK.format("1") + "            groups[0]['lr'] = lr\n",
        ["lr"],
    ),
    "an argument": (IN_FUNCTION + "        found = cluster(model)\n        train(s, model, found)\n", ["target"]),
    "an argument by name": (
        IN_FUNCTION + "        found = cluster(model)\n        train(s, model, 1, weight=found)\n",
        ["weight"],
    ),
    "an argument that the call computes": (IN_FUNCTION + "        train(s, model, cluster(model))\n", ["target"]),
    "an argument that is a setting": ("found = 1\n" + IN_FUNCTION + "        train(s, model, found)\n", []),
    "in the function of the loop": (
        FUNCTION.replace("    for", "    scale = cluster(model)\n    for").replace("* weight", "* scale")
        + "with holdfast.session() as s:\n    for epoch in s.epochs(1):\n        train(s, model, 1)\n",
        ["scale"],
    ),
    "an attribute that a method of the epoch sets": (TRAINER, ["self.targets"]),
    "an attribute that is called": (
        TRAINER.replace("model(step, self.targets", "model(step, self.targets(step)").replace("= 1", "= model"),
        ["self.targets"],
    ),
    "a method of a variable": (
        EPOCHS + "        target = cluster(model)" + BLOCK.format("target.bit_length()"),
        ["target", "target.bit_length"],
    ),
}  # fmt: skip


SETTINGS = {
    "a setting",
    "an argument by name",
    "an argument that is a setting",
    "in the function of the loop",
}


class Model:
    """A model whose calls give something with ``backward()``."""

    def __call__(self, *_: object) -> Model:
        return self

    def backward(self) -> None:
        pass


@pytest.mark.parametrize("name", SCRIPTS)
def test_variables_that_code_before_the_loop_sets_and_updates_use(tmp_path: Path, name: str) -> None:
    text, names = SCRIPTS[name]
    (file := tmp_path / "train.py").write_text(text)
    recorder = Recorder()
    variables: dict[str, Any] = {
        "holdfast": recorder,
        "model": Model(),
        "cluster": lambda _: 1,
        "groups": [{}],
    }
    exec(compile(text, str(file), "exec"), variables)
    assert recorder.found == names
    assert ("target" in recorder.settings) == (name in SETTINGS)


INNER_LOOPS = """
def update(whole):
    for part in halves(whole):
        (model(part) * scale * whole.sum()).backward()
        optimizer.step()

def train(s):
    for epoch in s.epochs(2):
        for step in s.steps(loader):
            with step as batch:
                target = made(batch)
                for module in phases:
                    (module(batch, target) * scale).backward()
                    optimizer.step()
                update(batch)
"""


def test_what_a_block_writes_ahead_of_an_inner_loop_is_no_constant(tmp_path: Path) -> None:
    """Regression: the batch of a block with a loop over phases counted as a constant, and its change was an alarm."""
    (file := tmp_path / "train.py").write_text(INNER_LOOPS)
    for places in (((str(file), 14),), ((str(file), 5), (str(file), 15))):
        names = {each.name for each in unwritten_variables(places)}
        assert "scale" in names and names.isdisjoint({"batch", "target", "whole", "part", "module"}), names
