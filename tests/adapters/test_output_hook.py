"""Copies of a module that the session observes."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast

pytestmark = pytest.mark.torch


def test_a_copy_and_a_file_of_the_model_are_made_in_a_session_and_work_without_it(tmp_path: Path) -> None:
    """Regression: the copy held the whole session, so ``TypeError: cannot pickle memoryview objects``."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with holdfast.session(model=net, optimizer=optimizer, resume="never") as s:
        for step in s.steps(until=2):
            with step:
                optimizer.zero_grad()
                net(torch.ones(4, 2)).sum().backward()
                optimizer.step()
            twin = copy.deepcopy(net)
            twin(torch.ones(4, 2)).sum().backward()  # no backward pass of the session's model
            assert torch.equal(twin(torch.ones(1, 2)), net(torch.ones(1, 2)))
            assert b"holdfast" not in pickle.dumps(net)
        torch.save(net, tmp_path / "net.pt")
    text = (
        "import sys, torch; net = torch.load('net.pt', weights_only=False); net(torch.ones(1, 2)); "
        "assert not [name for name in sys.modules if name.startswith('holdfast')]"
    )
    subprocess.run([sys.executable, "-c", text], cwd=tmp_path, check=True, timeout=120)
