"""The position of the script: its tables, all legal and illegal events, and their meaning for a survivor."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.worker.position import (
    ATTENDANCES,
    MOVES,
    NO_REWIND,
    RULES,
    STORY_LENGTH,
    TABLE,
    Attendance,
    ScriptEvent,
    ScriptMachine,
    ScriptPosition,
    comes_back,
)
from holdfast.errors import HoldfastError, InternalError, StepError

P, E, A = ScriptPosition, ScriptEvent, Attendance
PROTOCOL = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"
OF_SECTIONS = (E.SECTION_BEGUN, E.SECTION_ENDED, E.SECTION_CUT, E.STRAYED, E.TURN_DONE)
WAYS: dict[ScriptPosition, tuple[ScriptEvent, ...]] = {
    P.OUTSIDE: (),
    P.BETWEEN_LOOPS: (E.LOOP_AHEAD,),
    P.BOUNDARY: (E.LOOP_OPENED,),
    P.AT_STEP: (E.LOOP_OPENED, E.STEP_TAKEN),
    P.BEFORE_BLOCK: (E.LOOP_OPENED, E.STEP_TAKEN, E.STEP_GIVEN),
    P.AT_BLOCK: (E.LOOP_OPENED, E.STEP_TAKEN, E.STEP_GIVEN, E.HELD),
    P.IN_BLOCK: (E.LOOP_OPENED, E.STEP_TAKEN, E.STEP_GIVEN, E.BLOCK_BEGUN),
    P.AFTER_BLOCK: (E.LOOP_OPENED, E.STEP_TAKEN, E.STEP_GIVEN, E.BLOCK_BEGUN, E.BLOCK_ENDED),
    P.LEFT_LOOP: (E.LOOP_OPENED, E.LOOP_LEFT),
    P.AFTER_LOOP: (E.LOOP_OPENED, E.LOOP_OVER),
    P.NEXT_LOOP: (E.LOOP_OPENED, E.LOOP_OVER, E.LOOP_OPENED),
}
"""An ordinary way to each position."""


def machine_at(position: ScriptPosition, attendance: Attendance = A.EXPECTED) -> ScriptMachine:
    """Return a machine in this position and attendance, in a loop that can go back to step 3."""
    machine = ScriptMachine()
    around = attendance is A.STEPS_IN_SECTION
    for event in (*((E.SECTION_BEGUN,) if around else ()), *WAYS[position]):
        machine.handle(event)
    if around and machine.attendance is not attendance:
        machine.handle(E.TURN_DONE)
    if attendance in (A.IN_SECTION, A.STRAYED):
        machine.handle(E.SECTION_BEGUN if attendance is A.IN_SECTION else E.STRAYED)
    machine.allow_rewind(3)
    assert (machine.position, machine.attendance) == (position, attendance)
    return machine


# ---------------------------------------------------------------- the document


def rows(title: str) -> list[list[str]]:
    """Return the cells of the table in the document whose first column title is ``title``."""
    text = PROTOCOL.read_text()
    table = text[text.index(f"\n| {title} |") :].lstrip("\n").split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_moves_in_the_document_are_the_moves_in_the_code() -> None:
    found = {}
    for event, sources, target in rows("event"):
        names = {P(name) for name in re.findall(r"`(\w+)`", sources)}
        for source in set(P) - names if sources.startswith("any but") else names:
            assert (source, E(event)) not in found, "two rows say where this leads"
            found[source, E(event)] = source if target == "the same" else P(target.strip("`"))
    assert found == TABLE
    assert len(rows("event")) == len(MOVES)


def test_attendance_in_the_document_is_that_in_the_code() -> None:
    events = (E.SECTION_BEGUN, E.SECTION_ENDED, E.SECTION_CUT, E.STRAYED, E.BLOCK_BEGUN, E.TURN_DONE)
    found = {
        (A(name), event): A(cell.strip("`"))
        for name, *cells in rows("attendance")
        for event, cell in zip(events, cells, strict=True)
        if cell != "-"
    }
    assert found == ATTENDANCES


def test_rules_in_the_document_are_the_rules_in_the_code() -> None:
    assert rows("position") == [
        [
            position.value,
            rule.awaited or "no",
            rule.gives,
            "yes" if rule.can_rewind else "no",
            "refused" if rule.guarded else "allowed",
        ]
        for position, rule in RULES.items()
    ]


# ---------------------------------------------------------------- the tables


def test_no_two_moves_contradict_each_other() -> None:
    pairs = [(source, moves.event) for moves in MOVES for source in moves.sources]
    assert len(pairs) == len(set(pairs)) == len(TABLE)


def test_each_position_and_attendance_is_reached_and_left() -> None:
    assert set(RULES) == set(P)
    assert {target for (source, _), target in TABLE.items() if source is not target} == set(P) - {P.OUTSIDE}
    assert set(ATTENDANCES.values()) == set(A)


@pytest.mark.parametrize(("position", "event"), list(TABLE))
def test_a_legal_event_leads_where_the_table_says(position: ScriptPosition, event: ScriptEvent) -> None:
    for attendance in A:
        machine = machine_at(position, attendance)
        assert machine.handle(event) is machine.position is TABLE[position, event]
        assert machine.attendance is ATTENDANCES.get((attendance, event), attendance)
        ends = event in (E.LOOP_LEFT, E.LOOP_OVER)
        assert machine.rewinds_to == (NO_REWIND if ends else 3)


@pytest.mark.parametrize(
    ("position", "event"),
    [pair for pair in product(P, E) if pair not in TABLE and pair[1] not in OF_SECTIONS],
)
def test_an_illegal_event_is_refused_with_the_story_and_changes_nothing(
    position: ScriptPosition, event: ScriptEvent
) -> None:
    machine = machine_at(position)
    before = (machine.position, machine.attendance, machine.story)
    with pytest.raises((StepError, InternalError)) as caught:
        machine.handle(event)
    error: HoldfastError = caught.value
    assert f"{event.value!r} does not fit a script that is {position.value}, expected" in error.message
    assert all(line in error.message for line in machine.story) and error.hint
    assert (machine.position, machine.attendance, machine.story) == before


@pytest.mark.parametrize(("attendance", "event"), list(product(A, OF_SECTIONS)))
def test_an_event_of_the_attendance_leaves_the_position(attendance: Attendance, event: ScriptEvent) -> None:
    machine = machine_at(P.AFTER_BLOCK, attendance)
    target = ATTENDANCES.get((attendance, event))
    if target is None:
        with pytest.raises(StepError if event is E.SECTION_BEGUN else InternalError):
            machine.handle(event)
    else:
        assert machine.handle(event) is P.AFTER_BLOCK
    assert machine.attendance is (target or attendance)


def test_what_a_script_does_at_a_wrong_time_is_its_error_and_names_the_way_out() -> None:
    with pytest.raises(StepError, match="'step_taken' does not fit a script that is in_block") as caught:
        machine_at(P.IN_BLOCK).handle(E.STEP_TAKEN)
    assert "outside of the block" in caught.value.hint
    with pytest.raises(InternalError, match="'step_given' does not fit"):
        machine_at(P.BOUNDARY).handle(E.STEP_GIVEN)


def test_the_story_is_short() -> None:
    machine = machine_at(P.BOUNDARY)
    for _ in range(2 * STORY_LENGTH):
        machine.handle(E.RETURNED)
    assert len(machine.story) == STORY_LENGTH
    assert machine.story[-1] == "returned -> boundary, expected"


# ---------------------------------------------------------------- what it means


@pytest.mark.parametrize(
    ("position", "attendance", "replaces", "awaits"),
    [
        (P.AFTER_BLOCK, A.EXPECTED, True, True),
        (P.AFTER_BLOCK, A.EXPECTED, False, True),
        (P.AFTER_BLOCK, A.IN_SECTION, True, True),  # a section after a block belongs to the step of the block
        (P.AFTER_BLOCK, A.STRAYED, True, False),
        (P.AFTER_LOOP, A.EXPECTED, True, True),
        (P.AFTER_LOOP, A.IN_SECTION, True, False),  # all ranks run it again
        (P.BEFORE_BLOCK, A.EXPECTED, True, True),
        (P.BEFORE_BLOCK, A.EXPECTED, False, False),  # all ranks start again before the block
        (P.BEFORE_BLOCK, A.IN_SECTION, True, False),
        (P.AT_BLOCK, A.EXPECTED, True, False),
        (P.IN_BLOCK, A.EXPECTED, True, False),
        (P.BETWEEN_LOOPS, A.EXPECTED, True, False),
    ],
)
def test_which_script_is_waited_for(
    position: ScriptPosition, attendance: Attendance, replaces: bool, awaits: bool
) -> None:
    assert machine_at(position, attendance).awaits(replaces=replaces) is awaits


def test_a_loop_of_another_library_is_not_waited_for_and_gives_the_state_of_now() -> None:
    machine = machine_at(P.BEFORE_BLOCK)
    assert machine.awaits(replaces=True) and machine.gives(aborted=False) == "boundary"
    assert machine.handle(E.FRAMEWORK_DONE) is P.AT_STEP
    assert not machine.awaits(replaces=True) and machine.gives(aborted=False) == "now"
    machine.handle(E.BLOCK_BEGUN)
    machine.handle(E.BLOCK_ENDED)
    assert machine.awaits(replaces=True), "what it does after a block is a part of the step, as everywhere"


def test_an_aborted_block_gives_its_start() -> None:
    assert {machine_at(position).gives(aborted=True) for position in P} == {"now"}


def test_a_step_that_was_given_again_repeats_until_its_block() -> None:
    machine = machine_at(P.AT_STEP)
    machine.handle(E.STEP_GIVEN, again=True)
    assert machine.repeats
    machine.handle(E.SECTION_BEGUN)
    assert machine.repeats, "a section before the block repeats, too"
    machine.handle(E.BLOCK_BEGUN)
    assert not machine.repeats


def test_a_loop_is_unfinished_until_it_or_its_turn_has_ended() -> None:
    machine = machine_at(P.BOUNDARY)
    seen = [machine.unfinished]
    machine.run_loop(unfinished=True)
    machine.handle(E.LOOP_LEFT)
    seen.append(machine.unfinished)
    machine.handle(E.TURN_ENDED)
    machine.handle(E.TURN_DONE)
    seen.append(machine.unfinished)
    machine.run_loop(unfinished=True)
    machine.end_loop()
    assert [*seen, machine.unfinished] == [False, True, False, False]


def test_a_replacement_joins_once_and_restores_in_between() -> None:
    machine = ScriptMachine(joining=True)
    seen = [(machine.joining, machine.restoring)]
    machine.join()
    machine.begin_restore()
    seen.append((machine.joining, machine.restoring))
    machine.end_restore()
    machine.forbid_rewind()
    assert [*seen, (machine.joining, machine.restoring)] == [(True, False), (False, True), (False, False)]
    assert machine.offers_rewind == NO_REWIND


# ---------------------------------------------------------------- properties


def answers(machine: ScriptMachine) -> tuple[object, ...]:
    """Return all answers that a decision may ask for."""
    return (
        *(machine.awaits(replaces=each) for each in (False, True)),
        *(machine.gives(aborted=each) for each in (False, True)),
        machine.offers_rewind,
        machine.away,
        machine.in_section,
        machine.may_hold_other_weights,
        machine.rules.guarded,
        machine.repeats,
    )


def walk(events: list[ScriptEvent]) -> ScriptMachine:
    """Return a machine after the legal ones of the events, in an unfinished loop that can go back to step 3."""
    machine = ScriptMachine()
    for event in events:
        if event is E.LOOP_OPENED and (machine.position, event) in TABLE:
            machine.allow_rewind(3)
            machine.run_loop(unfinished=True)
        position = event in OF_SECTIONS or (machine.position, event) in TABLE
        attendance = event not in OF_SECTIONS or (machine.attendance, event) in ATTENDANCES
        if position and attendance:
            machine.handle(event)
    return machine


@given(st.lists(st.sampled_from(E), max_size=60))
def test_every_walk_ends_where_each_question_has_an_answer_that_stays(events: list[ScriptEvent]) -> None:
    machine = walk(events)
    first = answers(machine)
    assert first == answers(machine) and None not in first
    assert any((machine.position, event) in TABLE for event in E), "a position without a way out"


@given(st.lists(st.sampled_from(E), max_size=60))
def test_invariants_hold_on_every_walk(events: list[ScriptEvent]) -> None:
    machine = walk(events)
    here, now = machine.position, machine.gives(aborted=False) == "now"
    assert not now or here is P.AT_BLOCK or machine.by_framework
    assert machine.may_hold_other_weights or not comes_back(here, machine.attendance)
    assert here not in (P.AT_STEP, P.BEFORE_BLOCK, P.AT_BLOCK) or machine.offers_rewind == NO_REWIND
    assert machine.in_section or not (machine.awaits(replaces=True) and machine.away)
    assert not machine.awaits(replaces=False) or machine.awaits(replaces=True)


@given(st.lists(st.sampled_from(E), max_size=60), st.sampled_from([E.LOOP_LEFT, E.LOOP_OVER]))
def test_no_loop_goes_back_after_its_end(events: list[ScriptEvent], end: ScriptEvent) -> None:
    machine = walk([E.LOOP_OPENED, *events, end])
    assert machine.rewinds_to == machine.offers_rewind == NO_REWIND
