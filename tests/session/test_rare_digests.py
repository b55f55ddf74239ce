"""The updates at which the digests of large variables are taken, and the text of a value between them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from holdfast.session.variables.plain_values import plain_values
from holdfast.session.variables.rare_digests import RareDigests
from holdfast.session.variables.watched_constants import ITEMS_MAX

torch = pytest.importorskip("torch")

from holdfast.frameworks.torch.state.content_digest import digest_of_content  # noqa: E402
from tests.session.test_equal_updates import Numbers  # noqa: E402


class Digests(Numbers):
    """Real digests, and no content of tensors, as if they were on a device."""

    def digest_of(self, value: object) -> int | None:
        """Return the digest of ``value``."""
        return digest_of_content(value)


def test_digests_are_taken_at_the_first_updates_and_then_ever_less_often() -> None:
    rare = RareDigests(Digests())
    due = []
    for number in range(300):
        if rare.due:
            due.append(number)
        rare.committed()
    assert due == [0, 1, 2, 4, 16, 64, 256]


@pytest.mark.parametrize("kind", ["tensor", "list", "arrays", "dict", "large"])
def test_a_value_has_its_newest_digest_until_the_next_one(kind: str) -> None:
    rare, source = RareDigests(Digests()), Digests()
    inner: Any = {"arrays": np.zeros(3), "large": np.zeros(1 << 18)}.get(kind, torch.zeros(3))
    value = {"tensor": inner, "large": inner, "dict": {1: inner}}.get(kind, [inner])

    def text(*, fresh: bool) -> object:
        return rare.texts({"bank": value}, plain_values({"bank": value}, source), fresh=fresh)["bank"]

    first = text(fresh=False)
    assert isinstance(first, str) and " with checksum " in first
    inner += 1
    assert text(fresh=False) == first
    assert text(fresh=True) != first


def test_a_value_that_is_read_at_each_update_and_a_long_one_have_no_digest() -> None:
    rare, source = RareDigests(Digests()), Digests()
    values = {
        "count": 3,
        "seen": [1, 2],
        "long": [object()] * (ITEMS_MAX + 1),
    }
    plain = plain_values(values, source)
    assert rare.texts(values, plain, fresh=True) == plain


class Meter:
    """A sum, with the losses in it."""

    def __init__(self) -> None:
        self.total, self.losses, self.past = 0.0, {"mean": [0.0]}, torch.zeros(2)


@pytest.mark.parametrize("change", ["total", "losses", "past"])
def test_the_attributes_of_objects_in_a_container_count(change: str) -> None:
    """Regression: a container of objects had only its number of items, so its content began again without a word."""
    rare, source, meters = RareDigests(Digests()), Digests(), [Meter(), Meter()]

    def text() -> object:
        values = {"meters": meters}
        return rare.texts(values, plain_values(values, source), fresh=True)["meters"]

    first = text()
    assert text() == first and isinstance(first, str) and first.startswith("2 items with checksum ")
    meters[1].total += change == "total"
    meters[1].losses["mean"][0] += change == "losses"
    meters[1].past[1] += change == "past"
    assert text() != first
