"""Code between the begin of the session and its loop, which runs again in a process that continues the job."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import StepError
from holdfast.frameworks.torch.state import content_digest
from holdfast.frameworks.torch.state.content_digest import digest_of_content
from holdfast.frameworks.torch.state.tensor_memory import address_of

pytestmark = pytest.mark.torch
PER_EPOCH, EPOCHS = 4, 3


class Stopped(Exception):
    """The exception that ends a training in the middle."""


class Job:
    """A training whose code before the loop does what ``way`` says.

    Args:
        folder: where checkpoints go.
        way: ``begin`` replaces the weights before all epochs, and ``center`` computes from them. For others see
            :meth:`before_epoch`.
    """

    def __init__(self, folder: Path, way: str) -> None:
        torch.manual_seed(4)
        self.net = nn.Linear(3, 2)
        self.first = copy.deepcopy(self.net.state_dict())
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.data = [torch.arange(6.0).reshape(2, 3) / 6 + n for n in range(PER_EPOCH)]
        self.kept: dict[str, Any] = {"target": torch.zeros(2)}
        self.target: Any = torch.zeros(2)
        self.center = torch.zeros(2)
        self.begun = 0
        self.folder, self.way = folder, way

    def train(self, stop: int = -1, verify: int = 500, *, outside: bool = False) -> dict[str, torch.Tensor]:
        """Train up to step ``stop``, or to the end. Return the weights.

        Args:
            outside: stop before the loop of the epoch that begins with step ``stop``.
        """
        with holdfast.session(
            model=self.net,
            optimizer=self.optimizer,
            checkpoint=self.folder,
            state=self.kept,
            verify_block=verify,
        ) as s:
            if self.way == "begin":
                self.net.load_state_dict(self.first)
            if self.way == "center":
                self.center = self.net.weight.detach().mean(dim=1)
            for _ in s.epochs(EPOCHS):
                if outside and s.step == stop:
                    raise Stopped
                self.before_epoch(s)
                for step in s.steps(self.data):
                    if step.number == stop:
                        raise Stopped
                    with step as x:
                        (self.net(x) - self.wanted(x)).square().mean().backward()
                        self.optimizer.step()
                        self.optimizer.zero_grad()
        return {name: value.clone() for name, value in self.net.state_dict().items()}

    def before_epoch(self, s: Any) -> None:
        """Run the code before the loop of an epoch."""
        match self.way:
            case "weights":
                with torch.no_grad():
                    self.net.weight.mul_(0.5)
            case "momenta":
                self.optimizer.state.clear()
            case "computed":
                self.target = self.net.weight.detach().mean(dim=1)
            case "teacher":
                self.target = copy.deepcopy(self.net)
            case "guarded":
                if s.new_epoch:
                    self.kept["target"] = self.net.weight.detach().mean(dim=1)
                self.target = self.kept["target"]
            case "random":  # the session gives the epoch its random numbers
                self.target = torch.rand(2)

    def wanted(self, x: torch.Tensor) -> Any:
        """Return the values that the loss compares with the prediction."""
        return (
            self.target(x).detach() + 1
            if isinstance(self.target, nn.Module)
            else self.target + self.center + 0 * self.begun
        )


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("stop", [1, PER_EPOCH, PER_EPOCH + 1, 2 * PER_EPOCH - 1])
@pytest.mark.parametrize("way", ["nothing", "guarded", "random"])
def test_code_before_the_loop_that_keeps_its_results_is_exact(tmp_path: Path, way: str, stop: int) -> None:
    calm = Job(tmp_path / "calm", way).train()
    with pytest.raises(Stopped):
        Job(tmp_path / "stopped", way).train(stop)
    assert same(Job(tmp_path / "stopped", way).train(), calm)


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("weights", r"code before this loop over steps has run again and has changed weight of the loaded state"),
        ("momenta", r"code before this loop over steps has run again and has changed optimizer\S* and 1 more of"),
        ("begin", r"code before this loop over steps has run again and has changed weight and 1 more of the"),
        ("computed", r"the updates depend on self.target, which the code before the loop over steps sets \(test_l"),
        ("teacher", r"the updates depend on self.target, which the code before the loop over steps sets \(test_l"),
    ],
)  # fmt: skip
def test_code_before_the_loop_that_has_another_effect_is_refused(tmp_path: Path, way: str, said: str) -> None:
    """Regression: the job continued with other weights, exit code 0."""
    with pytest.raises(Stopped):
        Job(tmp_path, way).train(PER_EPOCH + 1)
    with pytest.raises(StepError, match=f"step {PER_EPOCH + 1}: .*{said}"):
        Job(tmp_path, way).train()
    Job(tmp_path, way).train(verify=0)


def test_weights_that_are_replaced_after_a_whole_epoch_are_refused(tmp_path: Path) -> None:
    """The process begins the next epoch, in which the job has not opened its loop."""
    with pytest.raises(Stopped):
        Job(tmp_path, "begin").train(PER_EPOCH, outside=True)
    with pytest.raises(
        StepError, match=f"step {PER_EPOCH}: .*between the session's begin and this epoch has"
    ):
        Job(tmp_path, "begin").train()


@pytest.mark.parametrize(("stop", "outside"), [(PER_EPOCH - 1, False), (PER_EPOCH, False), (PER_EPOCH, True)])
def test_a_variable_that_is_computed_before_all_epochs_is_refused_in_any_epoch(
    tmp_path: Path, stop: int, outside: bool
) -> None:
    """Deep SVDD computes the center of its loss from the first weights. Regression: other weights, exit code 0."""
    with pytest.raises(Stopped):
        Job(tmp_path, "center").train(stop, outside=outside)
    with pytest.raises(
        StepError, match=f"step {stop}: the updates depend on self.center, which the code before"
    ):
        Job(tmp_path, "center").train()


def test_a_number_of_the_script_that_another_process_had_otherwise_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The rate depends on the number of the step plus the step of another checkpoint (improved-diffusion)."""
    with pytest.raises(Stopped):
        Job(tmp_path, "").train(PER_EPOCH + 1)
    for begun in (0, 5):
        job = Job(tmp_path, "")
        job.begun = begun
        with pytest.raises(Stopped):
            job.train(2 * PER_EPOCH + begun // 5)
        said = "the updates depend on self.begun = 5, until now on self.begun = 0 (test_loaded_state.py:"
        assert (said in caplog.text) == (begun == 5), caplog.text
        assert ("until now" in caplog.text) == (begun == 5), caplog.text


def test_an_epoch_is_new_until_its_first_step_has_ended(tmp_path: Path) -> None:
    job = Job(tmp_path, "nothing")
    seen: list[tuple[int, bool]] = []
    with holdfast.session(model=job.net, optimizer=job.optimizer, checkpoint=tmp_path) as s:
        seen.append((s.step, s.new_epoch))
        for _ in s.epochs(2):
            seen.append((s.step, s.new_epoch))
            for step in s.steps(job.data):
                with step as x:
                    job.net(x).square().mean().backward()
                    job.optimizer.step()
                    job.optimizer.zero_grad()
            seen.append((s.step, s.new_epoch))
    assert seen == [(0, True), (0, True), (4, False), (4, True), (8, False)]


VALUES: list[Any] = [
    None, 1, 1.0, True, "1", b"1", [1, 2], [1, [2]], [[1], 2], {1, 2}, {"a": 1}, {"a": 2}, {"b": 1},
    torch.tensor([1, 2]), torch.tensor([1.0, 2.0]), torch.tensor([[1, 2]]), [torch.tensor([1, 2])],
    {"a": torch.tensor(1.0)}, {"a": torch.tensor(2.0)}, torch.zeros(0), torch.zeros(0, 1),
    torch.tensor([1.0]).numpy(), torch.tensor([1]).numpy(),
]  # fmt: skip


def test_values_with_different_contents_have_different_digests() -> None:
    digests = [digest_of_content(value) for value in VALUES]
    assert None not in digests and len(set(digests)) == len(VALUES)


def test_the_digest_of_a_value_is_that_of_its_content() -> None:
    for value in VALUES:
        assert digest_of_content(copy.deepcopy(value)) == digest_of_content(value)
    net = nn.BatchNorm1d(2)
    before = digest_of_content({"net": net})
    assert before == digest_of_content({"net": copy.deepcopy(net)}) and digest_of_content(net) != before
    net(torch.ones(2, 2))  # the running mean is a buffer
    assert digest_of_content({"net": net}) != before


def test_tensors_of_the_state_do_not_count() -> None:
    net = nn.Linear(2, 1)
    left_out = {address_of(each) for each in net.parameters()}
    before = [digest_of_content(value, left_out) for value in (net, list(net.parameters()), net.weight.T)]
    with torch.no_grad():
        net.weight += 1
    assert before == [
        digest_of_content(value, left_out) for value in (net, list(net.parameters()), net.weight.T)
    ]
    assert digest_of_content(copy.deepcopy(net), left_out) != before[0]


def test_a_large_value_counts_by_a_sample_and_a_mapped_file_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content_digest, "SIZE_BYTES_MAX", 40)
    one, other, third = torch.zeros(20), torch.zeros(20), torch.zeros(20)
    other[3], third[2] = 1, 1
    assert digest_of_content(one) == digest_of_content(other) != digest_of_content(third)
    assert (
        digest_of_content(one.numpy()) == digest_of_content(other.numpy()) != digest_of_content(third.numpy())
    )
    (file := tmp_path / "tokens.bin").write_bytes(bytes(8))
    tokens = np.memmap(file, mode="r+")
    before = digest_of_content(tokens)
    tokens[0] = 1
    assert digest_of_content(tokens) == before


def test_an_object_of_another_kind_has_no_digest() -> None:
    endless: list[Any] = []
    endless.append(endless)
    sparse = torch.eye(2).to_sparse()
    for value in (
        sparse,
        object(),
        [object()],
        {"a": [object()]},
        torch.optim.SGD([torch.zeros(1)], lr=1),
        endless,
    ):
        assert digest_of_content(value) is None
