"""A permanently broken device on a living node: its rank moves to another device, and the run continues."""

from __future__ import annotations

from typing import ClassVar

import pytest

from holdfast.core.ids import Generation, NodeId
from holdfast.core.protocol.messages import Assignment, StartMembers, WorkerFailed
from holdfast.exit_codes import Exit
from holdfast.sim.faults import SimFault
from holdfast.sim.sim_agent import SimAgent
from holdfast.sim.sim_result import SimResult
from holdfast.sim.worker import SimWorker, Surroundings
from holdfast.sim.world import World, run_sim

ECC = "CUDA error: uncorrectable ECC error encountered"
ACCESS = "CUDA error: an illegal memory access was encountered"
SLOT = (NodeId("n0"), 1)
BROKEN_AT = 5


class BrokenWorker(SimWorker):
    """A worker that raises in its block from one step on: in one of ``slots``, or as rank 1 in every slot."""

    says: ClassVar[str] = ECC
    slots: ClassVar[tuple[tuple[NodeId, int], ...]] = (SLOT,)

    def __init__(self, world: Surroundings, node_id: NodeId, seat: Assignment, order: StartMembers) -> None:
        super().__init__(world, node_id, seat, order)
        self.slot = (node_id, seat.local_rank)

    def _computed(self, where: tuple[Generation, int]) -> None:
        machine = self.machine
        hit = self.slot in self.slots or (self.rank == 1 and not self.slots)
        if not hit or machine.state != "compute" or machine.step < BROKEN_AT:
            super()._computed(where)
            return
        step = machine.step
        machine.fail()
        self.send(
            WorkerFailed(
                member_id=self.member_id, generation=machine.generation, step=step, kind="AcceleratorError",
                what=self.says, traceback="", digest="of the error",
            )
        )  # fmt: skip
        self.later(0.03, "exit", lambda: self.world.died(self, 1, None))


class Fleet(World):
    """A simulated run with all ranks on one node, and a spare node with four slots."""

    worker_type = BrokenWorker
    spare_slots = 4

    def __init__(
        self, ranks: int, seed: int, faults: tuple[SimFault, ...], until: int, shards: int, memory: int = 0
    ) -> None:
        super().__init__(ranks, seed, faults, until, shards, memory)
        if self.spare_slots:
            spare = NodeId("n1")
            self._agents[spare] = SimAgent(spare, self.spare_slots, 0, ranks, 900)


def fleet(
    says: str = ECC, slots: tuple[tuple[NodeId, int], ...] = (SLOT,), spare_slots: int = 4
) -> type[World]:
    worker = type("Worker", (BrokenWorker,), {"says": says, "slots": slots})
    return type("Nodes", (Fleet,), {"worker_type": worker, "spare_slots": spare_slots})


def seats(result: SimResult) -> list[tuple[object, object]]:
    """Return the seats of rank 1 in their order, each as (node, local rank)."""
    found: list[tuple[object, object]] = []
    for record in result.records:
        if record.kind == "generation_started" and not record.data["in_place"]:
            nodes, local_ranks = record.data["nodes"], record.data["local_ranks"]
            assert isinstance(nodes, list) and isinstance(local_ranks, list)
            found.append((nodes[1], local_ranks[1]))
        elif record.kind == "members_replaced":
            nodes, local_ranks = record.data["nodes"], record.data["local_ranks"]
            assert isinstance(nodes, list) and isinstance(local_ranks, list)
            found.append((nodes[0], local_ranks[0]))
    return found


def lost(result: SimResult) -> bool:
    return any(r.data["steps_lost"] for r in result.records if r.kind == "restored")


@pytest.mark.parametrize("says", [ECC, ACCESS])
def test_a_broken_device_is_left_after_its_second_failure(says: str) -> None:
    """Regression: the run ended as a bug of the script, although a spare node was available."""
    for seed in (2, 4, 6):
        result = run_sim(4, seed, world=fleet(says))
        assert (result.code, result.step) == (Exit.OK, 12), result.reason
        assert seats(result) == [("n0", 1), ("n0", 1), ("n1", 0)] and not lost(result)
        assert [r.data["failures"] for r in result.records if r.kind == "device_failed"] == [1, 2]


def test_an_error_that_follows_its_rank_is_the_scripts() -> None:
    result = run_sim(4, 2, world=fleet(ACCESS, ()))
    assert result.code == Exit.FAILED and "the same exception at step 5" in result.reason
    assert seats(result) == [("n0", 1), ("n0", 1), ("n1", 0)]


def test_an_uncertain_error_without_another_device_is_the_scripts() -> None:
    result = run_sim(4, 2, world=fleet(ACCESS, spare_slots=0))
    assert result.code == Exit.FAILED and "the same exception at step 5 twice" in result.reason


def test_without_another_slot_the_run_saves_and_asks_for_a_node() -> None:
    result = run_sim(4, 2, world=fleet(ECC, spare_slots=0))
    assert result.code == Exit.REQUEUE, result.reason
    assert "left out after 2 failures: device 1 of n0" in result.reason
    assert any(r.kind == "sealed" and r.data["step"] == BROKEN_AT for r in result.records)


def test_the_next_controller_knows_which_devices_failed() -> None:
    for seed in (2, 4, 6):
        faults = (SimFault(kind="controller", at_s=0.9), SimFault(kind="controller", at_s=1.3))
        result = run_sim(4, seed, faults, world=fleet())
        assert (result.code, result.step) == (Exit.OK, 12), result.reason
        assert seats(result)[-1] != ("n0", 1) and not lost(result)


def test_all_ranks_with_the_same_uncertain_error_count_against_no_device() -> None:
    result = run_sim(4, 2, world=fleet(ACCESS, tuple((NodeId("n0"), n) for n in range(4))))
    assert result.code == Exit.FAILED and "the same exception at step 5 twice" in result.reason
