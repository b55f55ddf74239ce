"""The variables that decide whether a script makes a collective, found in its source."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.session.steps.deciding_variables import deciding_variables, described

HEAD = """
tick, started, best = 0, 0, {"loss": 1.0}
for epoch in s.epochs(9):
    count = 0
    for step in s.steps(loader):
        with step as batch:
            loss = train(batch)
"""
AFTER: dict[str, tuple[str, ...]] = {
    "if tick > 0 and step.number < started + 3:\n    continue\nreduce()\ntick += 1\nstarted = step.number": (
        "tick",
        "started",
    ),
    "count += 1\nif count % 10 == 0:\n    reduce()": ("count",),
    "number = step.number + 1\nif number % 10 == 0:\n    reduce()": (),
    "done = tick > 4\nif done:\n    reduce()\ntick = tick + 1": ("tick",),
    "if loss < best['loss']:\n    reduce()\n    best['loss'] = loss": ("best",),
    "if self.next <= step.number:\n    reduce()\n    self.next += 10": ("self.next",),
    "if every and step.number % every == 0:\n    reduce()": (),
    "reduce()": (),
    "while (tick := tick + 1) % 3:\n    reduce()": ("tick",),
}  # fmt: skip


@pytest.mark.parametrize("after", AFTER)
def test_names_that_a_step_takes_over_from_the_step_before(tmp_path: Path, after: str) -> None:
    text = HEAD + "".join(f"        {line}\n" for line in after.splitlines())
    (file := tmp_path / "train.py").write_text(text)
    line = next(n for n, code in enumerate(text.splitlines(), 1) if "reduce()" in code)
    assert deciding_variables(((str(file), line),)) == AFTER[after]


def test_a_method_that_counts_its_calls(tmp_path: Path) -> None:
    method = ("self.seen += 1", "if self.seen % 5:", "    return", "reduce()")
    text = "class Meter:\n    def add(self, value):\n" + "".join(f"        {line}\n" for line in method)
    (helper := tmp_path / "meter.py").write_text(text)
    (script := tmp_path / "train.py").write_text(HEAD + "        meter.add(loss)\n")
    places = ((str(helper), 6), (str(script), 8))
    assert deciding_variables(places) == ("self.seen",)
    assert described(places) == "meter.py:6, from train.py:8"


def test_without_source() -> None:
    assert deciding_variables((("<stdin>", 3),)) == () and described((("<stdin>", 3),)) == "<stdin>:3"
