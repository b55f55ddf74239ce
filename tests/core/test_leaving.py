"""Rules for a node that will leave: the table of docs/design/0036-leaving.md, and its invariants."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from holdfast.core.job.leaving import LeavingAnswer, LeavingFacts, answer_notice

USUAL: dict[str, Any] = {
    "left_s": None, "move_s": 5.0, "save_s": 15.0, "at_once": False, "stands": True, "fits": True,
    "fits_fewer": False, "holds_ranks": True, "prepared": False,
}  # fmt: skip
NO_ROOM = {"fits": False}
FEWER = {"fits": False, "fits_fewer": True}


@pytest.mark.parametrize(
    ("what", "answer"),
    [
        ({}, "prepare"),
        ({"prepared": True}, "move"),
        ({"left_s": 100.0}, "prepare"),
        ({"left_s": 4.0}, "move"),
        ({"holds_ranks": False}, "leave"),
        ({"holds_ranks": False, **NO_ROOM}, "leave"),
        (FEWER, "shrink"),
        ({**FEWER, "left_s": 100.0}, "wait"),
        ({**FEWER, "left_s": 4.0}, "shrink"),
        ({**FEWER, "left_s": 100.0, "at_once": True}, "shrink"),
        (NO_ROOM, "wait"),
        ({**NO_ROOM, "left_s": 16.0}, "wait"),
        ({**NO_ROOM, "left_s": 15.0}, "save"),
        ({**NO_ROOM, "at_once": True, "left_s": 300.0}, "save"),
        ({"stands": False}, "wait"),
        ({"stands": False, "left_s": 100.0}, "wait"),
        ({"stands": False, "left_s": 10.0}, "save"),
        ({"stands": False, "holds_ranks": False, "left_s": 10.0}, "save"),
        ({"stands": False, "at_once": True, "left_s": 300.0}, "save"),
    ],
)
def test_the_table(what: dict[str, Any], answer: LeavingAnswer) -> None:
    assert answer_notice(LeavingFacts(**{**USUAL, **what})) == answer


LEFT_OUT = {"only_ranks": True}


@pytest.mark.parametrize(
    ("what", "answer"),
    [
        ({}, "prepare"),
        ({"prepared": True}, "move"),
        ({"holds_ranks": False}, "wait"),
        (NO_ROOM, "wait"),
        (FEWER, "wait"),
        ({"stands": False}, "wait"),
    ],
)
def test_a_node_that_is_left_out_only_loses_its_ranks(what: dict[str, Any], answer: LeavingAnswer) -> None:
    assert answer_notice(LeavingFacts(**{**USUAL, **LEFT_OUT, **what})) == answer


def test_no_answer_costs_the_job_something_before_it_has_to() -> None:
    flags = ("at_once", "stands", "fits", "fits_fewer", "holds_ranks", "prepared")
    for values in itertools.product((False, True), repeat=len(flags)):
        for left_s in (None, 0.0, 4.0, 10.0, 100.0):
            facts = LeavingFacts(**{**USUAL, **dict(zip(flags, values, strict=True)), "left_s": left_s})
            answer = answer_notice(facts)
            if answer == "save":
                assert facts.at_once or (left_s is not None and left_s <= facts.save_s)
                assert not (facts.stands and (facts.fits or facts.fits_fewer))
            if answer in ("move", "shrink", "leave", "prepare"):
                assert facts.stands, "never against a majority, or the only holder of a part of the state"
            if left_s is not None and left_s <= facts.move_s:
                assert answer not in ("wait", "prepare"), "a deadline is never slept through"
