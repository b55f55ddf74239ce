"""One fork server for all scenarios of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.adapters.worlds import Worlds


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """Ranks with our process groups installed before the fork."""
    server = Worlds()
    yield server
    server.close()


@pytest.fixture(scope="session")
def plain_worlds() -> Iterator[Worlds]:
    """Ranks with torch's own process groups, to compare with."""
    server = Worlds(plain=True)
    yield server
    server.close()
