"""The controller of ``mindio_ttp``: good ranks, plan, publish, exit; with deaths of any rank in any order."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.compat.dying_checkpoint import (
    After,
    Command,
    Done,
    DyingCheckpoint,
    Event,
    Faulted,
    Here,
    LeaveOrder,
    Lost,
    Over,
    Rename,
    Renamed,
    Replicas,
    Saved,
    SaveParts,
    SendToRank,
    ShardGroup,
    Stood,
    Stop,
    Timer,
    choose,
    replicas,
)


class Plant:
    """Simulated ranks that answer the controller's orders. ``steps`` is the step at which each rank is stopped."""

    def __init__(
        self, steps: dict[int, int], groups: tuple[ShardGroup, ...], unsound: set[int] | None = None
    ) -> None:
        self.controller = DyingCheckpoint(len(steps))
        self.steps = steps
        self.unsound = unsound or set()
        self.living = set(steps)
        self.saves: list[int] = []
        self.renames: list[int] = []
        self.exits: Counter[int] = Counter()
        self.saved_exits: set[bool] = set()
        self.timer = 0
        self.over = False
        self.silent: set[int] = set()
        self.fails: set[int] = set()
        for rank in steps:
            self.feed(Here(rank=rank, world_size=len(steps), pid=rank))
            self.feed(Replicas(rank=rank, groups=tuple(g for g in groups if rank in g.ranks)))
        self.queue: list[Event] = []

    def feed(self, event: Event) -> list[Command]:
        out = self.controller.handle(event)
        for command in out:
            if isinstance(command, After):
                self.timer = command.number
            if isinstance(command, Over):
                self.over = True
        return out

    def run(self, event: Event, draw: random.Random | None = None, deaths: int = 0) -> None:
        """Feed ``event`` and all following events in a random order. Some ranks die on the way."""
        self.queue = [event]
        while True:
            if not self.queue and (self.exits or not self.living):
                return
            self.queue = self.queue or [Timer(number=self.timer)]
            at = draw.randrange(len(self.queue)) if draw else 0
            event = self.queue.pop(at)
            if isinstance(event, Lost):
                self.living.discard(event.rank)
            elif not isinstance(event, Timer) and event.rank not in self.living:
                continue
            for command in self.feed(event):
                if isinstance(command, SendToRank) and command.rank in self.living:
                    self._answer(command)
            if draw and deaths and self.living and draw.random() < 0.2:
                deaths -= 1
                victim = draw.choice(sorted(self.living))
                self.queue.append(Lost(rank=victim, what="drawn"))
                self.living.discard(victim)

    def _answer(self, command: SendToRank) -> None:
        rank, order = command.rank, command.message
        if isinstance(order, LeaveOrder):
            self.exits[rank] += 1
            self.saved_exits.add(order.saved)
            self.queue.append(Lost(rank=rank, what="it left"))
        elif rank in self.silent:
            return
        elif isinstance(order, Stop):
            self.steps[rank] = max(self.steps[rank], order.step)
            self.queue.append(
                Stood(rank=rank, step=self.steps[rank], why="torn" if rank in self.unsound else "")
            )
        elif isinstance(order, SaveParts):
            assert rank not in self.unsound
            # the rank got the order to reach the step, and then the plan changed
            moved = order.step != self.steps[rank]
            why = "it stands elsewhere" if moved else "disk full" if rank in self.fails else ""
            self.saves += [] if moved else [rank]
            self.queue.append(Saved(rank=rank, step=order.step, why=why))
        elif isinstance(order, Rename):
            self.renames.append(rank)
            self.queue.append(Renamed(rank=rank))


DATA_PARALLEL = (ShardGroup(1, (0, 1, 2, 3), 1),)
SHARDED = (ShardGroup(0, (0, 1, 2, 3), 2),)
TWO_STAGES = (ShardGroup(0, (0, 1), 1), ShardGroup(0, (2, 3), 1))


def lost(rank: int) -> Lost:
    return Lost(rank=rank, what="kill -9")


@pytest.mark.parametrize("victim", [0, 1, 2, 3])
def test_one_of_equal_ranks_writes_and_publishes_and_all_leave(victim: int) -> None:
    plant = Plant(dict.fromkeys(range(4), 7), DATA_PARALLEL)
    plant.run(lost(victim))
    assert len(plant.saves) == 1 and plant.renames == plant.saves and victim not in plant.saves
    assert plant.exits == Counter(set(range(4)) - {victim}) and plant.saved_exits == {True} and plant.over
    assert plant.controller.step == 7


