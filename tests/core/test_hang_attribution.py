"""Attribution of a hang as a table: from evidence to the blamed rank and the confidence."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core.ids import Generation, MemberId
from holdfast.core.protocol.health_messages import CollectiveSeen, DeviceSeen, RankEvidence
from holdfast.core.protocol.messages import OutsideCollective, OutsideCollectives
from holdfast.core.watch.hang_attribution import blame


def seen(rank: int, place: str = "backward:20:3", **more: Any) -> RankEvidence:
    phase, step, sequence = place.split(":")
    return RankEvidence(
        member_id=MemberId(rank + 1 if rank < 9 else 50),
        rank=rank,
        step=int(step),
        phase=phase,
        sequence=int(sequence),
        idle_s=2.0,
        bound_s=1.8,
        **{"usual_sequence": 4, "process": "S", **more},
    )


def outside(made: int, step: int = 21) -> dict[str, Any]:
    """Return the field of evidence for collectives that a rank has made outside of blocks."""
    return {
        "outside": OutsideCollectives(
            generation=Generation(1, 2),
            step=step,
            made=made,
            first=(OutsideCollective("all_reduce at train.py:9"),),
        )
    }


def four(odd: int, place: str = "backward:20:3", **more: Any) -> list[RankEvidence]:
    """Return evidence of three ranks in backward, and one that differs."""
    return [seen(rank, place, **more) if rank == odd else seen(rank) for rank in range(4)]


@pytest.mark.parametrize(
    ("evidence", "answer", "ranks", "confidence", "reason"),
    [
        (four(2, process="T", wchan="do_signal_stop"), "kill", (2,), "certain", "stopped (state T)"),
        (four(2, "vote:20:3", process="T"), "kill", (2,), "certain", "in vote of step 20"),
        (four(2, "loading:0:0", child=77), "kill", (2,), "certain", "its data loader process 77 is stopped"),
        ([seen(0, "starting:0:0", process="T")], "kill", (0,), "certain", "stopped (state T), in its start"),
        (four(1, "save:20:0", process="D", wchan="rpc_wait"), "kill", (1,), "certain", "rpc_wait"),
        (four(1, "forward:20:0", process="R", cpu=1.0), "kill", (1,), "certain", "3 others got to backward"),
        (four(0, "backward:20:2"), "kill", (0,), "certain", "collective 2"),
        (four(3, "loading:20:0"), "kill", (3,), "certain", "data loader"),
        (four(3, "section:20:0", section="eval"), "kill", (3,), "certain", "section 'eval'"),
        (
            [seen(0), seen(9, "ready:20:1", **outside(1, 20))],
            "kill",
            (9,),
            "certain",
            "rank 9 makes all_reduce at train",
        ),
        (
            [seen(0, "ready:20:1", **outside(1, 20)), seen(9)],
            "kill",
            (9,),
            "certain",
            "rank 9 leaves out all_reduce",
        ),
        (
            [seen(0, "ready:20:1", **outside(1, 20)), seen(9, "ready:20:1", meets=True)],
            "kill",
            (9,),
            "certain",
            "rank 9 leaves out all_reduce",
        ),
        (four(3, "vote:20:4"), "kill", (3,), "likely", "has reached vote of step 20"),
        (four(3, "meet:20:0"), "kill", (3,), "certain", "it is in meet of step 20"),
        (four(3, "update:19:4"), "kill", (3,), "certain", "update of step 19"),
        (four(2, process="R", cpu=0.97), "kill", (2,), "likely", "97% of a core"),
        (four(2, process="R", cpu=0.33), "kill", (2,), "likely", "33% of a core"),
        ([seen(r) for r in range(4)], "retry", (), "unclear", "all 4 ranks wait"),
        ([seen(r, cpu=1.0, process="R") for r in range(4)], "wait", (), "unclear", "slow, not stuck"),
        ([seen(r, process="T") for r in range(4)], "wait", (), "unclear", "4 of 4 processes are stopped"),
        ([seen(0, process="T")], "kill", (0,), "certain", "stopped"),
        ([seen(0, cpu=1.0, process="R")], "wait", (), "unclear", "the only rank"),
        ([seen(0)], "kill", (0,), "likely", "neither moves nor computes"),
        ([seen(0, "in_doubt:20:4")], "wait", (), "unclear", "control plane"),
        ([], "wait", (), "unclear", "control plane"),
    ],
)
def test_the_one_that_differs(
    evidence: list[RankEvidence], answer: str, ranks: tuple[int, ...], confidence: str, reason: str
) -> None:
    found = blame(evidence)
    assert (found.answer, found.ranks, found.confidence) == (answer, ranks, confidence)
    assert reason in found.reason


def test_who_waits_for_the_control_plane_is_left_out() -> None:
    assert blame([seen(0, "finished:40:0"), *four(2, process="T")[1:]]).ranks == (2,)


def test_collectives_are_compared_only_where_all_ranks_have_the_same_number() -> None:
    stages = [seen(r, f"forward:20:{1 + r // 2}", usual_sequence=3 + r // 2) for r in range(4)]
    assert blame(stages).answer == "retry"  # the numbers of pipeline stages differ at every step
    assert blame([*stages[:3], seen(3, "forward:20:2", usual_sequence=4, cpu=0.9)]).ranks == (3,)


def test_of_several_at_one_place_only_those_that_compute_are_killed() -> None:
    """Two ranks of a shard group are at one place, and one waits for the other. Only a fence can tell which."""
    group = [seen(0), seen(1), seen(2, "forward:20:1"), seen(3, "forward:20:1")]
    found = blame(group)
    assert (found.answer, found.ranks) == ("retry", ()) and "one of ranks 2, 3" in found.reason
    assert blame([*group[:3], seen(3, "forward:20:1", process="R", cpu=0.9)]).ranks == (3,)
    assert blame([*group[:2], *(seen(r, "forward:20:1", process="T") for r in (2, 3))]).ranks == (2, 3)


def test_a_majority_is_never_killed() -> None:
    for behind in range(1, 8):
        evidence = [seen(r, "forward:20:0" if r < behind else "vote:20:4") for r in range(8)]
        assert len(blame(evidence).ranks) <= 4


def collective(what: str, number: int = 812, under_way: bool = True) -> tuple[CollectiveSeen, ...]:
    return (
        CollectiveSeen("world.0", number - 1, "barrier", False),
        CollectiveSeen("world.0", number, what, under_way),
    )


def test_another_collective_than_the_others_make() -> None:
    others = collective("broadcast of 4096 float32")
    odd = collective("all_reduce of 4096 float32")
    found = blame([seen(r, collectives=odd if r == 1 else others) for r in range(4)])
    assert (found.answer, found.ranks, found.confidence) == ("kill", (1,), "likely")
    assert found.reason == (
        "collective #812 of group world.0: it is in all_reduce of 4096 float32, "
        "3 others are in broadcast of 4096 float32"
    )
    found = blame([seen(r, collectives=odd if r == 1 else others) for r in range(2)])
    assert found.answer == "retry" and "rank 1 is in all_reduce" in found.reason


def test_the_same_collectives_blame_nobody() -> None:
    same = collective("all_reduce of 64 float32")
    ended = collective("all_reduce of 64 float32", under_way=False)
    found = blame([seen(r, collectives=ended if r == 1 else same) for r in range(4)])
    assert found.answer == "retry" and "all 4 ranks wait" in found.reason


def test_an_older_difference_that_nobody_waits_in_is_none() -> None:
    """Sizes may lawfully differ between ranks, and a collective that has ended blocks no rank."""
    ranks = [
        seen(r, collectives=(CollectiveSeen("world.0", 5, f"gather {r}", False), *collective("barrier")))
        for r in range(4)
    ]
    assert blame(ranks).answer == "retry" and "all 4 ranks wait" in blame(ranks).reason


def test_a_script_without_a_session_is_behind_by_its_collectives() -> None:
    found = blame([seen(r, f"starting:0:{40 if r == 2 else 41}", usual_sequence=0) for r in range(3)])
    assert (found.answer, found.ranks) == ("kill", (2,))
    assert "collective 40 of a script without a session" in found.reason


def device(given: int, begun: int, ended: int, group: str = "world.0") -> tuple[DeviceSeen, ...]:
    return (DeviceSeen(group, given, begun, ended, "nccl:all_reduce of 4096 Float"),)


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (
            device(16, 16, 16),
            "has not been given collective #17 (nccl:all_reduce of 4096 Float) of group world.0",
        ),
        (device(19, 16, 16), "has not begun collective #17"),
    ],
)
def test_of_hosts_that_all_wait_for_their_devices_the_device_that_is_behind_is_named(
    odd: tuple[DeviceSeen, ...], reason: str
) -> None:
    """A host that waits for its device may sleep or spin."""
    for cpu in (0.0, 1.0):
        ranks = [
            seen(r, "vote:20:4", cpu=cpu, devices=odd if r == 2 else device(19, 17, 16)) for r in range(4)
        ]
        found = blame(ranks)
        assert (found.answer, found.ranks, found.confidence) == ("kill", (2,), "likely")
        assert reason in found.reason


def test_a_device_that_waits_in_another_collective_is_not_the_cause() -> None:
    """Rank 0 holds up rank 1 in their pair. Rank 1 is therefore late where rank 3 waits."""
    waits, late = device(4, 4, 3, "row.0"), device(4, 3, 3, "row.0")
    ranks = [
        seen(0, devices=(*late, *device(9, 8, 8, "column.0"))),
        seen(1, devices=(*waits, *device(9, 8, 8, "column.1"))),
        seen(2, devices=device(9, 9, 8, "column.0")),
        seen(3, devices=device(9, 9, 8, "column.1")),
    ]
    found = blame(ranks)
    assert (found.answer, found.ranks) == ("kill", (0,))


def test_devices_that_differ_in_nothing_blame_no_rank() -> None:
    without_timing = blame([seen(r, devices=device(19, 16, 16)) for r in range(4)])
    assert without_timing.answer == "retry" and "all 4 ranks wait" in without_timing.reason
    inside = blame([seen(r, cpu=1.0, process="R", devices=device(19, 17, 16)) for r in range(4)])
    assert inside.answer == "retry" and "devices of all 4 ranks are in collectives" in inside.reason
    two = blame([seen(r, devices=device(19, 17 if r % 2 else 16, 16)) for r in range(4)])
    assert two.answer == "retry" and "one of ranks 0, 2: its device has not begun" in two.reason


def test_a_rank_that_has_left_its_loop_is_named_and_not_the_one_that_waits_for_it() -> None:
    for gone in (seen(1, "ready:20:0", left=True), seen(1, "finished:20:0", left=True)):
        verdict = blame([seen(0), gone])
        assert (verdict.answer, verdict.ranks, verdict.confidence) == ("kill", (1,), "certain")
        assert verdict.reason == (
            "it has left its loop at step 20, the other is in backward of step 20, collective 3"
        )

    assert blame([seen(0, "commit:19:4"), seen(1, "ready:20:0", left=True)]).ranks == (0,), "it comes there"


def test_a_rank_that_leaves_out_a_collective_is_named_and_one_that_makes_one_too_many_as_well() -> None:
    made = CollectiveSeen("world.0", 7, "all_reduce of 4 float32", False)
    waits = CollectiveSeen("world.0", 8, "all_reduce of 4 float32", True)
    verdict = blame(
        [seen(0, collectives=(made, waits)), seen(1, "vote:20:2", collectives=(made,), usual_sequence=2)]
    )
    assert (verdict.answer, verdict.ranks) == ("kill", (1,))
    assert "left out collective #8 of group world.0 (all_reduce of 4 float32)" in verdict.reason
    too_many = seen(0, "backward:20:5", collectives=(made, waits))
    verdict = blame([too_many, seen(1, "vote:20:4", collectives=(made,))])
    assert verdict.ranks == (0,), "the other has made as many as always"
