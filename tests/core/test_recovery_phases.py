"""The table of a recovery: equal to the document, complete, and without contradictions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from holdfast.core.decide.recovery_phases import (
    PHASES,
    RECOVERY_MOVES,
    RULES,
    Order,
    Phase,
    RecoveryEvent,
    Until,
)
from tests.core.test_position import rows

ROOT = Path(__file__).resolve().parents[2]


def test_moves_of_a_recovery_in_the_document_are_those_in_the_code() -> None:
    found = [
        (event, set(re.findall(r"`(\w+)`", sources)) or set(RULES), target.strip("`"))
        for event, sources, target in rows("event of a recovery")
    ]
    assert found == [(moves.event, set(moves.sources), moves.target) for moves in RECOVERY_MOVES]


def test_rules_of_a_phase_in_the_document_are_those_in_the_code() -> None:
    assert rows("phase of a recovery") == [
        [
            phase,
            rules.order or "-",
            (rules.order if rules.to_replacement is None else rules.to_replacement) or "-",
            rules.until or "-",
            ", ".join(rules.waits) or "-",
            rules.then or "-",
            "yes" if rules.compares else "no",
            "yes" if rules.in_place else "no",
            "yes" if rules.trains else "no",
        ]
        for phase, rules in RULES.items()
    ]


def test_no_two_moves_of_a_recovery_contradict_each_other() -> None:
    pairs = [(source, moves.event) for moves in RECOVERY_MOVES for source in moves.sources]
    assert len(pairs) == len(set(pairs)) == len(PHASES)
    assert {moves.event for moves in RECOVERY_MOVES} == set(get_args(RecoveryEvent))


def test_each_phase_is_reached_and_left() -> None:
    assert set(RULES) == set(get_args(Phase)) == set(PHASES.values())
    left = {phase for (phase, _), target in PHASES.items() if target not in (phase, "stopped")}
    assert left == set(RULES) - {"ending", "stopped"}, "the end of a run is left by nothing"


def test_each_phase_after_a_decision_has_an_order_and_says_what_sources_do() -> None:
    for phase, rules in RULES.items():
        assert bool(rules.then) == (rules.order == "settle"), phase
        assert not rules.compares or "vouch" in rules.waits, phase
    assert {rules.order for rules in RULES.values()} | {"receive"} == set(get_args(Order))
    assert {rules.until for rules in RULES.values()} == set(get_args(Until))
