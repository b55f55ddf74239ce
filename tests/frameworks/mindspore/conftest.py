"""Fixtures of the tests with MindSpore."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.compat.packages import remove, site, write


@pytest.fixture(scope="module")
def drop_in() -> Iterator[None]:
    """Leave this environment for a module as `holdfast compat install` does."""
    write(site())
    yield
    remove(site())
