"""Slow ranks: the rule, the time of the report, and the same judgement for thousands of ranks as for three."""

from __future__ import annotations

import random
from statistics import median

import pytest

from holdfast.core.ids import NodeId
from holdfast.core.protocol.health_messages import StepTime, StepTimes
from holdfast.core.protocol.messages import AgentHello, KillMember
from holdfast.core.watch.stragglers import SLOW_ENDS_RATIO, SLOW_RATIO, SLOW_S_MIN, Paces
from tests.core.test_controller import NODE, Job

PACES = [StepTime(0, 30, 0.1), StepTime(1, 30, 0.1), StepTime(2, 30, 0.25), StepTime(3, 30, 0.11)]


@pytest.mark.parametrize(
    ("paces", "before", "slow"),
    [
        (PACES, set(), {2}),
        ([StepTime(p.rank, 5, p.busy_s) for p in PACES], set(), set()),
        ([StepTime(p.rank, 30, p.busy_s / 100) for p in PACES], set(), set()),
        ([*PACES[:2], StepTime(2, 30, 0.13)], set(), set()),
        ([*PACES[:2], StepTime(2, 30, 0.13)], {2}, {2}),
        ([StepTime(0, 30, 0.5)], set(), set()),
        ([*PACES[:2], StepTime(2, 30, float("nan")), StepTime(3, 30, 0.5)], set(), {3}),
        ([], set(), set()),
    ],
)
def test_a_straggler_is_slow_for_long_and_by_much(
    paces: list[StepTime], before: set[int], slow: set[int]
) -> None:
    told = Paces()
    told.tell(NODE, paces)
    assert set(told.slow(before)) == slow


def test_the_order_that_is_kept_says_what_a_look_at_all_pairs_says() -> None:
    rng = random.Random(5)
    for _ in range(300):
        told, newest = Paces(), dict[int, tuple[NodeId, float]]()
        for _ in range(rng.randint(1, 30)):
            node = NodeId(f"n{rng.randrange(4)}")
            newest = {rank: known for rank, known in newest.items() if known[0] != node}
            if rng.random() < 0.15:
                told.forget(node)
                continue
            ranks = rng.sample(range(12), rng.randint(0, 5))  # a rank may move from one node to another
            paces = [StepTime(rank, 30, rng.choice((0.0, 0.1, 0.1, 0.104, 0.13, 0.2, 0.3))) for rank in ranks]
            told.tell(node, paces)
            newest |= {p.rank: (node, p.busy_s) for p in paces}
        before = set(rng.sample(range(12), 4))
        slow = {}
        for rank, (_, busy_s) in newest.items():
            others = [other_s for other, (_, other_s) in newest.items() if other != rank]
            usual_s = median(others or [0.0])
            ratio = SLOW_ENDS_RATIO if rank in before else SLOW_RATIO
            if usual_s > 0 and busy_s > ratio * usual_s and busy_s - usual_s > SLOW_S_MIN:
                slow[rank] = (busy_s, usual_s)
        assert told.slow(before) == slow


def test_a_straggler_is_told_once_and_replaced_only_when_asked() -> None:
    for limit in (0.0, 2.0):
        job = Job(world_size=4, replace_slower_than=limit).up()
        paced = StepTimes(node_id=NODE, generation=job.generation, ranks=tuple(PACES))
        job.post(paced)
        assert job.record("straggler")["rank"] == 2 and job.record("straggler")["ratio"] == 2.5
        assert [k.member_id for k in job.sent(KillMember)] == ([job.members[2]] if limit else [])
        if not limit:
            job.post(paced)
            assert sum(r.kind == "straggler" for r in job.records) == 1
            even = tuple(StepTime(p.rank, 30, 0.1) for p in PACES)
            job.post(StepTimes(node_id=NODE, generation=job.generation, ranks=even))
            assert job.record("straggler_gone")["rank"] == 2


def test_what_a_node_without_workers_said_does_not_count() -> None:
    job = Job(world_size=4).up()
    elsewhere = NodeId("elsewhere")
    job.post(AgentHello(node_id=elsewhere, slots=8, pid=2))
    slow = tuple(StepTime(rank, 30, 9.0) for rank in range(10, 20))
    job.post(StepTimes(node_id=elsewhere, generation=job.generation, ranks=slow))
    job.post(StepTimes(node_id=NODE, generation=job.generation, ranks=tuple(PACES)))
    assert [r.data["rank"] for r in job.records if r.kind == "straggler"] == [2]


def test_many_slow_ranks_are_judged_again_when_as_many_were_told_of() -> None:
    """In a job on two kinds of machines, half of the ranks may be slow.

    A scan of all ranks per message would be too much.
    """
    job = Job(world_size=64).up()

    def tell(ranks: range, busy_s: float) -> None:
        paces = tuple(StepTime(rank, 30, busy_s) for rank in ranks)
        job.post(StepTimes(node_id=NODE, generation=job.generation, ranks=paces))

    paces = tuple(StepTime(rank, 30, 0.3 if rank < 30 else 0.1) for rank in range(64))
    job.post(StepTimes(node_id=NODE, generation=job.generation, ranks=paces))
    assert sum(r.kind == "straggler" for r in job.records) == 30
    for told in (8, 16, 24):
        tell(range(8), 0.1)
        assert not [r for r in job.records if r.kind == "straggler_gone"], f"{told} of 30 were reported"
    tell(range(8), 0.1)
    assert [r for r in job.records if r.kind == "straggler_gone"]
