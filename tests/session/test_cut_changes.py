"""Code after a block that changes the training after a collective: a lost rank would cut it off, so it is refused."""

from __future__ import annotations

import json
import linecache
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.session.variables.cut_changes import CutChange, cut_change
from holdfast.session.variables.deciding_variables import places_in_script
from tests.session.launch import run_job

JOB = str(Path(__file__).with_name("cut_job.py"))

SCRIPT = """
import contextlib, functools
import torch.distributed as dist
from unittest.mock import MagicMock as Thing

class Step(contextlib.nullcontext):
    __module__ = "holdfast.session.steps.step"
    committed, number = True, 0

class Sharded(Thing):
    __module__ = "torch.distributed.fsdp"

class Session:
    def steps(self):
        return [Step()]

s, scheduler, model, average, log, optimizer = Session(), Thing(), Thing(), Thing(), Thing(), Thing()
best, tracker, sharded = {{"loss": 0.0}}, Thing(), Sharded()

def mean(value):
    dist.all_reduce(value)
    return value

def evaluate(value):
    total = mean(value)
    log.write(total)
    return total

class Net:
    def __init__(self):
        self.training, self._modules = True, {{}}
    def forward(self, x):
        if self.training and dist.is_available():
            mean(x)
            scheduler.step()
        elif not self.training:
            log.write(x)
    def eval(self):
        self.training = False
    def train(self):
        self.training = True

net = Net()

def follow(source):
    for old, new in zip(average.parameters(), source.parameters()):
        old.mul_(0.9).add_(new)

def train(step, found):
    with step:
        found()
{inner}

def learn(steps, found):
    for step in steps:
        with step:
            found()

def main(found):
    loss = Thing()
    for step in s.steps():
{code}
{end}
"""
BLOCK = "with step:\n    found()\n"
CALL = "train(step, found)\n"
IN_LOOP = """
for part in [1, 2]:
    scheduler.step()
    mean(loss)
"""
FINALLY = """
try:
    with step:
        found()
    mean(loss)
finally:
    scheduler.step()
"""
SECTION = """
with contextlib.nullcontext():
    dist.barrier()
scheduler.step()
"""

CUT: dict[str, tuple[str, CutChange | None]] = {
    "a rate after a mean": (f"{BLOCK}mean(loss)\nscheduler.step()", CutChange("dist.all_reduce()", "", "")),
    "a rate by a mean": (f"{BLOCK}scheduler.step(mean(loss))", CutChange("dist.all_reduce()", "", "")),
    "in a condition": (
        f"{BLOCK}if step.committed:\n    if step.number % 2:\n        evaluate(loss)\n    scheduler.step()",
        CutChange("dist.all_reduce()", "", ""),
    ),
    "an average of weights": (
        f"{BLOCK}dist.barrier()\nfollow(model)",
        CutChange("dist.barrier()", "old.mul_()", ""),
    ),
    "a setting": (
        f"{BLOCK}mean(loss)\nfor group in optimizer.param_groups:\n    group['lr'] = 0.1",
        CutChange("dist.all_reduce()", "group['lr']", ""),
    ),
    "state": (f"{BLOCK}best['loss'] = mean(loss)", CutChange("dist.all_reduce()", "best['loss']", "")),
    "an attribute of state": (
        f"{BLOCK}mean(loss)\ntracker.best = 1",
        CutChange("dist.all_reduce()", "tracker.best", ""),
    ),
    "an item of a list": (
        f"{BLOCK}mean(loss)\ntracker.best.append(1)",
        CutChange("dist.all_reduce()", "tracker.best.append()", ""),
    ),
    "only read": (f"{BLOCK}mean(loss)\nlog.write(tracker.best.item())", None),
    "in a loop": (BLOCK + IN_LOOP, CutChange("dist.all_reduce()", "", "")),
    "in the end of try": (FINALLY, CutChange("dist.all_reduce()", "", "")),
    "in another block": (BLOCK + SECTION, CutChange("dist.barrier()", "", "")),
    "in the caller": (f"{CALL}mean(loss)\nscheduler.step()", CutChange("dist.all_reduce()", "", "")),
    "after a sharded module": (f"{BLOCK}sharded(loss)\nscheduler.step()", CutChange("sharded()", "", "")),
    "in training": (
        f"{BLOCK}net.eval()\nnet.train()\nnet.forward(loss)",
        CutChange("dist.all_reduce()", "", ""),
    ),
    "in evaluation": (f"{BLOCK}net.eval()\nnet.forward(loss)", None),
    "before the collective": (f"{BLOCK}scheduler.step()\nmean(loss)", None),
    "only a log": (f"{BLOCK}log.write(mean(loss))", None),
    "no collective": (f"{BLOCK}functools.reduce(max, [1])\nscheduler.step()", None),
    "before the block": (
        f"if dist.is_initialized():\n    mean(loss)\nscheduler.step()\n{BLOCK}",
        None,
    ),
}


