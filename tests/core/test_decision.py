"""The step of the job, decided from the steps of its ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.decide.decision import Decision, RankReport, committed_floor, decide
from holdfast.core.protocol.messages import RankState


def reports(text: str) -> list[RankReport]:
    """Return the reports of ranks 0, 1, ... from a text such as ``"ready 5, dead updating 4"``."""
    found = []
    for rank, item in enumerate(text.split(",")):
        words = item.split()
        state: RankState = words[-2]  # type: ignore[assignment]
        found.append(RankReport(rank, state, int(words[-1]), words[0] != "dead"))
    return found


@pytest.mark.parametrize(
    ("text", "step", "direction", "sources"),
    [
        ("aborted 5, aborted 5, dead compute 5", 5, "none", (0, 1)),
        ("in_doubt 5, in_doubt 5, dead voting 5", 5, "back", (0, 1)),
        ("in_doubt 5, ready 6, dead voting 5", 6, "forward", (0, 1)),
        ("in_doubt 5, in_doubt 5, dead updating 5", 6, "forward", (0, 1)),
        ("in_doubt 5, in_doubt 5, dead ready 6", 6, "forward", (0, 1)),
        ("in_doubt 5, torn 5", 6, "forward", (0,)),
        ("torn 5, dead updating 5", 6, "none", ()),
        ("aborted 5, in_doubt 5, dead voting 5", 5, "back", (0, 1)),
        ("ready 5, aborted 5, dead ready 5", 5, "none", (0, 1)),
        ("finished 9, ready 9, dead ready 9", 9, "none", (0, 1)),
        ("in_doubt 8, finished 9", 9, "forward", (0, 1)),
        ("ready 5, starting 0, dead compute 5", 5, "none", (0,)),
        ("dead updating 5, dead ready 5", 6, "none", ()),
    ],
)
def test_rule(text: str, step: int, direction: str, sources: tuple[int, ...]) -> None:
    decided = decide(reports(text))
    assert (decided.step, decided.direction, decided.sources) == (step, direction, sources)


def test_without_a_session_there_is_no_step() -> None:
    assert decide(reports("starting 0, dead starting 0")).step is None
    assert decide([]).step is None


def test_a_sealed_checkpoint_is_evidence_too() -> None:
    decided = decide(reports("in_doubt 5, in_doubt 5"), sealed_step=6)
    assert (decided.step, decided.direction) == (6, "forward")
    assert "a checkpoint of step 6 is saved" in decided.evidence


def test_evidence_names_who_proves_it() -> None:
    decided = decide(reports("in_doubt 5, in_doubt 5, dead updating 5"))
    assert decided.evidence == ("dead rank 2 was in the update of step 5",)


def legal_worlds() -> st.SearchStrategy[list[RankReport]]:
    """Draw situations that the protocol allows around step 5: no rank updates unless all have voted."""
    everyone_voted = st.tuples(st.sampled_from(["in_doubt 5", "ready 6", "torn 5"]), st.booleans())
    dead_only = st.sampled_from(["updating 5", "voting 5"])
    some_did_not = st.tuples(st.sampled_from(["aborted 5", "ready 5", "in_doubt 5"]), st.booleans())

    def build(items: list[tuple[str, bool]], dead: list[str]) -> list[RankReport]:
        text = [f"{'' if alive else 'dead '}{where}" for where, alive in items] + [f"dead {d}" for d in dead]
        return reports(", ".join(text))

    voted = st.builds(
        build, st.lists(everyone_voted, min_size=1, max_size=6), st.lists(dead_only, max_size=2)
    )
    unvoted = st.builds(build, st.lists(some_did_not, min_size=1, max_size=6), st.just([]))
    return st.one_of(voted, unvoted)


@given(legal_worlds())
def test_no_living_rank_is_left_behind_or_overruled(world: list[RankReport]) -> None:
    decided: Decision = decide(world)
    floors = [f for f in map(committed_floor, world) if f is not None]
    assert decided.step == max(floors)
    sound = [r.rank for r in world if r.alive and r.state != "torn"]
    assert list(decided.sources) == sound, "every sound survivor can be brought to the decided step"
