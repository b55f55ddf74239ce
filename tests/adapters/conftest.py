"""One fork server for all scenarios of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.adapters.worlds import Worlds

FEATURES = "tests.adapters.features"  # imported before the forks, not in each of them


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """Ranks with our process groups installed before the fork."""
    server = Worlds(FEATURES, "tests.adapters.aborts", "tests.adapters.faults")
    yield server
    server.close()


@pytest.fixture(scope="session")
def plain_worlds() -> Iterator[Worlds]:
    """Ranks with torch's own process groups, to compare with."""
    server = Worlds(FEATURES, plain=True)
    yield server
    server.close()
