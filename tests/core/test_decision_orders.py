"""Orders of a decision: the table in the document, and what holds for every schedule."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.ids import Generation, MemberId
from holdfast.core.protocol.messages import Command, RankState, SetTimer, Settle
from holdfast.core.worker.decision_orders import (
    COMPLETE,
    SCRIPT_TIMEOUT_S,
    SCRIPT_TIMER,
    WEIGHTS_TIMEOUT_S,
    WEIGHTS_TIMER,
    CarryOut,
    LookAtWeights,
    OrderBook,
    RefuseOrder,
    Standing,
    orders_of,
    waits_for,
)
from holdfast.core.worker.position import Attendance, ScriptPosition
from holdfast.core.worker.step import SETTLED, StepMachine
from tests.core.test_position import machine_at, rows

P = ScriptPosition
STEP = 3
G1, G2 = Generation(1, 1), Generation(1, 2)


def decision(then: str, **how: object) -> Settle:
    """Return the decision of a fence."""
    return Settle(member_id=MemberId(1), generation=G2, step=STEP, then=then, **how)  # type: ignore[arg-type]


DESTINATIONS = (decision("replace"), decision("replace", rewind=2), decision("restart"))


def ready(step: int = STEP) -> StepMachine:
    """Return a fenced step machine between two steps."""
    steps = StepMachine(G1)
    steps.open(step)
    steps.fence(G2)
    return steps


def kinds(commands: list[Command]) -> list[type[Command]]:
    """Return the kinds of commands, without timers."""
    return [type(command) for command in commands if not isinstance(command, SetTimer)]


# ---------------------------------------------------------------- the document


def test_waits_in_the_document_are_the_waits_in_the_code() -> None:
    assert rows("script at") == [
        [
            position.value,
            *(", ".join(waits_for(settle, machine_at(position))) or "at once" for settle in DESTINATIONS),
        ]
        for position in P
    ]


def test_states_in_the_document_are_the_states_in_the_code() -> None:
    found = {
        state.strip(" `"): verdict
        for states, verdict in rows("state at the step of the decision")
        for state in states.split(",")
    }
    assert set(found) == set(get_args(RankState))
    assert {state for state, verdict in found.items() if verdict.startswith("is carried out")} == COMPLETE
    assert {state for state, verdict in found.items() if verdict == "is refused"} == {"torn"}
    assert COMPLETE < SETTLED, "a state that is given does not change before the next order"


# ---------------------------------------------------------------- one order


@pytest.mark.parametrize("position", list(P))
@pytest.mark.parametrize("settle", DESTINATIONS, ids=["replacement", "go back", "checkpoint"])
def test_an_order_is_carried_out_where_nothing_is_waited_for(
    position: ScriptPosition, settle: Settle
) -> None:
    book, script = OrderBook(), machine_at(position)
    book.add(orders_of(decision(settle.then, rewind=settle.rewind, vouch=True)))
    found = kinds(book.advance(Standing(0.0, ready(), script)))
    waits = waits_for(settle, script)
    assert found == ([] if "script" in waits else [LookAtWeights] if waits else [CarryOut])


@pytest.mark.parametrize("attendance", list(Attendance))
def test_a_script_that_is_not_expected_is_not_waited_for(attendance: Attendance) -> None:
    for position in P:
        script = machine_at(position, attendance)
        assert ("script" in waits_for(decision("replace"), script)) is script.awaits(replaces=True)


def test_a_state_that_is_restored_is_not_read() -> None:
    book, script = OrderBook(), machine_at(P.BOUNDARY)
    script.begin_restore()
    book.add(orders_of(decision("replace")))
    assert book.advance(Standing(0.0, ready(), script)) == []
    script.end_restore()
    assert kinds(book.advance(Standing(0.0, ready(), script))) == [CarryOut]


def test_an_order_of_another_step_waits() -> None:
    book = OrderBook()
    book.add(orders_of(decision("replace")))
    assert book.advance(Standing(0.0, ready(STEP - 1), machine_at(P.BOUNDARY))) == []
    assert len(book.waiting) == 1


def test_a_timer_that_is_early_is_set_again() -> None:
    """Regression: the order waited for ever, and the rank was killed because it did not tell what it holds."""
    book, script = OrderBook(), machine_at(P.AFTER_LOOP)
    book.add(orders_of(decision("replace")))
    begun = book.advance(Standing(0.0, ready(), script))
    assert begun == [SetTimer(name=SCRIPT_TIMER, delay_s=SCRIPT_TIMEOUT_S)]
    assert book.advance(Standing(5.0, ready(), script)) == [], "it runs"
    book.look_again(SCRIPT_TIMER)
    (again,) = book.advance(Standing(SCRIPT_TIMEOUT_S - 0.25, ready(), script))
    assert again == SetTimer(name=SCRIPT_TIMER, delay_s=0.25)
    book.look_again(SCRIPT_TIMER)
    assert kinds(book.advance(Standing(SCRIPT_TIMEOUT_S, ready(), script))) == [LookAtWeights]


# ---------------------------------------------------------------- properties


@given(
    st.sampled_from(list(P)),
    st.sampled_from(list(Attendance)),
    st.sampled_from(DESTINATIONS),
    st.booleans(),
    st.lists(st.sampled_from(["ended", "trained", "other", "pause", "second"]), max_size=30),
)
def test_orders_run_one_at_a_time_and_none_waits_for_ever(
    position: ScriptPosition, attendance: Attendance, settle: Settle, digests: bool, events: list[str]
) -> None:
    book, script, steps, now_s = OrderBook(), machine_at(position, attendance), ready(), 0.0
    orders = orders_of(decision(settle.then, rewind=settle.rewind, vouch=digests))
    book.add(orders)
    done: list[Command] = []
    end = ["trained", "ended", "second", "pause", "other"] * int(SCRIPT_TIMEOUT_S + 2 * WEIGHTS_TIMEOUT_S)
    for event in ("", *events, *end):
        match event:
            case "ended" if book.running is not None:
                book.end()
            case "trained" | "other":
                book.saw_weights(event == "trained")
            case "pause":
                book.look_again(WEIGHTS_TIMER)
            case "second":
                now_s += 1.0
        before = book.running
        found = book.advance(Standing(now_s, steps, script))
        begun = [command for command in found if isinstance(command, CarryOut)]
        assert len(begun) <= 1 and (before is None or not begun)
        done += [command for command in found if isinstance(command, CarryOut | RefuseOrder)]
    assert not book.waiting
    assert [command.order for command in done if isinstance(command, CarryOut | RefuseOrder)] == list(orders)
