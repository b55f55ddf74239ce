"""What a script only reports begins again in a new process: that process names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.session.variables.reported_variables import listed
from tests.session.launch import run_job

JOB = str(Path(__file__).with_name("reported_job.py"))
AGAIN = "in this process (reported_job.py"
LACKS = "reports lack the steps before"
SEES = "the code after this loop sees initial values"


SUMMED = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast
from tests.others.beat import beat

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())
with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
    for epoch in s.epochs(2):
        total = 0.0
        for step in s.steps(torch.utils.data.DataLoader(torch.ones(4, 4))):
            with step as batch:
                beat(s.step)
                optimizer.zero_grad()
                parts = 0.0
                for part in (batch, batch):
                    loss = model(part).square().mean()
                    parts += loss.item()
                    loss.backward()
                optimizer.step()
            if step.committed:
                total += parts
        print(total)
"""

ATTACHED = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast
from tests.others.beat import beat


class Meter:
    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, value):
        self.total += value
        self.count += 1

    def share(self):
        shared = torch.tensor([self.total, self.count])
        dist.all_reduce(shared)
        self.total, self.count = shared.tolist()


class Logger:
    def __init__(self):
        self.meters = {"loss": Meter(), "lr": Meter()}

    def update(self, **values):
        for name, value in values.items():
            self.meters[name].update(value)

    def share(self):
        for meter in self.meters.values():
            meter.share()


def train(s, loader):
    logger = s.attach("train", Logger())
    for step in s.steps(loader):
        with step as batch:
            beat(s.step)
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
        if step.committed:
            values = {"loss": loss.item()}
            logger.update(**values, lr=0.1)
    logger.share()
    return {name: meter.total for name, meter in logger.meters.items()}


dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())
with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
    for epoch in s.epochs(2):
        print(train(s, torch.utils.data.DataLoader(torch.ones(4, 4))))
"""

FIRST_USE = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast
from tests.others.beat import beat


class Learner:
    def __init__(self):
        self.model = DistributedDataParallel(torch.nn.Linear(4, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def feed(self, batch):
        if "input" in batch:
            self.input = batch["input"]

    def update(self):
        self.optimizer.zero_grad()
        self.model(self.input).square().mean().backward()
        self.optimizer.step()

    def evaluate(self, step):
        if not hasattr(self, "record"):
            self.record = {"loss": {"best": float("inf"), "at": -1}}
        loss = self.model.module(torch.ones(4, 4)).square().mean().item()
        if loss <= self.record["loss"]["best"]:
            self.record["loss"]["best"] = loss
            self.record["loss"]["at"] = step
        del self.input


dist.init_process_group("gloo")
learner = Learner()
data = [{"input": torch.full((4,), float(each))} for each in range(32)]
with holdfast.session(model=learner.model, optimizer=learner.optimizer, checkpoint="ckpt") as s:
    for step in s.steps(torch.utils.data.DataLoader(data, batch_size=2)):
        with step as batch:
            beat(s.step)
            learner.feed(batch)
            learner.update()
        if step.committed and s.step % 4 == 0:
            learner.evaluate(s.step)
"""


def test_an_object_stands_for_several_attributes() -> None:
    names = ["losses.sum", "losses.count", 'best["loss"]', "self.count", "self.meter.sum", "end"]
    assert listed(names[:4]) == ("losses, best, self.count", 3)
    assert listed(names) == ("losses, best, self.count, self.meter.sum and 1 more", 5)
    assert listed(["learner.record"]) == ("learner.record", 1), "the learner has the model as well"


@pytest.mark.torch
@pytest.mark.processes
@pytest.mark.parametrize("epochs", [(), ("--epochs",)], ids=["steps", "epochs"])
@pytest.mark.parametrize(("place", "effect"), [("step", LACKS), ("end", SEES)])
def test_a_process_that_begins_late_names_what_begins_again(
    tmp_path: Path, epochs: tuple[str, ...], place: str, effect: str
) -> None:
    """Regression: the best loss and the means of a replacement lacked the steps before, without a word."""
    done = run_job(tmp_path, 2, JOB, "--kill", "0", place, *epochs)
    lines = [line for line in done.stdout.splitlines() if AGAIN in line]
    assert done.returncode == 0 and len(lines) == 1, done.stdout
    assert "best, grads, losses, meter and 2 more begin again" in lines[0] and effect in lines[0], lines


@pytest.mark.torch
@pytest.mark.processes
def test_a_replacement_of_another_rank_names_it_in_its_log(tmp_path: Path) -> None:
    done = run_job(tmp_path, 2, JOB, "--kill", "1", "step")
    logs = [path.read_text() for path in sorted(tmp_path.glob("runs/*/attempt-000/rank-*.log"))]
    assert done.returncode == 0 and [AGAIN in text for text in logs] == [False, True], (done.stdout, logs)


@pytest.mark.torch
@pytest.mark.processes
@pytest.mark.parametrize(
    "kill", [(), ("--kill", "0", "step"), ("--kill", "0", "end")], ids=["calm", "step", "end"]
)
def test_nothing_is_named_that_the_session_keeps(tmp_path: Path, kill: tuple[str, ...]) -> None:
    done = run_job(tmp_path, 2, JOB, "--keep", *kill)
    assert done.returncode == 0 and AGAIN not in done.stdout, done.stdout


@pytest.mark.torch
@pytest.mark.processes
def test_nothing_is_named_without_a_fault(tmp_path: Path) -> None:
    done = run_job(tmp_path, 2, JOB)
    assert done.returncode == 0 and AGAIN not in done.stdout, done.stdout


@pytest.mark.torch
@pytest.mark.processes
def test_a_sum_that_each_epoch_begins_again_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: without a word, a replacement reported the mean of an epoch from its own steps (Accelerate)."""
    (tmp_path / "train.py").write_text(SUMMED)
    monkeypatch.setenv("KILL", "0:6")
    done = run_job(tmp_path, 2, "train.py")
    assert done.returncode == 0 and "holdfast: total begins again in this process" in done.stdout, done.stdout


@pytest.mark.torch
@pytest.mark.processes
def test_the_meters_in_an_attached_object_are_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the meters of a logger that was attached were named, although they had their values (VAR)."""
    (tmp_path / "train.py").write_text(ATTACHED)
    monkeypatch.setenv("KILL", "0:6")
    done = run_job(tmp_path, 2, "train.py")
    assert done.returncode == 0 and "in this process (train.py" not in done.stdout, done.stdout


@pytest.mark.torch
@pytest.mark.processes
def test_a_record_that_an_object_makes_at_its_first_use_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a replacement does not have it yet, so it was not named (BasicSR's best metrics).

    The input of a block, which each block sets, is not there either.
    """
    (tmp_path / "train.py").write_text(FIRST_USE)
    monkeypatch.setenv("KILL", "0:6")
    done = run_job(tmp_path, 2, "train.py")
    assert done.returncode == 0 and "holdfast: learner.record begins again in this process" in done.stdout, (
        done.stdout
    )
