"""The ladder as a table: the rung that is chosen, the order of rungs, and the reasons against the rungs before it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.core.config import Config
from holdfast.core.decide.ladder import (
    AUTO,
    BY_NAME,
    CAUSES,
    LAST_RESORTS,
    RUNGS,
    SPELLINGS,
    Case,
    Ladder,
    judge,
)
from holdfast.core.decide.stop_policy import LadderVerdict, Situation
from holdfast.core.job.situation import CAUSE_OF
from holdfast.errors import UsageError

DEATH = Situation(
    step=20, base_step=10, session=True, all_alive=False, all_sound=True, unreplaceable="", uncovered="",
    checkpoint_known=True, causes=("crash",),
)  # fmt: skip
WHOLE = {"all_alive": True}
NODE = {"lost_nodes": ("node1",), "causes": ("node",)}
FIXED: dict[str, Any] = {"unreplaceable": "its groups cannot be rebuilt"}
UNCOVERED: dict[str, Any] = {**FIXED, "uncovered": "no holder of box 1"}


def decide(on_fault: str = "auto", **changes: Any) -> LadderVerdict:
    """Return the verdict on an ordinary death with some facts changed."""
    config = Config(run_id="r", world_size=4, on_fault=on_fault)
    return judge(0.0, msgspec.structs.replace(DEATH, **changes), [], config)


@pytest.mark.parametrize(
    ("on_fault", "changes", "rung", "action"),
    [
        ("auto", WHOLE, "retry", "retry_in_place"),
        ("auto", {}, "replace", "replace"),
        ("auto", NODE, "node", "replace"),
        ("auto", {**FIXED, "memory_here": 20}, "memory", "replace_from_memory"),
        ("auto", {**FIXED, "fewer": "there is room for 2 of 4 ranks"}, "shrink", "restart_last_gasp"),
        ("auto", FIXED, "restart", "restart_last_gasp"),
        ("auto", {**UNCOVERED, "memory_step": 18}, "memory-restart", "restart_from_memory"),
        ("auto", UNCOVERED, "disk", "restart_checkpoint"),
        ("auto", {**UNCOVERED, "checkpoint_known": False, "unequal": "copies differ"}, "recompute", "restart_fresh"),
        ("auto", {**UNCOVERED, "checkpoint_known": False}, "recompute", "restart_fresh"),
        ("recompute", {}, "restart", "restart_last_gasp"),
        ("recompute", UNCOVERED, "disk", "restart_checkpoint"),
        ("auto", {"step": None}, "begin", "restart_fresh"),
        ("auto", {"room": "there is room for 4 ranks, 2 now"}, "grow", "restart_last_gasp"),
        ("restart", {}, "restart", "restart_last_gasp"),
        ("restart", WHOLE, "retry", "retry_in_place"),
        ("process", {}, "replace", "replace"),
        ("pod", {}, "restart", "restart_last_gasp"),
        ("job", {}, "requeue", "requeue"),
        ("job", UNCOVERED, "requeue", "requeue"),
        ("job", {**UNCOVERED, "checkpoint_known": False, "memory_step": 3}, "memory-restart", "restart_from_memory"),
        ("requeue,replace", {}, "requeue", "requeue"),
        ("replace,requeue", {}, "replace", "replace"),
        ("replace,requeue", NODE, "requeue", "requeue"),
        ("replace,requeue", {"step": None}, "begin", "restart_fresh"),
        ("disk", {}, "disk", "restart_checkpoint"),
        ("crash:restart", {}, "restart", "restart_last_gasp"),
        ("crash:restart", {"causes": ("hang",)}, "replace", "replace"),
        ("crash:replace,hang:restart", {"causes": ("crash", "hang")}, "restart", "restart_last_gasp"),
        ("restart,crash:replace", {}, "replace", "replace"),
        ("node:job", NODE, "requeue", "requeue"),
        ("auto", {"exits": "asked to exit (SIGTERM)"}, "requeue", "requeue"),
        ("auto", {**WHOLE, "exits": "asked to exit (SIGTERM)"}, "retry", "retry_in_place"),
        ("auto", {**WHOLE, "exits": "no majority", "minority": True}, "requeue", "requeue"),
        ("auto", {**WHOLE, "exits": "no majority", "minority": True, "step": None}, "begin", "restart_fresh"),
        ("auto", {**UNCOVERED, "exits": "asked to exit (SIGTERM)", "memory_here": 20}, "memory", "replace_from_memory"),
    ],
)  # fmt: skip
def test_the_table(on_fault: str, changes: dict[str, Any], rung: str, action: str) -> None:
    verdict = decide(on_fault, **changes)
    assert (verdict.rung, verdict.action) == (rung, action)


def test_a_verdict_says_why_the_rungs_before_it_were_refused() -> None:
    verdict = decide(**FIXED)
    names = [line.partition(": ")[0] for line in verdict.refused]
    assert names == ["grow", "retry", "begin", "replace", "node", "memory", "shrink"]
    assert "replace: its groups cannot be rebuilt" in verdict.refused
    assert all(line.partition(": ")[2] for line in verdict.refused)


def test_beginning_anew_is_said_with_all_refusals() -> None:
    verdict = decide("auto", **UNCOVERED | {"checkpoint_known": False})
    assert "is lost" in verdict.reason and "nothing was saved since the start" in verdict.reason
    assert [line.partition(": ")[0] for line in verdict.refused] == list(AUTO[:-1])


@pytest.mark.parametrize(
    "spec", ["", "auto", "restart", "replace", "requeue", "disk,memory", "hang:job,crash:pod"]
)
def test_every_ladder_ends_with_the_last_resorts(spec: str) -> None:
    for causes in ((), *((cause,) for cause in CAUSES), CAUSES):
        names = [rung.name for rung in Ladder.parse(spec).rungs(causes)]
        assert len(set(names)) == len(names) and set(LAST_RESORTS) | {"begin", "grow"} <= set(names)


def test_a_rung_answers_the_same_again() -> None:
    config = Config(run_id="r", world_size=4)
    for rung in RUNGS:
        for changes in ({}, WHOLE, NODE, FIXED, UNCOVERED, {"step": None}):
            case = Case(msgspec.structs.replace(DEATH, **changes), (), config)
            assert rung.consider(case) == rung.consider(case) != ""


@pytest.mark.parametrize(
    ("spec", "word"),
    [("relace", "no such answer"), ("crash:relace", "no such answer"), ("crush:replace", "cause")],
)
def test_words_that_mean_nothing_are_refused(spec: str, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        Ladder.parse(spec)


def test_the_document_lists_the_rungs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "ladder.md").read_text()
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (.+) \|$", text, re.MULTILINE))
    assert {name: rows[name] for name in BY_NAME} == {rung.name: rung.does for rung in RUNGS}
    assert {name for name in rows if name in SPELLINGS} == {"process", "pod", "job"}
    assert set(CAUSE_OF.values()) | {"node", "other"} == set(CAUSES)
