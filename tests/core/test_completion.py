"""``all``: whether all members have answered, at a cost that does not depend on the order of the answers."""

from __future__ import annotations

import random

import pytest

from holdfast.core.ids import MemberId, NodeId
from holdfast.core.job.completion import AllOf
from holdfast.core.job.membership import Member

RANKS = 500


def members(ranks: int) -> list[Member]:
    return [
        Member(member_id=MemberId(rank + 1), rank=rank, local_rank=0, node_id=NodeId("n"))
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("order", ["as they were sent", "from the last", "any"])
def test_all_answers_together_cost_two_looks_at_each(order: str) -> None:
    everyone, looks = members(RANKS), 0

    def has_reached(member: Member) -> bool:
        nonlocal looks
        looks += 1
        return member.reached

    rollcall = AllOf()
    ranks = list(range(RANKS))
    if order == "from the last":
        ranks.reverse()
    elif order == "any":
        random.Random(3).shuffle(ranks)
    for count, rank in enumerate(ranks, 1):
        everyone[rank].reached = True
        assert rollcall.all(everyone, has_reached) == (count == RANKS)
    assert looks <= 3 * RANKS, "one for each answer, and two passes"


def test_the_answer_is_that_of_all_whatever_was_asked_before() -> None:
    rng, rollcall = random.Random(8), AllOf()
    for _ in range(2000):
        everyone = members(rng.randint(0, 6))
        done = {m.rank for m in everyone if rng.random() < 0.8}
        assert rollcall.all(everyone, lambda m, done=done: m.rank in done) == (len(done) == len(everyone))  # type: ignore[misc]
