"""Reports of an agent on the activity of processes in a recovery."""

from __future__ import annotations

from holdfast.core.ids import MemberId, NodeId
from holdfast.core.protocol.health_messages import Active
from holdfast.core.watch.activity import SAY_S, Activity, WorkerSeen

NODE = NodeId("n0")
ONE, TWO = MemberId(1), MemberId(2)


def seen(*works: int, recovers: bool = True, stopped: tuple[int, ...] = ()) -> list[WorkerSeen]:
    """Return one observation: the amount of work of members 1, 2, ..."""
    return [
        WorkerSeen(MemberId(number), (work,), recovers, number in stopped)
        for number, work in enumerate(works, start=1)
    ]


def test_movement_is_said_once_in_a_while_with_all_that_moved_meanwhile() -> None:
    activity = Activity(NODE, stopped_s=1.5)
    assert activity.look(10.0, seen(0, 0)) is None
    assert activity.look(10.5, seen(1, 0)) == Active(NODE, (ONE,))
    assert activity.look(11.0, seen(2, 0)) is None and activity.look(11.2, seen(2, 5)) is None
    assert activity.look(10.5 + SAY_S, seen(2, 5)) == Active(NODE, (ONE, TWO))
    assert activity.look(30.0, seen(2, 5)) is None, "none of them moves"


def test_workers_that_train_are_not_told_of() -> None:
    activity = Activity(NODE, stopped_s=1.5)
    activity.look(10.0, seen(0, recovers=False))
    assert activity.look(12.0, seen(1, recovers=False)) is None


def test_a_stopped_process_is_told_of_until_it_runs_again() -> None:
    activity = Activity(NODE, stopped_s=1.5)
    assert activity.look(10.0, seen(0, 0, stopped=(2,))) is None
    assert activity.look(11.0, seen(0, 0, stopped=(2,))) is None, "a debugger may look at it"
    assert activity.look(11.5, seen(0, 0, stopped=(2,))) == Active(NODE, stopped=(TWO,))
    assert activity.look(12.0, seen(0, 0, stopped=(2,))) is None
    assert activity.look(12.5, seen(0, 0, stopped=(2,))) == Active(NODE, stopped=(TWO,))
    assert activity.look(13.0, seen(0, 0)) == Active(NODE)
    assert activity.look(20.0, seen(0, 0)) is None


def test_one_that_is_stopped_now_and_then_is_not_told_of() -> None:
    activity = Activity(NODE, stopped_s=1.5)
    for number in range(20):
        stopped = (1,) if number % 3 else ()
        assert activity.look(10.0 + 0.5 * number, seen(0, stopped=stopped)) is None
