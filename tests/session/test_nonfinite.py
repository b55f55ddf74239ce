"""Gradients with inf or nan: stop, skip, warn once and keep the last finite checkpoint, or ignore."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import NonFiniteError, UnsupportedError, UsageError
from tests.runtime.runs import until
from tests.session.finite_job import BAD, STEPS
from tests.session.launch import run_job

pytestmark = pytest.mark.torch
JOB = str(Path(__file__).with_name("finite_job.py"))
TIMES = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def trained(place: Path, last: int = 12, bad: tuple[int, ...] = (5, 8), what: str = "nan", **how: Any) -> Any:
    """Return the weights after ``last`` steps, in which the losses of the steps ``bad`` are ``what``."""
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(net.parameters(), 0.1)
    with holdfast.session(model=net, optimizer=optimizer, checkpoint=place, **how) as s:
        for step in s.steps(until=last):
            with step:
                loss = net(torch.ones(2, 4) + step.number).square().mean()
                (loss * TIMES[what] if step.number in bad else loss).backward()
                optimizer.step()
                optimizer.zero_grad()
            if step.committed and how.get("keep"):
                until("the save before is written", lambda: not s._saver.busy)
                s.save()
    return [p.detach().clone() for p in net.parameters()]


def steps(place: Path) -> list[int]:
    return sorted(int(p.name[5:13]) for p in place.glob("step-*"))


@pytest.mark.parametrize(
    "what", ["nan", *(pytest.param(what, marks=pytest.mark.more) for what in TIMES if what != "nan")]
)
def test_stop_ends_before_the_update_and_keeps_the_step_before(tmp_path: Path, what: str) -> None:
    with pytest.raises(NonFiniteError, match=r"step 5: the gradients hold inf or nan \(first in weight\)"):
        trained(tmp_path, what=what, nonfinite="stop")
    assert steps(tmp_path) == [5]
    assert all(p.isfinite().all() for p in trained(tmp_path, bad=()))


def test_skip_leaves_the_update_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "holdfast")
    first = trained(tmp_path / "a", last=5, bad=())
    second = trained(tmp_path / "b", last=7, bad=(5, 6), nonfinite="skip")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert [r.getMessage().split(": ")[-1] for r in caplog.records if "left out" in r.getMessage()] == [
        "this update is left out, 1 so far",
        "this update is left out, 2 so far",
    ]


def test_warn_tells_once_and_keeps_the_newest_finite_checkpoint_also_in_the_next_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "holdfast")
    trained(tmp_path, keep=2)
    assert [r.getMessage().startswith("step 5: ") for r in caplog.records] == [True]
    assert steps(tmp_path) == [4, 10, 12]
    caplog.clear()
    trained(tmp_path, last=14, keep=2)
    assert any(
        "was computed from gradients with inf or nan in step 5" in r.getMessage() for r in caplog.records
    )
    assert steps(tmp_path) == [4, 12, 14]
    caplog.clear()
    found = trained(tmp_path, last=4, bad=(), resume=f"{tmp_path}@4")
    assert all(p.isfinite().all() for p in found) and not caplog.records


def test_ignore_looks_at_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(tmp_path, keep=2, nonfinite="ignore")
    assert not caplog.records and steps(tmp_path) == [10, 12]


def test_what_is_none_of_the_four_and_skip_with_named_updates_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nonfinite='no'.*stop, skip, warn, ignore"):
        holdfast.session(model=nn.Linear(1, 1), optimizer=None, nonfinite="no")  # type: ignore[arg-type]
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with (
        pytest.raises(UnsupportedError, match=r"step\.update"),
        holdfast.session(model=net, optimizer=optimizer, checkpoint=tmp_path, nonfinite="skip") as s,
    ):
        for step in s.steps(until=1):
            with step, step.update("first"):
                net(torch.ones(1, 4)).sum().backward()
                optimizer.step()


@pytest.mark.processes
def test_a_shard_of_one_rank_leaves_the_update_of_all_out(tmp_path: Path) -> None:
    done = run_job(tmp_path, 2, JOB)
    assert done.returncode == 0, done.stdout
    assert (
        f"step {BAD}: the gradients hold inf or nan on another rank: this update is left out" in done.stdout
    )
    assert done.stdout.count(f"finite at {STEPS}") == 1, done.stdout
