"""The proof that a replacement makes other collectives between two steps, and the end of the run at the second one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.core.config import Config
from holdfast.core.decide.ladder import judge
from holdfast.core.decide.stop_policy import Answered, Failure, Situation
from holdfast.core.decide.unmatched_collectives import IN_BLOCK, RankSeen, unmatched
from holdfast.core.ids import Generation, MemberId
from holdfast.core.protocol.messages import OutsideCollective, OutsideCollectives, RankState

NOW = Generation(1, 4)
CONFIG = Config(run_id="r", world_size=4, max_restarts=100)
WHERE = "all_reduce at train.py:31"
COLLECTIVE = OutsideCollective(WHERE, ("tick",))


def seen(
    rank: int, state: RankState = "aborted", made: int = 0, *, step: int = 7, born: int = 1, **more: Any
) -> RankSeen:
    outside = OutsideCollectives(
        **{"generation": NOW, "step": step, "made": made, "first": (COLLECTIVE,), **more}
    )
    member_id = MemberId(rank + born)  # the first start has ids from 1 on
    return RankSeen(rank, member_id, state in IN_BLOCK, step, outside if made else None)


@pytest.mark.parametrize(
    ("ranks", "odd", "does"),
    [
        ([seen(0), seen(1, "ready", 1, born=9), seen(2)], 1, "makes"),
        ([seen(0, made=1), seen(1, "ready", 2, born=9)], 1, "makes"),
        ([seen(0), seen(1, "compute", 1, born=9)], 1, "makes"),
        ([seen(0, "ready", 1), seen(1, "compute", born=9)], 1, "leaves out"),
        ([seen(0, "ready", 1), seen(1, born=8), seen(2, born=9)], 1, "leaves out"),
        ([seen(0, "voting"), seen(1, "voting"), seen(2, "ready", 3, born=9), seen(3, "ready", 2, born=8)], 2, "makes"),
    ],
)  # fmt: skip
def test_a_higher_count_than_the_final_one_of_another_rank(
    ranks: list[RankSeen], odd: int, does: str
) -> None:
    failure = unmatched(NOW, ranks)
    assert failure is not None and failure.rank == odd and failure.occurrence == NOW.pack()
    assert (
        f"between the blocks of steps 6 and 7, rank {odd} {does} {WHERE}" in failure.what
        and "tick" in failure.what
    )


@pytest.mark.parametrize(
    "ranks",
    [
        [],
        [seen(0), seen(1)],
        [seen(0, made=2), seen(1, "ready", 2, born=9)],  # a death of any other cause
        [
            seen(0, made=2),
            seen(1, "ready", 1, born=9),
        ],  # it has not begun the block, and makes the second one yet
        [seen(0, "ready"), seen(1, "ready", 1, born=9)],  # the other rank has not begun the block either
        [seen(0), seen(1, "ready", 1)],  # both have the same variables
        [seen(0, step=8), seen(1, "ready", 1, born=9)],
        [seen(0), seen(1, "ready", 1, born=9, generation=Generation(1, 3))],  # before the last recovery
        [
            seen(0),
            seen(1, "ready", born=9)._replace(outside=seen(1, made=1, step=6).outside),
        ],  # it has made none since
    ],
)
def test_no_proof(ranks: list[RankSeen]) -> None:
    assert unmatched(NOW, ranks) is None


def test_the_first_one_that_is_too_many_is_named() -> None:
    both, more = OutsideCollective("barrier at train.py:7"), OutsideCollective("broadcast at train.py:9")
    failure = unmatched(
        NOW, [seen(0, made=1, first=(both,)), seen(1, "ready", 2, born=9, first=(both, more))]
    )
    assert failure is not None and "makes broadcast at train.py:9, unlike rank 0" in failure.what


def proof(number: int) -> Failure:
    failure = unmatched(NOW, [seen(0), seen(1, "ready", 1, born=9)])
    assert failure is not None
    return msgspec.structs.replace(failure, occurrence=number, step=number)


DEATH = Failure(rank=2, step=3, kind="Death", what="killed", digest="d", occurrence=2, times_max=4)


@pytest.mark.parametrize(
    ("history", "action"),
    [
        ([], "replace"),
        ([DEATH], "replace"),
        ([proof(8)], "stop_bad_input"),
        ([proof(7), DEATH], "replace"),  # the replacement after the first one has trained on
        ([proof(9)], "replace"),  # the same failure: the recovery of it was interrupted
        ([proof(8), proof(9)], "stop_bad_input"),
    ],
)
def test_the_second_one_in_a_row_ends_the_run(history: list[Failure], action: str) -> None:
    situation = Situation(
        step=9, base_step=0, session=True, all_alive=False, all_sound=False, unreplaceable="", uncovered="",
        checkpoint_known=True, failures=(proof(9), msgspec.structs.replace(DEATH, occurrence=9)),
    )  # fmt: skip
    answered = [Answered(at_s=0.0, action="replace", step=9, failures=(f.mark,)) for f in history]
    verdict = judge(1.0, situation, answered, CONFIG)
    assert verdict.action == action
    if verdict.stops:
        assert verdict.save and verdict.reason.startswith("UnmatchedCollectiveError: between the blocks")
        assert "\n  next: keep what decides" in verdict.reason
