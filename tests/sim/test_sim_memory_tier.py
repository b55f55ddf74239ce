"""The memory tier under simulated faults: one rank per shard, kills at any moment, torn copies, damage, mutants."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from holdfast.core.protocol.messages import Command, RankState
from holdfast.core.worker.worker_machine import RestoreState
from holdfast.sim.faults import SimFault, random_faults
from holdfast.sim.invariants import Violation
from holdfast.sim.sim_memory_tier import Memory
from holdfast.sim.sim_result import SimResult
from holdfast.sim.worker import SimWorker
from holdfast.sim.world import World, run_sim

RANKS = 4
SEEDS = 80


def run(seed: int, world: type[World] = World) -> SimResult:
    """Simulate a job in which each shard has one holder. States are kept at every, every second or every third step."""
    rng = random.Random(seed)
    faults = random_faults(rng, RANKS, 1.5, rng.randint(1, 4))
    return run_sim(RANKS, seed, faults, shards=RANKS, memory=1 + seed % 3, world=world)


def catches(world: type[World], name: str) -> bool:
    """Run seeds until the check ``name`` fails. Return False if it never does."""
    for seed in range(SEEDS):
        try:
            run(seed, world)
        except Violation as violation:
            if violation.name == name:
                return True
    return False


def test_a_lost_shard_comes_back_whatever_happens() -> None:
    actions: Counter[str] = Counter()
    for seed in range(SEEDS):
        found = run(seed)
        assert found.code == 0, f"seed {seed}: {found.reason}"
        actions.update(str(r.data["action"]) for r in found.records if r.kind == "verdict")
    assert actions["replace_from_memory"] > 25 and actions["restart_from_memory"] > 10, actions
    assert actions["replace"] == actions["restart_last_gasp"] == actions["restart_fresh"] == 0, actions


@pytest.mark.parametrize(
    ("state", "every"), [("compute", 1), ("voting", 1), ("updating", 1), ("compute", 2), ("updating", 2)]
)
def test_what_a_loss_costs(state: RankState, every: int) -> None:
    fault = SimFault(kind="kill", at_s=0.5, rank=2, state=state)
    found = run_sim(RANKS, 4, (fault,), shards=RANKS, memory=every)
    (restored,) = [r.data for r in found.records if r.kind == "restored"][1:]
    (verdict,) = [r.data for r in found.records if r.kind == "verdict"]
    assert verdict["action"] == "replace_from_memory"
    step = int(str(verdict["step"]))
    (newest,) = [
        int(str(r.data["step"])) for r in found.records if r.kind == "member_exited" and r.data["signal"] == 9
    ]
    assert restored["step"] == newest - newest % every, (
        "what the lost one had kept before it died in that step"
    )
    assert restored["steps_lost"] == step - int(str(restored["step"]))


class Logging(Memory):
    """A memory tier with a gradient log."""

    logs = True


class Logged(World):
    """A simulated run in which each rank logs an update before it votes for the update."""

    memory_type = Logging


@pytest.mark.parametrize("state", ["compute", "voting", "updating"])
@pytest.mark.parametrize("every", [1, 4])
def test_with_a_log_a_loss_costs_nothing(state: RankState, every: int) -> None:
    fault = SimFault(kind="kill", at_s=0.5, rank=2, state=state)
    found = run_sim(RANKS, 4, (fault,), shards=RANKS, memory=every, world=Logged)
    (verdict,) = [r.data for r in found.records if r.kind == "verdict"]
    (restored,) = [r.data for r in found.records if r.kind == "restored"][1:]
    assert found.code == 0 and verdict["action"] == "replace_from_memory"
    assert restored["steps_lost"] == 0 and restored["step"] == verdict["step"]


def test_with_a_log_whatever_happens() -> None:
    again = 0
    actions: Counter[str] = Counter()
    for seed in range(SEEDS):
        found = run(seed, Logged)
        assert found.code == 0, f"seed {seed}: {found.reason}"
        verdicts = [r.data for r in found.records if r.kind == "verdict"]
        actions.update(str(verdict["action"]) for verdict in verdicts)
        again += sum("make the updates up to step" in str(verdict["reason"]) for verdict in verdicts)
    assert again > 25 and actions["restart_from_memory"] > 5, (again, actions)


def test_a_log_on_a_damaged_state_is_refused() -> None:
    class Mixed(Damaged):
        memory_type = Logging

    fault = SimFault(kind="kill", at_s=0.95, rank=2)
    found = run_sim(RANKS, 4, (fault,), shards=RANKS, memory=3, world=Mixed)
    assert found.code == 0, found.reason
    actions = [r.data["action"] for r in found.records if r.kind == "verdict"]
    assert actions[0] == "replace_from_memory" and actions[-1] == "restart_checkpoint", actions


def test_mutant_that_makes_updates_again_over_a_hole() -> None:
    class Holed(Logging):
        def note(self, rank: int, step: int, applied: int | None) -> None:
            if step % 5:
                super().note(rank, step, applied)

        def replays(self, rank: int) -> tuple[int, ...]:
            return tuple(s + 1 for s in sorted(self._updates.get(rank, {})))

    class Mutant(World):
        memory_type = Holed

    assert catches(Mutant, "memory_is_one_step")


def test_mutant_that_logs_after_the_vote() -> None:
    """The other ranks have made an update that is missing from the lost rank's log. The log claims to contain it."""

    class Late(Logging):
        def note(self, rank: int, step: int, applied: int | None) -> None:
            if applied is not None:
                super().note(rank, step - 1, applied - 1)

        def replays(self, rank: int) -> tuple[int, ...]:
            return tuple(s + 1 for s in super().replays(rank))

    class Mutant(World):
        memory_type = Late

    assert catches(Mutant, "memory_is_one_step")


