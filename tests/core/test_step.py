"""The step protocol: its table, its misuse, and a typical sequence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.ids import Generation
from holdfast.core.protocol.messages import RankState
from holdfast.core.worker.step import TRANSITIONS, Decision, StepMachine
from holdfast.errors import HoldfastError, InternalError, StepError

G1, G2, G3 = Generation(1, 1), Generation(1, 2), Generation(1, 3)
PROTOCOL = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"


def machine_at(state: RankState, step: int = 7) -> StepMachine:
    """Return a free machine in ``state``, including in_doubt and voting."""
    machine = StepMachine(G1)
    if state == "starting":
        return machine
    machine.open(step)
    if state == "finished":
        machine.finish()
    if state in ("ready", "finished"):
        return machine
    assert machine.begin()
    if state == "aborted":
        machine.fail()
    if state in ("compute", "aborted"):
        return machine
    assert machine.enter_vote()
    if state == "in_doubt":
        machine.vote_broken()
    if state in ("updating", "torn"):
        machine.vote_passed()
    if state == "torn":
        machine.fail()
    assert machine.state == state
    return machine


def test_table_in_the_document_is_the_table_in_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (\w+) \| `(\w+)` \|$", PROTOCOL.read_text(), re.MULTILINE)
    assert rows == [(t.state, t.event.value, t.when, t.target) for t in TRANSITIONS]


def test_no_two_rows_contradict_each_other() -> None:
    keys = [
        (t.state, t.event, fenced)
        for t in TRANSITIONS
        for fenced in (False, True)
        if t.when == "any" or (t.when == "fenced") == fenced
    ]
    assert len(keys) == len(set(keys))


def test_a_step_commits_once() -> None:
    machine = machine_at("updating")
    assert machine.end_block() == "ready"
    assert (machine.step, machine.settled) == (8, False)


def test_two_updates_in_one_block_are_refused_with_the_story() -> None:
    machine = machine_at("updating")
    with pytest.raises(
        StepError, match=r"(?s)'vote' does not fit UPDATING\(7\).*VOTING\(7\) -passed-> UPDATING"
    ) as e:
        machine.enter_vote()
    assert "one optimizer update" in e.value.hint


@pytest.mark.parametrize(
    ("state", "after", "settled"),
    [
        ("starting", "starting", True),
        ("ready", "ready", True),
        ("compute", "aborted", True),
        ("voting", "voting", False),
        ("updating", "updating", False),
        ("in_doubt", "in_doubt", True),
        ("aborted", "aborted", True),
        ("torn", "torn", True),
        ("finished", "finished", True),
    ],
)
def test_a_fence_freezes_each_state_at_its_boundary(
    state: RankState, after: RankState, settled: bool
) -> None:
    machine = machine_at(state)
    assert machine.fence(G2)
    assert (machine.state, machine.settled) == (after, settled)
    assert not machine.fence(G2), "a repeated fence is no news"
    assert not machine.fence(G1), "neither is an older one"


def test_a_fenced_rank_does_not_begin_or_vote() -> None:
    ready, computing = machine_at("ready"), machine_at("compute")
    ready.fence(G2)
    computing.fence(G2)
    assert not ready.begin() and ready.state == "ready"
    assert not computing.enter_vote() and computing.state == "aborted"


def test_a_vote_that_passes_behind_a_fence_is_in_doubt() -> None:
    machine = machine_at("voting")
    machine.fence(G2)
    assert machine.vote_passed() == "in_doubt" and machine.settled


@pytest.mark.parametrize(
    ("state", "step", "decision", "after"),
    [
        ("in_doubt", 8, "apply", "updating"),
        ("in_doubt", 7, "discard", "aborted"),
        ("ready", 7, "stay", "ready"),
        ("aborted", 7, "stay", "aborted"),
        ("torn", 8, "stay", "torn"),
        ("finished", 7, "stay", "finished"),
        ("starting", 31, "stay", "starting"),
    ],
)
def test_decisions(state: RankState, step: int, decision: Decision, after: RankState) -> None:
    machine = machine_at(state)
    machine.fence(G2)
    assert machine.decide(step) == decision
    assert machine.state == after
    assert machine.decide(step) == "stay", "ordered twice"


@pytest.mark.parametrize(("state", "step"), [("ready", 8), ("aborted", 8), ("in_doubt", 9), ("voting", 7)])
def test_a_decision_against_the_facts_is_an_internal_error(state: RankState, step: int) -> None:
    machine = machine_at(state)
    machine.fence(G2)
    with pytest.raises(InternalError, match="does not fit"):
        machine.decide(step)


def test_nobody_decides_without_a_fence() -> None:
    with pytest.raises(InternalError):
        machine_at("in_doubt").decide(8)


def test_retry_lifts_the_fence_unless_a_newer_one_stands() -> None:
    machine = machine_at("compute")
    machine.fence(G3)
    assert not machine.retry(G2)
    assert machine.retry(G3)
    assert (machine.state, machine.generation, machine.fenced) == ("ready", G3, None)
    assert machine.begin()


def test_torn_ends_with_the_process() -> None:
    machine = machine_at("torn")
    machine.fence(G2)
    with pytest.raises(InternalError):
        machine.retry(G2)


@given(st.lists(st.sampled_from(["begin", "enter_vote", "vote_passed", "vote_broken", "vote_refused", "end_block",
                                 "fail", "finish", "fence", "apply", "discard", "retry"]), max_size=40))  # fmt: skip
def test_any_sequence_of_calls_keeps_the_invariants(calls: list[str]) -> None:
    machine = StepMachine(G1)
    machine.open(0)
    generation = G1
    for call in calls:
        step, state = machine.step, machine.state
        try:
            if call == "fence":
                generation = generation.next()
                machine.fence(generation)
            elif call in ("apply", "discard"):
                machine.decide(machine.step + (call == "apply"))
            elif call == "retry":
                machine.retry(generation)
            else:
                getattr(machine, call)()
        except HoldfastError:
            assert (machine.step, machine.state) == (step, state), "a refused call changed something"
        machine.check()
        assert machine.step - step == (1 if call == "end_block" and state == "updating" else 0)
