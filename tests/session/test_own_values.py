"""The values that only one rank has: the warning when they are too large for the status page."""

from __future__ import annotations

import pytest

from holdfast.session.loops.loop import without_room


@pytest.mark.parametrize(
    ("large", "named", "consequence"),
    [
        ("own", "s.own is too large", "its replacement begins with s.own = None"),
        ("loader", "the data loader's state is too large", "reads the batches of that epoch again"),
    ],
)
def test_the_warning_names_the_values_that_take_the_room(large: str, named: str, consequence: str) -> None:
    warning = without_room({"own": 1, "loader": 2, "begun": 3, large: "x" * 200_000}, 200_100)
    assert warning.startswith(named) and warning.endswith(consequence)
    assert "take 200100 bytes" in warning
