"""Detection of workers without progress: a learned bound, never below a floor; time without a look does not count."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.core.ids import MemberId
from holdfast.core.protocol.status_page import Phase
from holdfast.core.watch.stall_detector import Learned, Limits, PageReading, Progress

LIMITS = Limits(factor=10.0, floor_s=1.0, start_s=100.0, idle_s=50.0, section_s=200.0, look_s=0.1)
STEP_S = 0.2


class World:
    """Workers that take steps of ``STEP_S``, with a look every 0.1 s."""

    def __init__(self, ranks: int = 4, limits: Limits = LIMITS) -> None:
        self.progress = Progress(limits)
        self.now = 1000.0
        self.step = 0
        self.mark = 0
        self.phase = dict.fromkeys(range(ranks), Phase.FORWARD)
        self.still: set[int] = set()
        self.meets: set[int] = set()
        self.left: set[int] = set()
        self.joins_in: set[int] = set()
        self.outside: dict[int, int] = {}
        self.marks = dict.fromkeys(range(ranks), 0)
        self.section = ""
        self.due = False

    def look(self) -> bool | None:
        self.now += LIMITS.look_s
        self.mark += 1
        for rank in self.phase:
            if rank not in self.still:
                self.marks[rank] = self.mark
        return self.progress.look(self.now, [self.reading(rank) for rank in self.phase])

    def reading(self, rank: int) -> PageReading:
        member = MemberId(rank + 1)
        return PageReading(
            member,
            rank,
            self.step,
            self.phase[rank],
            (self.marks[rank],),
            STEP_S,
            0.1,
            self.section,
            meets=rank in self.meets,
            left=rank in self.left,
            joins_in=rank in self.joins_in,
            outside=self.outside.get(rank, 0),
            done=self.step,
            due=self.due,
        )

    def train(self, steps: int) -> None:
        for _ in range(steps):
            assert not self.look() and not self.look()
            self.step += 1

    def until(self, changed: bool, looks: int = 5000) -> float:
        """Return the seconds until the stall begins or ends."""
        since = self.now
        for _ in range(looks):
            if self.look() is changed:
                return self.now - since
        raise AssertionError("nothing happened")

    def stop(self) -> None:
        self.still = set(self.phase)


def test_a_stop_is_seen_after_the_factor_of_the_median() -> None:
    world = World()
    world.train(20)
    world.stop()
    assert 10 * STEP_S <= world.until(True) <= 10 * STEP_S + 0.3


def test_the_floor_holds_for_fast_steps() -> None:
    world = World(limits=Limits(factor=10.0, floor_s=4.0, look_s=0.1))
    world.train(20)
    world.stop()
    assert 4.0 <= world.until(True) <= 4.3


def test_one_rank_that_moves_holds_everything_back() -> None:
    world = World()
    world.train(20)
    world.still = {0, 1, 2}
    assert all(world.look() is None for _ in range(1000))
    world.still = {0, 1, 2, 3}
    world.until(True)
    world.still = {0, 1, 3}
    assert world.look() is False


def test_the_bound_of_the_one_that_is_waited_for_counts() -> None:
    world = World()
    world.train(20)
    world.stop()
    world.phase[2] = Phase.READY  # rank 2 does unannounced work between two steps
    assert world.until(True) >= LIMITS.idle_s


def test_who_waits_for_all_between_two_steps_does_nothing_that_takes_long() -> None:
    """The rank waits outside its loop, which the others have not left."""
    world = World()
    world.train(20)
    world.stop()
    world.phase[2] = Phase.READY
    world.meets = {2}
    assert 10 * LIMITS.floor_s <= world.until(True) < LIMITS.idle_s / 2


def test_a_stopped_process_gets_no_time_for_what_it_might_do() -> None:
    world = World()
    world.train(20)
    world.stop()
    world.phase[2] = Phase.READY
    for _ in range(25):
        assert world.look() is None
    assert world.progress.overdue() == [MemberId(rank + 1) for rank in world.phase]
    readings = [world.reading(rank)._replace(stopped=rank == 2) for rank in world.phase]
    assert world.progress.look(world.now + 0.1, readings) is True
    assert world.progress.overdue() == [MemberId(rank + 1) for rank in world.phase]
    assert world.progress.look(world.now + 0.2, readings) is None
    assert world.look() is False, "it runs again"


def test_a_successor_judges_as_its_predecessor() -> None:
    world = World()
    world.train(20)
    told = msgspec.json.decode(msgspec.json.encode(world.progress.learned()), type=Learned)
    world.progress = Progress(LIMITS, told)
    world.train(1)
    world.stop()
    assert world.until(True) < 3.0
    world.progress = Progress(LIMITS)
    assert world.until(True) < 3.0, "without it, it begins with the last step of each"


def test_a_successor_gives_the_first_steps_of_a_process_their_time() -> None:
    world = World()
    world.train(2)
    world.progress = Progress(LIMITS)
    world.stop()
    assert world.until(True) >= LIMITS.idle_s


def test_who_waits_for_the_control_plane_holds_nobody_up() -> None:
    world = World()
    world.train(20)
    world.stop()
    world.phase[0] = Phase.FINISHED
    assert world.until(True) < 3.0
    world.phase = dict.fromkeys(world.phase, Phase.IN_DOUBT)
    assert world.look() is False and all(world.look() is None for _ in range(500))


def test_one_that_was_told_to_go_on_and_does_not_come_holds_all_up() -> None:
    """Regression: all ranks waited for one rank while their connections were rebuilt, and no bound ended this."""
    world = World()
    world.train(10)
    world.still = set(world.phase)
    world.phase = dict.fromkeys(world.phase, Phase.ABORTED)
    assert not any(world.look() for _ in range(2000))
    world.due, world.still = True, set()
    assert not world.look()
    world.still = set(world.phase)
    assert 70.0 < world.until(True) < 90.0


def test_before_there_are_samples_the_bound_is_generous() -> None:
    world = World()
    world.train(2)
    world.stop()
    assert world.until(True) >= LIMITS.idle_s
    assert Progress(LIMITS).bound_s(world.reading(0)._replace(phase=Phase.STARTING)) == LIMITS.start_s


def test_a_process_that_is_stopped_in_its_first_steps_gets_no_time_to_compile() -> None:
    world = World()
    world.train(2)
    world.stop()
    first = world.reading(2)
    assert world.progress.bound_s(first) == LIMITS.idle_s
    assert world.progress.bound_s(first._replace(stopped=True)) == 10 * LIMITS.floor_s
    looks = 0
    while world.progress.overdue() == []:
        assert world.look() is None
        looks += 1
    assert looks * LIMITS.look_s < 11 * LIMITS.floor_s
    readings = [world.reading(rank)._replace(stopped=rank == 2) for rank in world.phase]
    assert world.progress.look(world.now + 0.1, readings) is True, "the others wait for it"


def test_a_process_that_is_stopped_in_its_start_is_found_before_anybody_has_done_a_step() -> None:
    script = Script()
    script.still = {0, 1, 2}
    script.stopped = frozenset({0})
    assert 10 * LIMITS.floor_s <= script.until(True) < 12 * LIMITS.floor_s


NEWCOMER = MemberId(9)


def starts(world: World, **more: Any) -> PageReading:
    """Return a reading of a process that makes no progress in its start, beside workers that wait for it."""
    start: dict[str, Any] = {"phase": Phase.STARTING, "mark": (-1,), "collectives": 0, "done": 0}
    newcomer = world.reading(0)._replace(member_id=NEWCOMER, **(start | more))
    world.now += LIMITS.look_s
    waiting = [world.reading(rank)._replace(phase=Phase.ABORTED) for rank in world.phase]
    world.progress.look(world.now, [*waiting, newcomer])
    return newcomer


@pytest.mark.parametrize(
    ("start_s", "more", "late_s"),
    [
        (0.5, {}, 10.0),
        (3.0, {}, 30.0),
        (3.0, {"stopped": True}, 2.0),
        (3.0, {"scratch": True}, None),
        (3.0, {"phase": Phase.READY}, None),
        (0.0, {}, None),
    ],
)
def test_a_newcomer_is_late_after_many_times_what_others_took(
    start_s: float, more: dict[str, Any], late_s: float | None
) -> None:
    """A process that is eight times as slow is only slow.

    It may import modules that others had ready, or skip much data.
    """
    script = Script()
    script.still = {0, 1, 2}
    script.marks = dict.fromkeys(script.marks, 0)
    for _ in range(round(start_s / LIMITS.look_s)):
        script.look()
    script.still = set()
    script.look()
    script.phase = dict.fromkeys(script.phase, Phase.FORWARD)
    script.progress._steps.extend([STEP_S] * 3)
    since = script.now
    while not (late := script.progress.late()) and script.now - since < 100.0:
        starts(script, **more)
    took_s = script.now - since
    assert [stall.member_id for stall in late] == ([] if late_s is None else [NEWCOMER])
    assert late_s is None or late_s <= took_s < late_s + 2.0


@pytest.mark.parametrize(("age_s", "late_s"), [(2.5, 25.0), (0.2, 10.0), (0.0, None)])
def test_a_start_that_nobody_saw_took_no_longer_than_its_process_is_old(
    age_s: float, late_s: float | None
) -> None:
    """The agent got no CPU while the workers started. A newcomer in an endless loop is found despite this."""
    world = World()
    first = [world.reading(rank)._replace(age_s=age_s, mark=(-1,)) for rank in world.phase]
    world.progress.look(world.now, first)
    since = world.now
    while not (late := world.progress.late()) and world.now - since < 100.0:
        starts(world)
    assert [stall.member_id for stall in late] == ([] if late_s is None else [NEWCOMER])
    assert late_s is None or late_s <= world.now - since < late_s + 2.0


def test_what_a_predecessor_saw_of_the_starts_counts_more_than_the_age_of_old_processes() -> None:
    world = World()
    progress = Progress(LIMITS, Learned(steps=(STEP_S,) * 3, peaks={"first collective": 1.0}))
    progress.look(world.now, [world.reading(rank)._replace(age_s=3600.0) for rank in world.phase])
    assert progress.learned().peaks["first collective"] == 1.0


def test_a_spare_teaches_nothing_and_holds_nobody_up() -> None:
    world = World()
    world.train(20)
    world.stop()
    spare = world.reading(0)._replace(member_id=MemberId(-7), phase=Phase.FORWARD, done=0, section="spare")
    since = world.now
    while not world.progress.stalled and world.now - since < 5.0:
        world.now += LIMITS.look_s
        moved = spare._replace(mark=(round(10 * world.now),))
        world.progress.look(world.now, [*(world.reading(rank) for rank in world.phase), moved])
    assert world.now - since < 3.0
    assert "section spare" not in world.progress.learned().peaks
    assert [stall.member_id for stall in world.progress.stalls()] == [1, 2, 3, 4]


def test_a_slowness_survived_once_is_expected_again_and_forgotten_later() -> None:
    world = World()
    world.train(20)
    world.still = {0, 1, 2, 3}
    for _ in range(18):
        assert not world.look()  # nine median steps
    world.still = set()
    world.train(1)
    usual = 10 * STEP_S
    fresh = world.progress.bound_s(world.reading(0))
    assert fresh > 1.3 * usual
    world.train(300)
    assert world.progress.bound_s(world.reading(0)) == usual


def test_sections_are_learned_by_name() -> None:
    world = World()
    world.train(20)
    world.phase = dict.fromkeys(world.phase, Phase.SECTION)
    world.section = "eval"
    world.look()
    world.stop()
    assert all(world.look() is None for _ in range(100))  # ten seconds, in the first section of its name
    world.still = set()
    world.look()
    assert world.progress.bound_s(world.reading(0)) == LIMITS.section_s, "it is not over: more may follow"
    world.phase = dict.fromkeys(world.phase, Phase.READY)
    world.look()
    world.phase = dict.fromkeys(world.phase, Phase.SECTION)
    assert 29 < world.progress.bound_s(world.reading(0)) < 32
    world.section = "export"
    assert world.progress.bound_s(world.reading(0)) == LIMITS.section_s


def test_what_follows_the_training_has_the_time_of_an_unknown_section() -> None:
    world = World()
    world.train(20)
    world.phase = dict.fromkeys(world.phase, Phase.AFTER)
    for _ in range(3):
        world.look()
    assert world.progress.bound_s(world.reading(0)) == LIMITS.section_s


def test_a_section_is_learned_that_was_over_before_anybody_looked() -> None:
    world = World()
    world.train(20)
    world.section = "eval"
    world.look()
    world.phase = dict.fromkeys(world.phase, Phase.SECTION)
    assert world.progress.bound_s(world.reading(0)) == 10 * LIMITS.floor_s


def test_a_stillness_of_no_time_is_known_and_small() -> None:
    """Regression: a process that hung in its first step got ten minutes where earlier first steps had taken no time."""
    progress = Progress(LIMITS, Learned(steps=(STEP_S,) * 5))
    newcomer = World().reading(0)
    for mark in range(3):
        progress.look(1000.0, [newcomer._replace(mark=(mark,))])
    assert progress.bound_s(newcomer) == max(10 * LIMITS.floor_s, 10 * STEP_S)


def test_a_section_that_was_cut_off_is_not_learned() -> None:
    world = World()
    world.train(20)
    world.phase = dict.fromkeys(world.phase, Phase.SECTION)
    world.section = "eval"
    world.look()
    world.phase, world.section = dict.fromkeys(world.phase, Phase.READY), ""
    world.look()
    world.phase, world.section = dict.fromkeys(world.phase, Phase.SECTION), "eval"
    assert world.progress.bound_s(world.reading(0)) == LIMITS.section_s


def test_time_that_nobody_looked_does_not_count() -> None:
    world = World()
    world.train(20)
    world.stop()
    for _ in range(3):
        world.now += 3600.0  # the machine was suspended, or the agent was
        assert world.look() is None


def test_a_replaced_process_starts_over() -> None:
    world = World()
    world.train(20)
    world.stop()
    world.until(True)
    readings = [world.reading(rank)._replace(member_id=MemberId(rank + 10)) for rank in world.phase]
    assert world.progress.look(world.now + 0.1, readings) is False


def test_paces_leave_out_what_is_not_known() -> None:
    world = World()
    world.train(2)
    assert world.progress.paces() == []
    world.train(20)
    assert world.progress.paces() == [(rank, 18, 0.1) for rank in range(4)]


class Script(World):
    """Ranks without a session: only the number of their collectives is visible."""

    def __init__(self, ranks: int = 3) -> None:
        super().__init__(ranks)
        self.phase = dict.fromkeys(range(ranks), Phase.STARTING)
        self.waiting: set[int] = set()

    def reading(self, rank: int) -> PageReading:
        return (
            super()
            .reading(rank)
            ._replace(
                done=0,
                collectives=self.marks[rank],
                waits=rank in self.waiting,
                stopped=rank in self.stopped,
            )
        )

    stopped: frozenset[int] = frozenset()


def test_a_collective_that_never_ends_is_a_hang_without_a_session() -> None:
    script = Script()
    script.train(30)
    script.still = script.waiting = {0, 1, 2}
    assert 10 * LIMITS.floor_s <= script.until(True) < 12 * LIMITS.floor_s


def test_ranks_that_wait_for_one_that_works_have_its_time() -> None:
    script = Script()
    script.train(30)
    script.still, script.waiting = {0, 1, 2}, {1, 2}  # rank 0 evaluates alone
    assert LIMITS.idle_s <= script.until(True) < 1.1 * LIMITS.idle_s


def test_one_that_is_stopped_outside_of_a_collective_has_not() -> None:
    script = Script()
    script.train(30)
    script.still, script.waiting = {0, 1, 2}, {1, 2}
    script.stopped = frozenset({0})
    assert script.until(True) < 12 * LIMITS.floor_s


def test_a_script_that_has_made_few_collectives_is_not_judged_by_them() -> None:
    script = Script()
    script.train(3)
    script.still = script.waiting = {0, 1, 2}
    assert script.until(True) >= LIMITS.start_s


@pytest.mark.parametrize("phase", [Phase.READY, Phase.FINISHED])
@pytest.mark.parametrize("steps", [0, 20])
def test_a_rank_that_has_left_its_loop_gives_the_others_no_time(phase: Phase, steps: int) -> None:
    """The others may be in a first step, with a bound of ten minutes, or wait for all with a bound of 15 s."""
    world = World()
    world.train(steps)
    world.phase[1], world.left, world.meets = phase, {1}, {1}
    world.stop()
    assert world.until(True) <= 10 * STEP_S + 0.3


def test_where_no_other_rank_is_in_a_block_one_that_has_left_its_loop_waits() -> None:
    world = World()
    world.train(20)
    world.phase = dict.fromkeys(world.phase, Phase.READY)
    world.left, world.meets = {0, 1, 2, 3}, {1, 2, 3}
    world.stop()
    assert world.until(True) >= LIMITS.idle_s


@pytest.mark.parametrize("phase", [Phase.READY, Phase.FORWARD])
def test_a_collective_that_no_other_rank_makes_gives_no_time(phase: Phase) -> None:
    """The rank is between two steps, with a bound of ten minutes, or has found others in it and is in the block."""
    world = World()
    world.train(20)
    world.phase[1], world.outside = phase, {0: 1, 1: 2, 2: 1, 3: 1}
    world.stop()
    assert world.until(True) <= 10 * STEP_S + 0.3


def test_a_rank_that_waits_for_all_ranks_makes_no_further_collective() -> None:
    """At the end of an epoch all ranks agree; one rank waits in a barrier after the last block of the epoch."""
    world = World()
    world.train(20)
    world.phase = dict.fromkeys(world.phase, Phase.READY)
    world.outside, world.meets = {2: 1}, {0, 1, 3}
    world.stop()
    assert world.until(True) <= 10 * STEP_S + 0.3


def test_a_collective_that_other_ranks_have_still_to_make_waits_for_them() -> None:
    world = World()
    world.train(20)
    world.phase = dict.fromkeys(world.phase, Phase.READY)
    world.outside = {1: 1, 2: 1}
    world.stop()
    assert world.until(True) >= LIMITS.idle_s


@pytest.mark.parametrize("steps", [0, 20])
@pytest.mark.parametrize("waits", ["joins_in", "meets"])
def test_a_rank_between_two_steps_and_others_in_the_block_wait_in_vain(waits: str, steps: int) -> None:
    world = World()
    world.train(steps)
    world.phase = dict.fromkeys(range(4), Phase.MEET) | {1: Phase.READY}
    setattr(world, waits, {1})
    world.stop()
    assert world.until(True) == pytest.approx(10 * LIMITS.floor_s, abs=0.2)


@pytest.mark.parametrize("phase", [Phase.READY, Phase.SECTION])
def test_ranks_that_wait_for_one_between_two_steps_give_it_its_time(phase: Phase) -> None:
    world = World()
    world.train(20)
    world.phase = dict.fromkeys(range(4), Phase.READY) | {1: phase}
    world.joins_in = {0, 2, 3}
    world.stop()
    assert world.until(True) > LIMITS.idle_s - 1.0
