"""The work of the controller grows linearly with the number of ranks. Executed lines are counted, not time.

Quadratic work is easily missed: a scan of all ranks for each message costs nothing at 64 ranks and half a minute at
16,384.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, ClassVar

import pytest

from holdfast.core.controller import Controller
from holdfast.core.protocol.health_messages import (
    Evidence,
    ProgressResumed,
    RankEvidence,
    Stalled,
    StepTime,
    StepTimes,
)
from holdfast.core.protocol.messages import Command, Message
from holdfast.exit_codes import Exit
from holdfast.sim.faults import SimFault
from holdfast.sim.world import World

SMALL = 72
TIMES = 4
GROWTH_MAX = (
    2 * TIMES
)  # for what is shared by few calls, or comes in an order that chance decides; a square is 16
LINES_PER_RANK = 6  # of one function, on which growth is not judged
AS_LARGE_AS_THE_JOB = ("all_layouts.", "Layouts.of.")
"""Functions that make the message with all layouts for newcomers. It is made again only after a layout has changed."""


class Counting(Controller):
    """A controller that counts the executed lines of ``core`` by function."""

    lines: ClassVar[Counter[CodeType]] = Counter()

    def handle(self, now: float, event: Message) -> list[Command]:
        """Handle one event and count the executed lines."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            return super().handle(now, event)
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, kind: str, arg: object) -> Callable[..., Any] | None:
        if "/holdfast/core/" not in frame.f_code.co_filename:
            return None
        Counting.lines[frame.f_code] += 1
        return self._trace


class Counted(World):
    controller_type = Counting


def lines_of(ranks: int, seed: int, faults: tuple[SimFault, ...], disturb: bool) -> dict[CodeType, int]:
    Counting.lines = Counter()
    world = Counted(ranks, seed, faults, 6, 2)
    if disturb:
        world.later(0.75, "sightings", lambda: see(world))
    world.run()
    assert world.outcome is not None and world.outcome.code == Exit.OK
    return dict(Counting.lines)


def see(world: World) -> None:
    """Send the reports of all nodes to the controller: step times, a stall, its evidence, and the end of the stall."""
    controller = world._controller
    assert controller is not None
    roster = controller.job.roster
    nodes = {node_id: roster.on_node(node_id) for node_id in sorted(roster.nodes)}
    generation = roster.generation
    for _ in range(2):
        for node_id, members in nodes.items():
            paces = tuple(StepTime(m.rank, 50, 0.5 if m.rank % 64 == 1 else 0.1) for m in members)
            world._feed_controller(StepTimes(node_id=node_id, generation=generation, ranks=paces))
    for node_id in nodes:
        still = Stalled(node_id=node_id, generation=generation, idle_s=9.0, bound_s=5.0, step_s=0.1)
        world._feed_controller(still)
    for node_id, members in nodes.items():
        ranks = tuple(
            RankEvidence(
                member_id=m.member_id, rank=m.rank, step=3, phase="forward", idle_s=9, bound_s=5, cpu=1.0
            )
            for m in members
        )
        world._feed_controller(Evidence(node_id=node_id, number=1, ranks=ranks))
    for node_id in nodes:
        world._feed_controller(ProgressResumed(node_id=node_id, generation=generation))


def kill(at_s: float) -> Callable[[int], tuple[SimFault, ...]]:
    return lambda ranks: (SimFault(kind="kill", at_s=at_s, rank=ranks // 2),)


def raise_all(ranks: int) -> tuple[SimFault, ...]:
    return tuple(SimFault(kind="raise", at_s=0.8, rank=rank) for rank in range(ranks))


def kill_a_quarter(ranks: int) -> tuple[SimFault, ...]:
    return tuple(SimFault(kind="kill", at_s=0.8, rank=rank) for rank in range(0, ranks, 4))


def kill_and_the_controller(ranks: int) -> tuple[SimFault, ...]:
    return (*kill(0.8)(ranks), SimFault(kind="controller", at_s=0.82))


@pytest.mark.parametrize(
    ("seed", "faults"),
    [
        pytest.param(4, kill(0.8), id="replaced"),
        pytest.param(3, kill(0.8), id="restarted"),
        pytest.param(4, kill(0.07), id="lost while sessions open"),
        pytest.param(4, raise_all, id="all raise"),
        pytest.param(4, kill_a_quarter, id="a quarter is lost"),
        pytest.param(4, kill_and_the_controller, id="the controller is lost as well"),
    ],
)
def test_no_function_of_the_controller_looks_at_all_ranks_for_each_rank(
    seed: int, faults: Callable[[int], tuple[SimFault, ...]]
) -> None:
    large = SMALL * TIMES
    few = lines_of(SMALL, seed, faults(SMALL), disturb=True)
    many = lines_of(large, seed, faults(large), disturb=True)
    grown = {
        code.co_qualname: (few.get(code, 0), lines)
        for code, lines in many.items()
        if lines > GROWTH_MAX * few.get(code, 0) + LINES_PER_RANK * large
        and not any(name in code.co_qualname for name in AS_LARGE_AS_THE_JOB)
    }
    assert not grown, f"lines at {SMALL} and {large} ranks"


def test_a_death_while_sessions_open_is_told_once() -> None:
    for at_s in (0.06, 0.07, 0.08, 0.09, 0.1):
        world = World(64, 4, kill(at_s)(64), 6, 2)
        world.run()
        for kind in ("detected", "recovered"):
            assert [r.data["rank"] for r in world.journal if r.kind == kind] == [32], f"{kind}, at {at_s} s"
