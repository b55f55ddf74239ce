"""The nemesis of three hosts: its drawing, its table, and two injections into a real job (``make nemesis``)."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import pytest

from holdfast.errors import InternalError
from holdfast.event_log import Event
from tests.nodes.cables import Network, why_not
from tests.soak import nemesis
from tests.soak.injections import HOLDS_S, HOSTS, KILLS, KINDS, NEVER, Tally, draw

WHY_NOT = why_not()


def test_each_kind_is_drawn_once_in_each_round_and_the_seed_decides_all() -> None:
    rounds = [list(islice(draw(seed, KINDS), 2 * len(KINDS))) for seed in (7, 7, 8)]
    assert rounds[0] == rounds[1] != rounds[2]
    for drawn in rounds:
        assert Counter(each.kind for each in drawn) == dict.fromkeys(KINDS, 2)
        assert all(each.host != each.other and {each.host, each.other} <= set(range(HOSTS)) for each in drawn)
        for each in drawn:
            held = any(low - 0.1 <= each.hold_s <= high + 0.1 for low, high in HOLDS_S)
            assert each.hold_s == 0.0 if each.kind in KILLS else held


def test_the_table_has_a_row_for_each_kind_also_for_those_that_were_not_possible() -> None:
    tally = Tally()
    tally.found["bridge"] += [(1.0, 0), (3.0, 2)]
    tally.failed["killed rank"] += 1
    rows = tally.table(NEVER)[2:]
    assert len(rows) == len(KINDS) + len(NEVER)
    assert "| bridge | 2 | 2 | 2.00 | 3.00 | continued |" in rows
    assert "| killed rank | 1 | 0 | - | - | **failed 1 times** |" in rows
    assert sum("not available here" in row for row in rows) == len(NEVER)


@pytest.mark.parametrize(
    ("kind", "data", "problem"),
    [
        ("planned", {"step": 8, "line": "2.5"}, "step 8 was decided after step 10"),
        ("resumed", {"step": 9}, "resumed on host 1 by a controller that is alone"),
        ("controller_broken", {"error": "KeyError"}, "controller_broken on host 1: KeyError"),
        ("planned", {"step": 9, "line": "2.5"}, ""),
        ("planned", {"step": 8, "line": "1.5"}, ""),
        ("planned", {"step": 8}, ""),
    ],
)
def test_lines_of_a_log_that_break_an_invariant_are_found(
    tmp_path: Path, kind: str, data: dict[str, object], problem: str
) -> None:
    """A decision of a controller that was deposed, or is alone, is not one of the job."""
    training = nemesis.Training(Network(3), tmp_path / "base", "3", 20, Tally(), disks=False)
    training.take(1, Event(1, 1, 0.0, 0.0, "controller", "controller_started", {"line": "2.1"}))
    training.newest = 10
    with pytest.raises(InternalError, match=problem) if problem else nullcontext():
        training.take(1, Event(1, 2, 0.0, 0.0, "controller", kind, data))


@pytest.mark.more
@pytest.mark.processes
@pytest.mark.torch
@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(WHY_NOT), reason=f"no network of several hosts here: {WHY_NOT}")
def test_two_injections_leave_the_weights(tmp_path: Path) -> None:
    kinds = ("bridge", "killed agent")
    tally = nemesis.work(tmp_path, 10, 5.0, kinds, ("2:3",), steps=200, injections=len(kinds))
    assert not tally.failures
    assert {kind: len(found) for kind, found in tally.found.items()} == dict.fromkeys(kinds, 1)
