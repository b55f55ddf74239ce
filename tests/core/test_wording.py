"""One of a kind is one, and not ones."""

from __future__ import annotations

import pytest

from holdfast.core.culprit import blame
from holdfast.core.ladder import judge
from holdfast.wording import noun_of, plural
from tests.core.test_culprit import seen
from tests.core.test_policy import CONFIG, situation


@pytest.mark.parametrize(
    ("count", "noun", "said"),
    [(0, "step", "0 steps"), (1, "step", "1 step"), (2, "batch", "2 batches"), (1200, "rank", "1,200 ranks")],
)
def test_counts(count: int, noun: str, said: str) -> None:
    assert plural(count, noun) == said and said.endswith(noun_of(count, noun))


def test_reasons_of_one() -> None:
    back = judge(0.0, situation(uncovered="shard 1 is gone", memory_here=19, memory_step=19), [], CONFIG)
    assert "1 step is done again" in back.reason
    assert "the other got to" in blame([seen(0), seen(1, "forward:20:0")]).reason
