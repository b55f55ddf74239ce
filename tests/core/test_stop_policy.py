"""The rung of the ladder that is chosen, and the reason."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.core.config import Config
from holdfast.core.decide.ladder import judge
from holdfast.core.decide.stop_policy import STOP_CODE, Answered, Failure, Situation
from holdfast.exit_codes import Exit

CONFIG = Config(run_id="r", world_size=4, max_restarts=3, restart_window_s=100.0)
SOUND = Situation(
    step=20, base_step=10, session=True, all_alive=False, all_sound=False, unreplaceable="as a test", uncovered="",
    checkpoint_known=True,
)  # fmt: skip
FAILURE = Failure(rank=1, step=20, kind="ValueError", what="bad batch", digest="d1", occurrence=1)
USER_ERROR = msgspec.structs.replace(FAILURE, user_error=True)
IMPORT_FAILURE = msgspec.structs.replace(FAILURE, kind="ImportError")


def situation(**changes: Any) -> Situation:
    """Return an ordinary death at step 20 with some facts changed."""
    return msgspec.structs.replace(SOUND, **changes)


@pytest.mark.parametrize(
    ("changes", "action", "save"),
    [
        ({}, "restart_last_gasp", True),
        ({"all_alive": True, "all_sound": True}, "retry_in_place", False),
        ({"all_alive": True}, "restart_last_gasp", True),
        ({"unreplaceable": ""}, "replace", False),
        ({"unreplaceable": "", "step": None, "base_step": 0}, "restart_fresh", False),
        ({"unreplaceable": "", "all_alive": True}, "restart_last_gasp", True),
        ({"unreplaceable": "", "failures": (USER_ERROR,)}, "stop_bad_input", True),
        ({"uncovered": "shard 1 is gone"}, "restart_checkpoint", False),
        ({"uncovered": "shard 1 is gone", "memory_here": 20}, "replace_from_memory", False),
        ({"uncovered": "shard 1 is gone", "memory_here": 18, "memory_step": 18}, "replace_from_memory", False),
        ({"uncovered": "shard 1 is gone", "memory_step": 0}, "restart_from_memory", False),
        ({"unreplaceable": "", "memory_here": 20}, "replace", False),
        ({"memory_step": 18}, "restart_last_gasp", True),
        ({"all_alive": True, "all_sound": True, "memory_here": 20}, "retry_in_place", False),
        ({"uncovered": "shard 1 is gone", "checkpoint_known": False, "memory_step": 18}, "restart_from_memory", False),
        ({"uncovered": "shard 1 is gone", "checkpoint_known": False}, "restart_fresh", False),
        ({"step": None, "base_step": 0, "checkpoint_known": False}, "restart_fresh", False),
        ({"session": False, "step": None}, "restart_fresh", False),
        ({"failures": (FAILURE,)}, "restart_last_gasp", True),
        ({"failures": (USER_ERROR,)}, "stop_bad_input", True),
        ({"session": False, "failures": (IMPORT_FAILURE,)}, "stop_user_bug", False),
    ],
)  # fmt: skip
def test_rungs(changes: dict[str, Any], action: str, save: bool) -> None:
    verdict = judge(0.0, situation(**changes), [], CONFIG)
    assert (verdict.action, verdict.save) == (action, save)
    assert verdict.stops == (action in STOP_CODE)


def test_steps_that_are_done_again_are_counted() -> None:
    gone = {"uncovered": "shard 1 is gone"}
    back = judge(0.0, situation(**gone, memory_here=18, memory_step=18), [], CONFIG)
    assert back.memory_step == 18 and "2 steps are done again" in back.reason
    again = judge(0.0, situation(**gone, memory_step=17), [], CONFIG)
    assert again.memory_step == 17 and "3 steps are done again" in again.reason
    assert again.evidence == ("not in place: as a test", "shard 1 is gone")


def test_losing_steps_names_the_reason() -> None:
    verdict = judge(0.0, situation(uncovered="no living holder of layer.1.weight"), [], CONFIG)
    assert "no living holder of layer.1.weight" in verdict.reason


@pytest.mark.parametrize(
    ("steps", "stops"),
    [((18, 19), True), ((16, 18), True), ((17, 17), False), ((10, 19), False), ((19,), False)],
)
def test_the_same_exception_in_three_recoveries_in_a_row_is_a_bug(
    steps: tuple[int, ...], stops: bool
) -> None:
    """A restart does not repeat a check between two steps.

    A defect that the check finds is found again at the next step.
    """
    history = tuple(
        Answered(at_s=1.0 + n, action="restart_last_gasp", step=step, failures=(("d1", step, n),))
        for n, step in enumerate(steps)
    )
    failure = msgspec.structs.replace(FAILURE, occurrence=len(steps), step=20)
    verdict = judge(
        5.0, situation(failures=(failure,)), history, msgspec.structs.replace(CONFIG, max_restarts=9)
    )
    found = verdict.action == "stop_user_bug" and "at steps" in verdict.reason
    assert found == stops, verdict


def test_an_exception_that_every_successor_hears_of_again_came_once() -> None:
    """Two controllers died while one exception was handled. The reports to their successors are no new exceptions."""
    once = Answered(at_s=1.0, action="replace", step=20, failures=(FAILURE.mark,))
    assert not judge(5.0, situation(failures=(FAILURE,)), (once, once), CONFIG).stops
    before = Answered(at_s=0.0, action="replace", step=18, failures=(("d1", 18, 0),))
    first = Answered(at_s=0.0, action="replace", step=17, failures=(("d1", 17, -1),))
    many = msgspec.structs.replace(CONFIG, max_restarts=9)
    assert not judge(5.0, situation(failures=(FAILURE,)), (before, once, once), many).stops
    assert judge(5.0, situation(failures=(FAILURE,)), (first, before, once, once), many).stops


@pytest.mark.parametrize(
    ("stood", "changes", "stops"),
    [
        (20, {}, True),
        (20, {"between": False}, False),
        (19, {}, False),  # a step was committed since the last recovery
        (20, {"digest": "d2"}, False),
        (20, {"occurrence": 0}, False),
    ],
)
def test_an_exception_between_two_steps_that_is_back_at_the_first_chance_is_a_bug(
    stood: int, changes: dict[str, Any], stops: bool
) -> None:
    first = Answered(at_s=0.0, action="replace", step=stood, failures=(("d0", 20, 0), ("d1", 20, 0)))
    # answered, then failed
    fallen = Answered(at_s=0.0, action="restart_last_gasp", step=stood)
    failure = msgspec.structs.replace(FAILURE, step=21, **{"between": True, **changes})
    for history in ((first,), (first, fallen)):
        verdict = judge(1.0, situation(step=21, failures=(failure,)), history, CONFIG)
        assert (verdict.action == "stop_user_bug") == stops, verdict
        assert ("the same exception at steps 20, 21" in verdict.reason) == stops


def test_of_several_exceptions_each_may_be_the_one_that_came_before() -> None:
    history = [
        Answered(at_s=0.0, action="restart_last_gasp", step=20, failures=(("d1", 20, 0), ("d2", 20, 0)))
    ]
    other = msgspec.structs.replace(FAILURE, digest="d3")
    again = msgspec.structs.replace(FAILURE, digest="d2")
    assert judge(1.0, situation(failures=(other, again)), history, CONFIG).action == "stop_user_bug"
    assert judge(1.0, situation(failures=(other,)), history, CONFIG).action == "restart_last_gasp"


def test_the_same_exception_at_the_same_step_twice_is_a_bug() -> None:
    history = [Answered(at_s=0.0, action="restart_last_gasp", step=20, failures=(("d1", 20, 0),))]
    verdict = judge(1.0, situation(failures=(FAILURE,), base_step=20), history, CONFIG)
    assert verdict.action == "stop_user_bug" and "ValueError: bad batch" in verdict.reason
    assert not verdict.save, "nothing is new since step 20"
    again = msgspec.structs.replace(FAILURE, occurrence=0)
    heard_twice = judge(1.0, situation(failures=(again,)), history, CONFIG)
    assert heard_twice.action == "restart_last_gasp", "one failure, reported again to a new controller"
    moved = msgspec.structs.replace(FAILURE, step=21)
    assert judge(1.0, situation(failures=(moved,)), history, CONFIG).action == "restart_last_gasp"


@pytest.mark.parametrize(
    ("answered", "facts", "told_apart"),
    [
        (0, {"step": 20}, True),
        (0, {"base_step": 20}, True),
        (20, {}, True),
        (0, {}, False),
        (20, {"session": False}, False),
    ],
)
def test_a_process_that_ends_before_it_has_the_state_of_the_job_is_told_apart(
    answered: int, facts: dict[str, Any], told_apart: bool
) -> None:
    """A replacement runs the script from its top, and may find there what the first start has left."""
    failure = msgspec.structs.replace(FAILURE, step=0)
    history = [Answered(at_s=0.0, action="replace", step=answered, failures=(("d1", 0, 0),))]
    facts = {"step": None, "base_step": 0, **facts}
    verdict = judge(1.0, situation(failures=(failure,), **facts), history, CONFIG)
    assert verdict.action == "stop_user_bug"
    first, *hint = verdict.reason.splitlines()
    if told_apart:
        assert first == (
            "the same exception twice in a process that had not reached the state of the job (at step 20): "
            "ValueError: bad batch"
        )
        assert hint and "holdfast.once" in hint[0]
    else:
        assert (first, hint) == ("the same exception at step 0 twice: ValueError: bad batch", [])


def test_the_budget_is_a_window() -> None:
    history = [Answered(at_s=float(t), action="restart_last_gasp", step=t) for t in (0, 50, 60)]
    stopped = judge(99.0, situation(), history, CONFIG)
    assert (stopped.action, stopped.save) == ("stop_budget", True)
    assert len(stopped.evidence) == 3
    assert judge(101.0, situation(), history, CONFIG).action == "restart_last_gasp"


def test_no_restarts_allowed_means_none() -> None:
    config = msgspec.structs.replace(CONFIG, max_restarts=0)
    assert judge(0.0, situation(), [], config).action == "stop_budget"


def test_a_step_is_retried_in_place_only_so_often() -> None:
    config = msgspec.structs.replace(CONFIG, max_restarts=99)
    alive = situation(all_alive=True, all_sound=True)
    history: list[Answered] = []
    actions = []
    for _ in range(4):
        verdict = judge(0.0, alive, history, config)
        actions.append(verdict.action)
        history.append(Answered(at_s=0.0, action=verdict.action, step=20))
    assert actions == ["retry_in_place", "retry_in_place", "restart_last_gasp", "restart_last_gasp"]


def test_every_stop_has_a_documented_code() -> None:
    assert set(STOP_CODE.values()) == {Exit.FAILED, Exit.BAD_INPUT, Exit.BUDGET}
