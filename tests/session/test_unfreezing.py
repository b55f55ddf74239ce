"""Groups that are added to an optimizer in training: layers that are unfrozen one after the other."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import CheckpointMismatch, StateError
from holdfast.frameworks.torch.state.snapshot import Snapshot
from holdfast.frameworks.torch.state.state import TorchState
from tests.adapters.test_state import copy_over, same
from tests.session.launch import run_job
from tests.session.unfreeze_job import STEPS

pytestmark = pytest.mark.torch
JOB = str(Path(__file__).with_name("unfreeze_job.py"))
UNFREEZE_AT = 3


class Job:
    """A training with a trained head and a body that is frozen at first."""

    def __init__(self, *, all_groups: bool = False) -> None:
        torch.manual_seed(4)
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 1)
        self.net = nn.Sequential(self.body, nn.Tanh(), self.head)
        self.body.requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=0.1)
        self.data = [torch.arange(6.0).reshape(2, 3) + n for n in range(9)]
        if all_groups:
            self.unfreeze()

    def unfreeze(self) -> None:
        """Unfreeze the body, as a script does once."""
        self.body.requires_grad_(True)
        self.optimizer.add_param_group({"params": list(self.body.parameters()), "lr": 0.01})

    def update(self, x: torch.Tensor) -> None:
        """Run one ordinary step."""
        (self.net(x) - 1).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, until: int, folder: Path | None = None, *, inside: bool = False) -> None:
        """Train. The body joins at a step, before its block or inside the block."""
        with holdfast.session(model=self.net, optimizer=self.optimizer, checkpoint=folder) as s:
            for step in s.steps(self.data, until=until):
                if step.number == UNFREEZE_AT and not inside and not step.again:
                    self.unfreeze()
                with step as x:
                    if step.number == UNFREEZE_AT and inside:
                        self.unfreeze()
                    self.update(x)

    def state(self) -> TorchState:
        """Return the state that is saved."""
        return TorchState(self.net, {"default": self.optimizer})

    def same(self, other: Job) -> bool:
        """Return whether weights, groups and state are equal, bit for bit."""
        return same(self.net.state_dict(), other.net.state_dict()) and same(
            self.optimizer.state_dict(), other.optimizer.state_dict()
        )


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("cut", [4, *(pytest.param(cut, marks=pytest.mark.more) for cut in (3, 6))])
def test_goes_on_bit_for_bit(tmp_path: Path, cut: int, inside: bool) -> None:
    whole, again, twice = Job(), Job(), Job()
    whole.train(9, inside=inside)
    Job().train(cut, tmp_path, inside=inside)
    again.train(7, tmp_path, inside=inside)
    twice.train(9, tmp_path, inside=inside)
    assert twice.same(whole) and len(twice.optimizer.param_groups) == 2
    assert all(p.requires_grad for p in twice.net.parameters())


def test_a_script_that_builds_all_of_them_by_now(tmp_path: Path) -> None:
    whole, again = Job(), Job(all_groups=True)
    whole.train(8)
    Job().train(5, tmp_path)
    again.train(8, tmp_path)
    assert again.same(whole)
    twice = Job(all_groups=True)
    twice.train(9, tmp_path)
    with pytest.raises(CheckpointMismatch, match="has 1 parameter groups, the checkpoint 2\n"):
        Job().train(9, tmp_path)


def test_other_groups_are_refused(tmp_path: Path) -> None:
    Job().train(5, tmp_path)
    more = Job(all_groups=True)
    more.optimizer.add_param_group({"params": []})
    with pytest.raises(CheckpointMismatch, match="has 3 parameter groups, the checkpoint 2, of which 1 were"):
        more.train(6, tmp_path)
    other = Job()
    other.optimizer = torch.optim.AdamW(other.net.parameters(), lr=0.1)
    with pytest.raises(CheckpointMismatch, match=r"in another group is 0\.bias, 0\.weight"):
        other.train(6, tmp_path)


def test_a_newcomer_and_a_survivor_that_goes_back() -> None:
    grown, newcomer, before = Job(), Job(), Job()
    source, target, early = grown.state(), newcomer.state(), before.state()
    for job in (grown, before):
        job.update(job.data[0])
    grown.unfreeze()
    grown.update(grown.data[1])
    copy_over(source, target)
    assert newcomer.same(grown)
    for job in (grown, newcomer):
        job.update(job.data[2])
    assert newcomer.same(grown)
    copy_over(early, source)
    assert grown.same(before)
    grown.unfreeze()  # the step is run again
    copy_over(source, target)
    assert newcomer.same(grown)


def test_an_aborted_step_takes_it_back() -> None:
    job = Job()
    state = job.state()
    job.update(job.data[0])
    snapshot = Snapshot(state)
    for _ in range(2):
        snapshot.take()
        before = copy.deepcopy(job.optimizer.state_dict())
        job.unfreeze()
        snapshot.undo.record(job.optimizer)
        job.update(job.data[1])
        frozen: Any = state.collect(snapshot.copies()).values["optimizers"]["default"]
        assert frozen["members"] == [["2.weight", "2.bias"]] and frozen["added"] == []
        assert set(frozen["state"]) == {"2.weight", "2.bias"} and len(frozen["groups"]) == 1
        snapshot.restore()
        assert same(job.optimizer.state_dict(), before)
    job.unfreeze()
    snapshot.take()
    assert state.collect(snapshot.copies()).values["optimizers"]["default"]["added"] == [
        ["0.weight", "0.bias"]
    ]


def test_a_parameter_of_no_module_is_refused_at_the_next_step(tmp_path: Path) -> None:
    job = Job()
    job.unfreeze = lambda: job.optimizer.add_param_group(  # type: ignore[method-assign]
        {"params": [nn.Parameter(torch.ones(7))]}
    )
    with pytest.raises(StateError, match=r"shape \[7\] that is not in the model"):
        job.train(9, tmp_path)


@pytest.mark.processes
def test_a_newcomer_gets_what_its_script_has_not_built(tmp_path: Path) -> None:
    """The newcomer gets the added group, a module's extra state, and a tensor that the script itself refers to."""
    ends = []
    for name, dies in (("whole", False), ("cut", True)):
        place = tmp_path / name
        place.mkdir()
        if not dies:
            (place / "died").write_text("")
        done = run_job(place, 2, JOB, str(place / "died"))
        assert done.returncode == 0, done.stdout
        assert ("replace, training continues" in done.stdout) == dies, done.stdout
        logs = [path.read_text() for path in place.rglob("*.log")]
        ends += re.findall(r"ended with (.*)", "\n".join([done.stdout, *logs]))
    assert len(ends) >= 4 and len(set(ends)) == 1 and ends[0].endswith(f" {STEPS} 2"), ends
