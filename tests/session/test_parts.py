"""A step that runs in parts equals the step of the whole batch: accumulation, clipping, loss scaling and resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.errors import UnsupportedError
from holdfast.session.session import PARTS_VARIABLE

pytestmark = pytest.mark.torch

SAMPLES = 24


class Job:
    """A training without randomness, with ``batch`` samples per block."""

    def __init__(self, batch: int) -> None:
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).double()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.5, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1), dtype=torch.double)
        self.loader: Any = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch)
        self.seen: list[tuple[int, int, int]] = []
        self.drawn: list[float] = []

    def update(self, batch: list[Tensor]) -> None:
        """Compute two micro-batches. Gradients are unscaled and clipped to a norm that binds."""
        self.drawn += batch[0][:, 0].tolist()
        self.optimizer.zero_grad()
        for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
            loss = (self.net(x) - y).square().mean() / 2
            self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)
        assert norm > 0.1
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def train(self, until: int, **arguments: Any) -> None:
        """Train in a session."""
        with holdfast.session(
            model=self.net, optimizer=self.optimizer, scaler=self.scaler, seed=5, verify_block=0, **arguments
        ) as s:
            for step in s.steps(self.loader, until=until):
                with step as batch:
                    self.update(batch)
                self.seen.append((step.number, step.part, step.parts))
                assert step.committed == (step.part + 1 == step.parts)


def test_parts_are_the_whole_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Job(8)
    whole.train(7)
    backward = torch.autograd.backward
    monkeypatch.setenv(PARTS_VARIABLE, "2")
    first, second = Job(4), Job(4)
    first.train(4, checkpoint=tmp_path)
    second.train(7, checkpoint=tmp_path)
    assert torch.autograd.backward is backward
    assert first.drawn + second.drawn == whole.drawn
    assert second.seen == [(n, part, 2) for n in (4, 5, 6) for part in (0, 1)]
    for one, two in zip(whole.net.parameters(), second.net.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)


def test_an_epoch_ends_where_it_would_and_its_last_step_is_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PARTS_VARIABLE, "4")
    job = Job(4)  # six batches an epoch
    job.train(4)
    assert [(n, parts) for n, part, parts in job.seen if part == 0] == [(0, 4), (1, 2), (2, 4), (3, 2)]


def test_what_cannot_be_run_in_parts_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PARTS_VARIABLE, "2")
    job = Job(4)
    with (
        pytest.raises(UnsupportedError, match="a gradient of its own"),
        holdfast.session(model=job.net, optimizer=job.optimizer) as s,
    ):
        for step in s.steps(job.loader, until=1):
            with step as batch:
                out = job.net(batch[0])
                out.backward(torch.ones_like(out))
    with (
        pytest.raises(UnsupportedError, match="not computed by backward"),
        holdfast.session(model=job.net, optimizer=job.optimizer) as s,
    ):
        for step in s.steps(job.loader, until=1):
            with step as batch:
                loss = job.net(batch[0]).sum()
                if step.part:
                    for p, g in zip(
                        job.net.parameters(),
                        torch.autograd.grad(loss, list(job.net.parameters())),
                        strict=True,
                    ):
                        p.grad = g
                else:
                    loss.backward()
                job.optimizer.step()
    with (
        pytest.raises(UnsupportedError, match="without a loader"),
        holdfast.session(model=job.net, optimizer=job.optimizer) as s,
    ):
        s.steps(until=1)
