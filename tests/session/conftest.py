"""What the tests of real jobs share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.session.test_jobs import Result, start


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Result]:
    """The undisturbed bare run of a layout, started once."""
    known: dict[str, Result] = {}

    def run(layout: str) -> Result:
        if layout not in known:
            known[layout] = start("torchrun", tmp_path_factory.mktemp("bare"), "--bare", "--layout", layout)
            assert known[layout].code == 0, known[layout].output
        return known[layout]

    return run
