"""The step that the memory tier can give back after a fault."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core.decide.decision import Decision
from holdfast.core.ids import Generation, MemberId, NodeId
from holdfast.core.job.membership import Member
from holdfast.core.job.memory_tier import kept_by, newest_complete, replacement_step, replayed
from holdfast.core.protocol.messages import MemberExited, Settled

GENERATION = Generation(1, 2)


def seat(rank: int, kept: tuple[int, ...] | None, replays: tuple[int, ...] = ()) -> Member:
    """Return a member.

    With ``kept`` it is dead and has left states of these steps, and a log up to each of ``replays``.
    """
    member = Member(member_id=MemberId(rank + 1), rank=rank, local_rank=rank, node_id=NodeId("node0"))
    if kept is not None:
        member.alive = False
        member.exited = MemberExited(
            member_id=member.member_id, node_id=member.node_id, generation=GENERATION, code=None, signal=9,
            state="compute", step=6, kept=kept, replays=replays,
        )  # fmt: skip
    return member


def answers(*kept: tuple[int, ...], rewind: int = 0) -> dict[int, Settled]:
    """Return the answers of the living ranks, from rank 0 on."""
    return {
        rank: Settled(
            member_id=MemberId(rank + 1),
            generation=GENERATION,
            state="ready",
            step=6,
            kept=steps,
            rewind=rewind,
        )
        for rank, steps in enumerate(kept)
    }


def stands(step: int | None) -> Decision:
    """Return a decision that the job is at this step."""
    return Decision(step=step, direction="none", in_doubt=0, sources=(0, 1), sound=True, evidence=())


@pytest.mark.parametrize(
    ("dead", "living", "changes", "step"),
    [
        ((5, 6), ((5, 6), (5, 6)), {}, 6),  # the dead rank left exactly this state: no rank goes back
        ((6,), ((3,), (4,)), {}, 6),  # then the states that the living ranks keep do not matter
        ((4, 5), ((5, 6), (5, 6)), {}, 5),  # the rank died in its update: back to the step that all have
        ((4,), ((4, 6), (4,)), {}, 4),
        ((4,), ((5, 6), (4, 6)), {}, -1),  # no step is complete: never mix steps
        ((), ((5, 6), (5, 6)), {}, -1),
        ((4, 5), ((5, 6), (5, 6)), {"rewind": -1}, -1),  # the living ranks have left their loop
        ((4, 5), ((5, 6), (5, 6)), {"rewind": 6}, -1),  # or have begun the loop later
        ((4, 5), ((5, 6), (5, 6)), {"sealed": 6}, -1),  # the disk has a newer state
        ((4, 5), ((5, 6), (5, 6)), {"decided": None}, -1),
        ((), ((5, 6), (5, 6)), {"held": {2: frozenset({5})}}, 5),  # the rank's node is lost, another has the state
        ((7,), ((7,), (7,)), {}, -1),  # states of a step that does not count
    ],
)  # fmt: skip
def test_step_of_a_replacement(dead: Any, living: Any, changes: dict[str, Any], step: int) -> None:
    members = [seat(0, None), seat(1, None), seat(2, dead)]
    told = answers(*living, rewind=changes.get("rewind", 0))
    decided = stands(changes.get("decided", 6))
    assert (
        replacement_step(decided, members, told, changes.get("held", {}), changes.get("sealed", -1)) == step
    )


def test_a_member_that_says_nothing_keeps_nothing() -> None:
    members = [seat(0, None), seat(1, None), seat(2, (5,))]
    kept = kept_by(members, answers((5,)), {2: frozenset({4})})
    assert kept == {0: {5}, 1: frozenset(), 2: {4, 5}}
    assert newest_complete(kept, 9) == -1
    assert newest_complete({}, 9) == -1


@pytest.mark.parametrize(
    ("dead", "step", "sources", "found"),
    [
        ([((4,), (5, 6))], 6, (0, 1), True),
        # the rank died before it logged the update that the others have applied
        ([((4,), (5,))], 6, (0, 1), False),
        ([((4,), (5, 6)), ((6,), ())], 6, (0, 1), True),  # one rank has left exactly this state
        ([((4,), (5, 6)), ((5,), ())], 6, (0, 1), False),
        ([((6,), ()), ((6,), ())], 6, (0, 1), False),  # no update has to be made again
        ([((4,), (5, 6))], 6, (), False),  # no rank has the tensors that are not in a log
        ([((4,), (5, 6))], None, (0, 1), False),
        ([], 6, (0, 1), False),
    ],
)
def test_updates_are_made_again_where_every_lost_rank_has_them(
    dead: list[tuple[tuple[int, ...], tuple[int, ...]]],
    step: int | None,
    sources: tuple[int, ...],
    found: bool,
) -> None:
    members = [seat(0, None), seat(1, None)]
    members += [seat(2 + n, kept, replays) for n, (kept, replays) in enumerate(dead)]
    decided = Decision(step=step, direction="none", in_doubt=0, sources=sources, sound=True, evidence=())
    assert replayed(decided, members, answers((4,), (4,)), {}) == found