def indented(code: str, depth: int) -> str:
    return "\n".join(" " * depth + line for line in code.splitlines())


def found_in(tmp_path: Path, *, code: str, inner: str = "", end: str = "") -> CutChange | None:
    """Run the script, and return what the search finds in the block of its step."""
    text = SCRIPT.format(code=indented(code, 8), inner=indented(inner, 4), end=indented(end, 4))
    (file := tmp_path / "script.py").write_text(text)
    linecache.checkcache()
    module = types.ModuleType("script")
    exec(compile(text, str(file), "exec"), vars(module))
    seen: list[CutChange | None] = []

    def search() -> None:
        places = tuple(each for each in places_in_script() if each[0] == str(file))
        seen.append(cut_change(places, frozenset(), {'best["loss"]', "tracker.best"}))
        raise Searched

    main: Callable[[Callable[[], None]], None] = module.main
    with pytest.raises(Searched):
        main(search)
    return seen[0]


class Searched(Exception):
    """Ends the script after the search."""


@pytest.mark.parametrize("form", CUT)
def test_a_change_after_a_collective_is_found(tmp_path: Path, form: str) -> None:
    code, expected = CUT[form]
    found = found_in(tmp_path, code=code)
    assert (found and found.collective) == (expected and expected.collective)
    if found and expected:
        assert found.change == (expected.change or "scheduler.step()") and found.block.startswith(
            "script.py:"
        )


def test_a_change_in_the_function_of_the_block_is_found(tmp_path: Path) -> None:
    found = found_in(tmp_path, code=CALL, inner="mean(step)\nscheduler.step()")
    assert found and (found.collective, found.change) == ("dist.all_reduce()", "scheduler.step()")


def test_a_loop_over_steps_may_get_them_as_an_argument(tmp_path: Path) -> None:
    """Regression: the code after the loop, which runs again after a fault, was refused."""
    assert (
        found_in(tmp_path, code="break", end="learn(s.steps(), found)\nmean(loss)\nscheduler.step()") is None
    )


def test_code_after_the_loop_is_no_code_after_the_block(tmp_path: Path) -> None:
    assert found_in(tmp_path, code=BLOCK, end="mean(loss)\nscheduler.step()") is None


def run(where: Path, way: str, *more: str) -> tuple[int, str, list[object]]:
    """Run the job. Return its exit code, its output, and the result of each rank."""
    where.mkdir()
    done = run_job(where, 2, JOB, "--way", way, *more, "--result", "result")
    return done.returncode, done.stdout, [json.loads(p.read_text()) for p in sorted(where.glob("result/*"))]


@pytest.mark.torch
@pytest.mark.processes
def test_a_schedule_after_a_collective_is_refused_in_the_first_step(tmp_path: Path) -> None:
    """Regression: after a kill the survivor missed one move of its schedule, and the job ended with other weights."""
    code, output, told = run(tmp_path / "job", "behind")
    assert code == 3 and not told, output
    assert "are not searched" not in output, output
    assert "(plateau.step()) after a collective (dist.all_reduce(); block at cut_job.py:" in output, output


@pytest.mark.torch
@pytest.mark.processes
@pytest.mark.parametrize("way", ["first", "block", "validated"])
def test_a_schedule_that_no_collective_precedes_is_exact_after_a_kill(tmp_path: Path, way: str) -> None:
    code, output, calm = run(tmp_path / "calm", way)
    assert code == 0 and len(calm) == 2, output
    code, output, told = run(tmp_path / "killed", way, "--kill", "5")
    assert code == 0 and (tmp_path / "killed/struck").exists(), output
    assert told == calm and "0 steps lost" in output, output
