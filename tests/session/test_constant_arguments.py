"""Branches of a function that the constant arguments of its call exclude: the search leaves them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.session.variables.deciding_variables import deciding_variables

TEXT = """
from enum import Enum


class Stage(Enum):
    TRAIN = 1
    VALID = 2


def finish(stage, loss, quiet=False):
    if {test}:
        print(loss)
    else:
        scheduler.step(loss)


def renamed(stage, loss):
    stage = other
    if stage == "train":
        print(loss)
    else:
        scheduler.step(loss)


def main():
    for epoch in s.epochs(9):
        for step in s.steps(loader):
            with step as batch:
                loss = train(batch)
                loss.backward()
                optimizer.step()
            mean = mean + loss
        {call}
        mean = 0.0
"""


@pytest.mark.parametrize(
    ("test", "call", "decides"),
    [
        ("stage == Stage.TRAIN", "finish(Stage.TRAIN, mean)", False),
        ("stage == Stage.TRAIN", "finish(Stage.VALID, mean)", True),
        ("stage is Stage.VALID", "finish(stage=Stage.TRAIN, loss=mean)", True),
        ("stage != Stage.VALID", "finish(Stage.TRAIN, mean)", False),
        ("stage == 'train'", "finish('train', mean)", False),
        ("stage == 'train'", "finish('valid', mean)", True),
        ("stage == 'train'", "finish(stages[epoch], mean)", True),
        ("quiet", "finish(Stage.TRAIN, mean, quiet=True)", False),
        ("not quiet", "finish(Stage.TRAIN, mean, True)", True),
        ("stage == 'train' and quiet", "finish('train', mean, True)", False),
        ("", "renamed('train', mean)", True),
    ],
)
def test_a_branch_that_the_arguments_exclude_decides_about_nothing(
    tmp_path: Path, test: str, call: str, decides: bool
) -> None:
    """Regression: the mean loss of training was refused, although only that of the validation sets the rate."""
    text = TEXT.format(test=test or "stage", call=call)
    (file := tmp_path / "train.py").write_text(text)
    names: dict[str, Any] = {"__name__": "train"}
    exec(compile(text, str(file), "exec"), names)
    Stage, finish, renamed, mean = names["Stage"], names["finish"], names["renamed"], 0.5
    line = next(n for n, each in enumerate(text.splitlines(), 1) if each.endswith("optimizer.step()"))
    found = deciding_variables(((str(file), line),), update=True)
    assert ("mean" in found) == decides and all((Stage, finish, renamed, mean)), found
