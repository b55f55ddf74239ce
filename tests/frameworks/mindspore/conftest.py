"""Fixtures of the tests with MindSpore."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.compat.packages import remove, site, write
from tests.frameworks.mindspore.seeds.data import write_cifar10


@pytest.fixture(scope="session")
def cifar10(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a data set in the format of CIFAR-10's binary files. Return its folder."""
    folder = tmp_path_factory.mktemp("cifar-10-batches-bin")
    write_cifar10(folder)
    return folder


@pytest.fixture(scope="module")
def drop_in() -> Iterator[None]:
    """Install the drop-in modules in this environment, as `holdfast compat install` does."""
    write(site())
    yield
    remove(site())