def test_the_newest_complete_step_is_taken_and_torn_states_are_not() -> None:
    plant = Plant({0: 7, 1: 8, 2: 7, 3: 8}, DATA_PARALLEL, unsound={1})
    plant.run(lost(0))
    assert plant.saves == [3] and plant.controller.step == 8


def test_parts_need_a_holder_each() -> None:
    plant = Plant(dict.fromkeys(range(4), 7), SHARDED)
    plant.run(lost(0))
    assert sorted(plant.saves) == [1, 2]
    plant = Plant(dict.fromkeys(range(4), 7), SHARDED, unsound={2})
    plant.run(lost(0))
    assert not plant.saves and plant.saved_exits == {False} and plant.over
    plant = Plant(dict.fromkeys(range(4), 7), TWO_STAGES)
    plant.run(lost(3))
    assert sorted(plant.saves) == [0, 2]


def test_ranks_behind_come_up_where_they_are_needed() -> None:
    plant = Plant({0: 8, 1: 7, 2: 8, 3: 7}, SHARDED)
    plant.run(lost(0))
    assert plant.controller.step == 8 and sorted(plant.saves) == [1, 2] and plant.steps[1] == 8


def test_a_writer_that_fails_is_replaced() -> None:
    plant = Plant(dict.fromkeys(range(4), 7), DATA_PARALLEL)
    plant.fails = {1, 2}
    plant.run(lost(0))
    assert plant.saves == [1, 2, 3] and plant.renames == [3] and plant.saved_exits == {True}


def test_a_silent_rank_does_not_keep_the_others() -> None:
    plant = Plant(dict.fromkeys(range(4), 7), DATA_PARALLEL)
    plant.silent = {1}
    plant.run(lost(0))
    assert plant.saves == [2] and plant.exits == Counter({1: 1, 2: 1, 3: 1})


def test_an_exception_is_a_fault_and_its_rank_may_write() -> None:
    plant = Plant({0: 7, 1: 7}, (ShardGroup(1, (0, 1), 1),))
    plant.run(Faulted(rank=0, what="ValueError"))
    assert plant.saves == [0] and plant.exits == Counter({0: 1, 1: 1})


def test_nothing_is_saved_before_the_first_step_or_without_replicas() -> None:
    for steps, groups in ((0, DATA_PARALLEL), (7, ())):
        plant = Plant(dict.fromkeys(range(4), steps), groups)
        plant.run(lost(0))
        assert not plant.saves and plant.saved_exits == {False} and len(plant.exits) == 3


def test_a_training_that_ends_is_no_fault() -> None:
    plant = Plant({0: 7, 1: 7}, (ShardGroup(1, (0, 1), 1),))
    for rank in (0, 1):
        plant.feed(Done(rank=rank))
        assert not [c for c in plant.feed(lost(rank)) if isinstance(c, SendToRank)]
    assert plant.over and not plant.saves


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**9))
def test_whatever_dies_nothing_is_published_twice_and_everybody_leaves_once(seed: int) -> None:
    draw = random.Random(seed)
    world = draw.choice([2, 4, 6, 8])
    shards = draw.choice([n for n in (1, 2, world // 2) if world % n == 0])
    steps = {rank: 7 + draw.randrange(2) for rank in range(world)}
    plant = Plant(
        steps, (ShardGroup(0, tuple(range(world)), shards),), {r for r in range(world) if draw.random() < 0.1}
    )
    plant.fails = {r for r in range(world) if draw.random() < 0.1}
    plant.silent = {r for r in range(world) if draw.random() < 0.1}
    plant.run(lost(draw.randrange(world)), draw, deaths=draw.randrange(3))
    assert plant.controller.phase == "over"
    assert all(count == 1 for count in plant.exits.values())
    assert plant.living <= set(plant.exits)
    if True in plant.saved_exits:
        assert plant.renames, "it was published"


def test_choose_and_replicas() -> None:
    assert choose([ShardGroup(0, (0, 1, 2, 3), 2)], {1, 2, 3}) == ({0: (2, 1)}, "")
    assert "part 0 of 2" in choose([ShardGroup(0, (0, 1, 2, 3), 2)], {1, 3})[1]
    info: dict[str, Any] = {"type": 1, "rank_list": [0, 1, 2, 3], "replica_cnt": 2, "replica_shift": 0}
    assert replicas([info]) == (ShardGroup(1, (0, 1, 2, 3), 2),)
    wrongs: tuple[dict[str, Any], ...] = (
        {"replica_cnt": 3},
        {"replica_cnt": 0},
        {"rank_list": []},
        {"rank_list": [0, 0, 1, 1]},
    )
    for wrong in wrongs:
        with pytest.raises(ValueError, match="copies over the ranks"):
            replicas([info | wrong])