class Damaged(World):
    """A simulated run in which every kept state of rank 2 is damaged before the rank is killed."""

    def died(self, worker: SimWorker, code: int | None, killed_by: int | None) -> None:
        if worker.rank == 2 and killed_by == 9:
            self.memory.damage(2)
        super().died(worker, code, killed_by)


def test_damaged_states_are_refused_and_the_disk_counts() -> None:
    fault = SimFault(kind="kill", at_s=0.95, rank=2)
    found = run_sim(RANKS, 4, (fault,), shards=RANKS, memory=1, world=Damaged)
    assert found.code == 0, found.reason
    actions = [r.data["action"] for r in found.records if r.kind == "verdict"]
    assert actions[0] == "replace_from_memory" and actions[-1] == "restart_checkpoint", actions
    assert any(r.kind == "state_refused" for r in found.records)


def test_mutant_that_believes_a_damaged_state() -> None:
    class Trusting(Memory):
        def verify(self, rank: int, step: int) -> bool:
            return step in self.steps(rank)

    class Mutant(Damaged):
        memory_type = Trusting

    fault = SimFault(kind="kill", at_s=0.95, rank=2)
    with pytest.raises(Violation) as violation:
        run_sim(RANKS, 4, (fault,), shards=RANKS, memory=1, world=Mutant)
    assert violation.value.name == "memory_is_one_step"


def test_mutant_that_copies_over_the_newest_state_and_leaves_its_marker() -> None:
    class Torn(Memory):
        def begin(self, rank: int) -> None:
            if slots := self._slots.get(rank):
                slots[-1].applied = None

    class Mutant(World):
        memory_type = Torn

    assert catches(Mutant, "memory_is_one_step")


def test_mutant_that_does_not_go_back_with_the_others() -> None:
    class Stubborn(SimWorker):
        def _execute(self, command: Command) -> None:
            applied = self.applied
            super()._execute(command)
            if isinstance(command, RestoreState):
                self.applied = applied

    class Mutant(World):
        worker_type = Stubborn

    assert catches(Mutant, "updates_what_it_holds")
