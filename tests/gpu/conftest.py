"""Tests that need a GPU, which several processes share.

``make gpu`` sets HOLDFAST_GPU=1; otherwise they are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adapters.worlds import Worlds

HERE = Path(__file__).parent
WANTED = "HOLDFAST_GPU"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder unless the variable is set."""
    if os.environ.get(WANTED) != "1":
        for item in items:
            if item.path.parent == HERE:
                item.add_marker(pytest.mark.skip(reason="make gpu"))


@pytest.fixture(scope="session", autouse=True)
def device() -> None:
    """Fail all tests if there is no GPU, since a skipped suite would look like a passed one."""
    import torch

    assert torch.cuda.is_available(), f"{WANTED}=1, and torch {torch.__version__} sees no GPU (nvidia-smi)"


@pytest.fixture(scope="session")
def worlds(device: None) -> Iterator[Worlds]:
    """Yield processes that are forked before CUDA is initialised."""
    server = Worlds("tests.gpu.scenarios")
    yield server
    server.close()
