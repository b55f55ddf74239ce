"""Order of the whole suite."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with jobs of many processes first: the last minutes are not spent on one of them by one worker alone."""
    slow = {item.path for item in items if item.get_closest_marker("processes") is not None}
    items.sort(key=lambda item: (item.path not in slow, "drill" not in str(item.path.parent.name)))
