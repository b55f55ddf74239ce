"""A node on which workers die again and again, on a virtual clock: it is left out where another one has room."""

from __future__ import annotations

import random
from typing import ClassVar

import pytest

from holdfast.core.ids import Generation, NodeId
from holdfast.core.protocol.messages import Assignment, StartMembers
from holdfast.exit_codes import Exit
from holdfast.sim.faults import SimFault, random_faults
from holdfast.sim.sim_result import SimResult
from holdfast.sim.worker import SimWorker, Surroundings
from holdfast.sim.world import World, run_sim
from tests.sim.test_leaving import RANKS, SPARE, Moving, kinds

STEPS, STEPS_APART = 60, 3
SEEDS = 16


class DyingWorker(SimWorker):
    """A worker that the machine kills with SIGKILL on one node, each time another rank at a later step."""

    deaths_max: ClassVar[int] = 5

    def __init__(self, world: Surroundings, node_id: NodeId, seat: Assignment, order: StartMembers) -> None:
        super().__init__(world, node_id, seat, order)
        self.home = node_id
        assert isinstance(world, DyingNode)
        if seat.rank == 0 and not world.bad:
            world.bad = node_id

    def _computed(self, where: tuple[Generation, int]) -> None:
        machine, world = self.machine, self.world
        assert isinstance(world, DyingNode)
        due = STEPS_APART * (world.deaths + 1)
        hit = self.home == world.bad and machine.state == "compute" and machine.step >= due
        if not hit or world.deaths >= self.deaths_max:
            super()._computed(where)
            return
        world.deaths += 1
        self.world.died(self, None, 9)


class DyingNode(Moving):
    """Two nodes hold the ranks, a third one waits. Workers die on the first one."""

    worker_type = DyingWorker
    deaths = 0
    bad = NodeId("")

    def notice(self, *, withdrawn: bool) -> None:
        """No notice is given."""


class NoSpare(DyingNode):
    """The same without the third node."""

    def __init__(
        self, ranks: int, seed: int, faults: tuple[SimFault, ...], until: int, shards: int, memory: int = 0
    ) -> None:
        super().__init__(ranks, seed, faults, until, shards, memory)
        del self._agents[SPARE]


def dying(seed: int, faults: tuple[SimFault, ...] = (), world: type[World] = DyingNode) -> SimResult:
    """Return the result of one run."""
    return run_sim(RANKS, seed, faults, until=STEPS, world=world)


def bad_node_has_ranks(result: SimResult) -> bool:
    """Return whether the first node of rank 0 has ranks in the last generation."""
    nodes = [r.data["nodes"] for r in result.records if r.kind == "generation_started"]
    first, last = nodes[0], nodes[-1]
    assert isinstance(first, list) and isinstance(last, list)
    return first[0] in last


def test_the_node_is_left_out_after_its_third_fault_and_no_step_is_done_again() -> None:
    for seed in range(SEEDS):
        result = dying(seed)
        assert (result.code, result.step) == (Exit.OK, STEPS), f"seed {seed}: {result.reason}"
        assert kinds(result).count("node_left_out") == 1, f"seed {seed}"
        assert not bad_node_has_ranks(result), f"seed {seed}"
        lost = [r.data["steps_lost"] for r in result.records if r.kind == "restored"]
        assert not any(lost), f"seed {seed}"
        counts = [r.data["faults"] for r in result.records if r.kind == "node_failed"]
        assert counts[:3] == [1, 2, 3], f"seed {seed}: more may die before the last rank has moved"
        assert "node_left" not in kinds(result), "its agent stays"


def test_without_another_node_it_is_kept_and_the_run_goes_to_its_end() -> None:
    for seed in range(SEEDS // 2):
        result = dying(seed, world=NoSpare)
        assert (result.code, result.step) == (Exit.OK, STEPS), f"seed {seed}: {result.reason}"
        assert kinds(result).count("node_kept") == 1 and "node_left_out" not in kinds(result), f"seed {seed}"
        assert bad_node_has_ranks(result)


@pytest.mark.parametrize("kind", ["controller", "agent", "kill"])
def test_a_fault_at_any_moment_beside_it_loses_no_step(kind: str) -> None:
    """A successor controller counts on with the faults in the log."""
    for number in range(12):
        at_s = 0.3 + 0.17 * number
        result = dying(number, (SimFault(kind=kind, at_s=at_s, rank=number % RANKS),))  # type: ignore[arg-type]
        assert (result.code, result.step) == (Exit.OK, STEPS), f"{kind} at {at_s}: {result.reason}"
        assert "node_left_out" in kinds(result) and not bad_node_has_ranks(result), f"{kind} at {at_s}"
        assert kinds(result).count("node_left_out") == 1, f"{kind} at {at_s}: announced once"


def test_seeds_with_every_other_fault_keep_every_invariant() -> None:
    results = []
    for seed in range(SEEDS):
        rng = random.Random(seed)
        results.append(dying(seed, random_faults(rng, RANKS, 2.0, rng.randint(1, 3))))
    assert {Exit(r.code) for r in results} <= {Exit.OK, Exit.FAILED}
    assert sum(r.code == Exit.OK for r in results) > 0.9 * SEEDS
    assert sum("node_left_out" in kinds(r) for r in results) > SEEDS / 2
