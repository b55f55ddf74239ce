"""Nodes that will leave, on a virtual clock: seeds with notices, withdrawn notices, and all other faults."""

from __future__ import annotations

import random
from functools import partial

import msgspec
import pytest

from holdfast.core.config import Config
from holdfast.core.ids import NodeId
from holdfast.core.job.departure import Departures
from holdfast.core.job.log_replay import ReplayedState
from holdfast.core.protocol.messages import JoinAsked, Message
from holdfast.core.protocol.notices import DrainNode
from holdfast.exit_codes import Exit
from holdfast.sim.faults import SimFault, random_faults
from holdfast.sim.invariants import Violation
from holdfast.sim.sim_agent import SimAgent
from holdfast.sim.sim_result import SimResult
from holdfast.sim.world import World, run_sim

SEEDS = 30
SPARE = NodeId("n9")
RANKS, PER_NODE = 12, 6  # on two nodes


class Moving(World):
    """A simulated run on two nodes with a spare node. The first node gets a notice to leave.

    The notice is withdrawn in every third seed.
    """

    drained = NodeId("n0")

    def __init__(
        self, ranks: int, seed: int, faults: tuple[SimFault, ...], until: int, shards: int, memory: int = 0
    ) -> None:
        super().__init__(ranks, seed, faults, until, shards, memory)
        self.on_fault = "auto"
        self._agents[SPARE] = SimAgent(SPARE, PER_NODE, 0, ranks, 900)
        at_s = self.jitter(0.2, 1.0)
        self.later(at_s, "notice", partial(self.notice, withdrawn=False))
        if seed % 3 == 0:
            self.later(at_s + self.jitter(0.0, 0.6), "withdrawn", partial(self.notice, withdrawn=True))

    def notice(self, *, withdrawn: bool) -> None:
        """Simulate ``holdfast drain`` on the other node."""
        self.tell_agent(NodeId("n1"), DrainNode(node_id=self.drained, withdrawn=withdrawn))

    def _start_controller(self) -> None:
        made = self.controller_type

        class Three(made):  # type: ignore[valid-type, misc]
            def __init__(self, config: Config, past: ReplayedState, uncovered: object) -> None:
                super().__init__(msgspec.structs.replace(config, nnodes=2), past, uncovered)

        self.controller_type = Three
        super()._start_controller()
        self.controller_type = made


def moving(seed: int, faults: tuple[SimFault, ...] = ()) -> SimResult:
    """Simulate one run with a notice."""
    return run_sim(RANKS, seed, faults, until=30, world=Moving)


def kinds(result: SimResult) -> list[str]:
    """Return the kinds of its records."""
    return [record.kind for record in result.records]


def test_a_move_redoes_nothing_and_a_false_notice_disturbs_nothing() -> None:
    moved = withdrawn = 0
    for seed in range(SEEDS):
        result = moving(seed)
        assert (result.code, result.step) == (Exit.OK, 30), f"seed {seed}"
        lost = [r.data["steps_lost"] for r in result.records if r.kind == "restored"]
        assert not any(lost), f"seed {seed}"
        states = {r.data["state"] for r in result.records if r.kind == "settled"}
        assert states <= {"ready"}, f"seed {seed}: a rank was in a step"
        left = "node_left" in kinds(result)
        assert left or seed % 3 == 0, f"seed {seed}: {kinds(result)}"
        assert ("fenced" in kinds(result)) is ("holding" in kinds(result)), (
            f"seed {seed}: a stop without a move"
        )
        moved += left
        withdrawn += not left
    assert moved >= 20 and withdrawn > 2


def test_a_controller_that_does_not_end_a_stop_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The withdrawal of a notice crosses the order to stop in some seeds."""
    monkeypatch.setattr(Departures, "_tell_continue", lambda self, member: None)
    with pytest.raises(Violation, match="no_rank_waits_for_nothing"):
        for seed in range(0, 200, 3):
            moving(seed)


def test_seeds_with_faults_beside_the_notice_keep_every_invariant() -> None:
    results = []
    for seed in range(SEEDS):
        rng = random.Random(seed)
        results.append(moving(seed, random_faults(rng, RANKS, 2.0, rng.randint(1, 3))))
    assert {Exit(r.code) for r in results} <= {Exit.OK, Exit.FAILED}
    assert sum(r.code == Exit.OK for r in results) > 0.9 * SEEDS
    assert all(r.step == 30 for r in results if r.code == Exit.OK)
    assert sum("node_left" in kinds(r) for r in results) > SEEDS / 2


@pytest.mark.parametrize("kind", ["controller", "agent", "kill"])
def test_a_fault_at_any_moment_of_a_move_loses_no_step(kind: str) -> None:
    for number in range(40):
        at_s = 0.3 + 0.03 * number
        result = moving(4, (SimFault(kind=kind, at_s=at_s, rank=number % RANKS),))  # type: ignore[arg-type]
        assert (result.code, result.step) == (Exit.OK, 30), f"{kind} at {at_s}"
        lost = [r.data["steps_lost"] for r in result.records if r.kind == "restored"]
        assert not any(lost[1:]), f"{kind} at {at_s}"


def test_a_newcomer_that_is_lost_on_its_way_is_replaced() -> None:
    class Losing(Moving):
        lost = False

        def uplink(self, worker: object, message: Message) -> None:
            if isinstance(message, JoinAsked) and not self.lost:
                self.lost = True
                self.died(worker, None, 9)  # type: ignore[arg-type]
                return
            super().uplink(worker, message)  # type: ignore[arg-type]

    result = run_sim(RANKS, 4, until=30, world=Losing)
    assert (result.code, result.step) == (Exit.OK, 30) and "node_left" in kinds(result)
