"""One fork server for all scenarios of a pytest session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.adapters.worlds import Worlds

FEATURES = "tests.adapters.features"  # imported before the forks, not in each of them


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """Yield a server of ranks that have Holdfast's process groups installed before the fork."""
    modules = ("aborts", "bucket_orders", "faults")
    server = Worlds(FEATURES, *(f"tests.adapters.{name}" for name in modules))
    yield server
    server.close()


@pytest.fixture(scope="session")
def plain_worlds() -> Iterator[Worlds]:
    """Yield a server of ranks with torch's own process groups, for comparison."""
    server = Worlds(FEATURES, plain=True)
    yield server
    server.close()
