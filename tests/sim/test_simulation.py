"""Whole runs on a virtual clock: many seeds, every invariant after every event."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from holdfast.core.job.log_replay import SNAPSHOT, ReplayedState
from holdfast.core.protocol.health_messages import StateDigests
from holdfast.core.protocol.messages import JoinAsked, Joined, LogRecord, Message, StateOffered
from holdfast.exit_codes import Exit
from holdfast.sim.faults import FaultKind, SimFault, random_faults
from holdfast.sim.sim_result import SimResult
from holdfast.sim.worker import SimWorker
from holdfast.sim.world import World, run_sim

SEEDS = 60
SIZES = (4, 4, 4, 6, 8, 8, 12, 16)
LARGE = (32, 64, 128, 256, 512, 1024)
EXPECTED = {
    Exit.OK,
    Exit.FAILED,  # the process died after training was done
    Exit.FAILED,  # every holder of a shard died before the first checkpoint
}


def simulate(seed: int) -> SimResult:
    """Simulate a run whose size and faults follow from the seed."""
    rng = random.Random(seed)
    ranks = rng.choice(LARGE if seed % 25 == 0 else SIZES)
    return run_sim(ranks, seed, random_faults(rng, ranks, 2.0, rng.randint(1, 4)))


def test_many_seeds_keep_every_invariant() -> None:
    results = [simulate(seed) for seed in range(SEEDS)]
    assert {Exit(r.code) for r in results} <= EXPECTED
    assert sum(r.code == Exit.OK for r in results) > 0.95 * SEEDS
    assert all(r.step == 12 for r in results if r.code == Exit.OK)
    assert sum(r.recovered for r in results) > SEEDS
    assert sum(r.forward for r in results) > 0, "no run had a decision that carried ranks in doubt forward"
    assert sum(r.back for r in results) > 0, "no run had a decision that took ranks in doubt back"


def test_a_rank_that_is_lost_while_another_one_has_finished_ends_the_run() -> None:
    """The agent dies before it passes on the report of the finished rank (seed 20789233817 of a night)."""
    faults = (
        SimFault(kind="stop", at_s=1.7099573201468319, rank=1),
        SimFault(kind="agent", at_s=1.789923034727733),
        SimFault(kind="exit", at_s=1.8370946244436814, rank=1),
    )
    result = run_sim(2, 20789233817, faults, memory=2, shards=2)
    assert (result.code, result.step) == (Exit.OK, 12)


def test_a_rank_that_opens_after_its_answer_and_dies_proves_nothing() -> None:
    """A restart from a checkpoint loses two more ranks while its sessions open (seed 20788219543 of a night)."""
    kills = ((1.4789175697676389, 2), (1.5429771538686856, 5), (1.551542888847492, 3))
    faults = tuple(SimFault(kind="kill", at_s=at_s, rank=rank) for at_s, rank in kills)
    result = run_sim(6, 20788219543, faults, shards=6)
    assert (result.code, result.step) == (Exit.OK, 12)


@pytest.mark.parametrize(("seed", "memory"), [(807, 0), (1023, 0), (59, 2), (77, 2), (83, 2)])
def test_flips_that_nothing_can_tell_are_no_breach(seed: int, memory: int) -> None:
    """The last other holder dies during the update that a flipped bit has made wrong.

    With ``memory``, states are kept in memory while the copies of the job differ.
    """
    rng = random.Random(seed)
    result = run_sim(4, seed, random_faults(rng, 4, 2.0, rng.randint(1, 4)), memory=memory)
    assert (result.code, result.step) == (Exit.OK, 12)


@pytest.mark.parametrize(("seed", "ranks", "shards"), [(207850002155, 3, 1), (207850004163, 6, 2)])
def test_flips_in_copies_that_are_not_compared_are_no_breach(seed: int, ranks: int, shards: int) -> None:
    """The flipped copy is torn before its slice is compared, or the other holders open after the fence."""
    torn = (
        SimFault(kind="flip", at_s=0.357, rank=0, state="voting", delay_s=0.0038904881000671044),
        SimFault(kind="glitch", at_s=0.664, rank=0, state="voting", delay_s=0.002208445943289181),
    )
    late = (
        SimFault(kind="stop", at_s=0.765, rank=2, state="voting", delay_s=0.0004351211937916739),
        SimFault(kind="kill", at_s=0.766, rank=0, state="compute", delay_s=0.0017025120985295313),
        SimFault(kind="flip", at_s=0.822, rank=1, state="aborted", delay_s=0.0016607652812360416),
    )
    result = run_sim(ranks, seed, torn if ranks == 3 else late, memory=2, shards=shards)
    assert (result.code, result.step) == (Exit.OK, 12)


def test_two_flipped_copies_are_not_equal() -> None:
    """A bit flips in both holders of a shard before their copies are compared."""
    flips = tuple(SimFault(kind="flip", at_s=at_s, rank=rank) for at_s, rank in ((0.75, 1), (0.78, 3)))
    for seed in range(20):
        result = run_sim(5, seed, flips)
        assert (result.code, result.step) == (Exit.OK, 12), f"seed {seed}"
        assert result.recovered, f"seed {seed}: the difference was not reported"


def test_a_newcomer_that_holds_the_state_is_known_to_the_next_controller() -> None:
    """Rank 1 of two is lost, then the controller, then rank 0.

    Regression: a decision was made while the newcomer lived.
    """
    faults = (
        SimFault(kind="kill", at_s=0.65, rank=1),
        SimFault(kind="controller", at_s=0.75),
        SimFault(kind="kill", at_s=0.776, rank=0),
    )
    results = [run_sim(2, seed, faults, shards=1) for seed in range(40)]
    lost = [any(r.data["steps_lost"] for r in result.records if r.kind == "restored") for result in results]
    assert sum(lost) < 10, "in these the newcomer had no state yet"


def test_a_torn_rank_proves_its_step_also_when_nobody_else_is_left() -> None:
    faults = (
        SimFault(kind="kill", at_s=0.9, rank=0, state="voting"),
        SimFault(kind="raise", at_s=0.9, rank=1, state="updating", delay_s=0.005),
    )
    for seed in range(60):
        result = run_sim(2, seed, faults, shards=1, memory=3)
        assert (result.code, result.step) == (Exit.OK, 12), f"seed {seed}"


def test_undisturbed_run_needs_no_recovery() -> None:
    result = run_sim(8, 1)
    assert (result.code, result.step, result.recovered) == (Exit.OK, 12, 0)


@pytest.mark.parametrize("state", ["starting", "ready", "compute", "voting", "updating"])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_kill_in_any_phase_loses_nothing(state: str, rank: int) -> None:
    faults = (SimFault(kind="kill", at_s=0.5, rank=rank, state=state, delay_s=0.001),)  # type: ignore[arg-type]
    result = run_sim(4, 7, faults)
    lost = [r.data["steps_lost"] for r in result.records if r.kind == "recovered"]
    assert result.code == Exit.OK and result.step == 12
    if state != "starting":  # nothing starts any more at 0.5 s
        assert lost == [0]


def test_a_torn_update_costs_no_step() -> None:
    fault = SimFault(kind="glitch", at_s=0.5, rank=1, state="updating", delay_s=0.0)
    actions = set()
    for seed in range(8):
        result = run_sim(4, seed, (fault,))
        assert any(r.kind == "settled" and r.data["state"] == "torn" for r in result.records)
        assert (result.code, result.step) == (Exit.OK, 12)
        actions |= {r.data["action"] for r in result.records if r.kind == "verdict"}
    assert "replace" in actions


@pytest.mark.parametrize("kind", ["kill", "glitch"])
def test_ranks_with_different_groups_all_start_again_once(kind: FaultKind) -> None:
    """A retry or another replacement would meet the same groups."""
    faults = (SimFault(kind="groups", at_s=0.4, rank=2), SimFault(kind=kind, at_s=0.5, rank=1))
    found = set()
    for seed in range(20):
        result = run_sim(4, seed, faults)
        assert (result.code, result.step) == (Exit.OK, 12), f"seed {seed}"
        assert all(r.data["steps_lost"] == 0 for r in result.records if r.kind == "recovered")
        found.add(tuple(r.data["action"] for r in result.records if r.kind == "verdict"))
    in_place = "replace" if kind == "kill" else "retry_in_place"
    assert (in_place, "restart_last_gasp") in found
    assert all(len(actions) <= 2 and actions[-1:] in ((), ("restart_last_gasp",)) for actions in found)


def test_a_deadline_in_a_recovery_starts_no_process() -> None:
    """Regression: the deadline of an exit passed between two answers to a fence.

    The second answer started a replacement, and the run did not end.
    """
    faults = (
        SimFault(kind="raise", at_s=1.5449202332842615, rank=1),
        SimFault(kind="stop", at_s=1.6608707256988071, rank=0),
        SimFault(kind="ask_exit", at_s=1.6669204220538683, rank=1),
    )
    result = run_sim(3, 20604653, faults, shards=2, memory=3)
    assert result.time_s < 120


def test_phases_of_a_recovery_never_go_backwards() -> None:
    seen = 0
    for seed in range(40):
        for record in simulate(seed).records:
            if record.kind == "recovered":
                names = ("detected", "fenced", "quiesced", "planned", "restored", "resumed")
                times = [float(str(record.data[f"{name}_s"])) for name in names]
                assert times == sorted(times) and times[0] >= 0.0
                seen += 1
    assert seen > 20


def test_graceful_exit_saves_and_asks_to_be_requeued() -> None:
    result = run_sim(4, 3, (SimFault(kind="ask_exit", at_s=0.6),), until=50)
    assert result.code == Exit.REQUEUE
    assert 0 < result.step < 50
    assert any(r.kind == "sealed" and r.data["step"] == result.step for r in result.records)


def test_a_request_that_comes_as_the_controller_dies_is_kept() -> None:
    """The request comes before the death and is not read, or after the death and before its detection."""
    for seed in range(60):
        asked_s = 0.5985 + 0.0001 * seed
        faults = (SimFault(kind="controller", at_s=0.6), SimFault(kind="ask_exit", at_s=asked_s))
        result = run_sim((4, 12)[seed % 2], seed, faults, until=50)
        assert (result.code, result.step < 50) == (Exit.REQUEUE, True), f"asked at {asked_s}: {result.reason}"


@pytest.mark.parametrize("ranks", [4, 12])
def test_an_exit_before_anything_has_begun_ends_every_node(ranks: int) -> None:
    for seed in range(20):
        result = run_sim(ranks, seed, (SimFault(kind="ask_exit", at_s=0.002 * seed),), until=50)
        assert result.code == Exit.UNSAVED and result.time_s < 30


def test_a_fault_during_a_graceful_exit_still_saves() -> None:
    for seed in range(30):
        faults = (
            SimFault(kind="ask_exit", at_s=0.6),
            SimFault(kind="kill", at_s=0.6 + 0.01 * seed, rank=seed % 4),
        )
        result = run_sim(4, seed, faults, until=50)
        assert result.code in (Exit.REQUEUE, Exit.FAILED), result.reason
        assert result.code == Exit.REQUEUE or "after training" in result.reason


def test_the_past_is_what_the_records_say() -> None:
    faults = (SimFault(kind="kill", at_s=0.5, rank=1), SimFault(kind="kill", at_s=1.5, rank=2))
    past = ReplayedState.read(run_sim(4, 5, faults).records)
    assert past.attempts == 1 and past.last_member == 6
    assert [s.member_id for s in past.seats] == [1, 5, 6, 4]
    assert [a.action for a in past.answered] == ["replace", "replace"]
    past = ReplayedState.read(run_sim(4, 7, faults).records)  # of the seeds that restart all workers
    assert past.attempts == 3 and past.last_member == 12
    assert [s.member_id for s in past.seats] == [9, 10, 11, 12]
    assert [a.action for a in past.answered] == ["restart_last_gasp", "restart_last_gasp"]
    assert past.step > 0 and past.session and past.opened and past.released


@pytest.mark.parametrize("seed", [5, 7, 12])
def test_a_reader_may_begin_at_a_snapshot(seed: int) -> None:
    records = simulate(seed).records
    whole, before = ReplayedState.read(records), ReplayedState()
    for number, record in enumerate(records):
        before = before.after(record)
        if number % 5 == 0:
            data = {**before.snapshot(100.0).data, "read_s": 130.0}
            behind = ReplayedState.read([LogRecord(kind=SNAPSHOT, data=data), *records[number + 1 :]])
            for timed in ("answered", "node_faults"):
                early, late = getattr(before, timed), getattr(behind, timed)
                shifted = len(early)
                assert [each.at_s for each in late[:shifted]] == pytest.approx([e.at_s + 30.0 for e in early])
                assert late[shifted:] == getattr(whole, timed)[shifted:]
            untimed: dict[str, Any] = {"answered": (), "node_faults": ()}
            assert msgspec.structs.replace(behind, **untimed) == msgspec.structs.replace(whole, **untimed)


def test_a_run_is_a_function_of_its_seed() -> None:
    script = (
        "import random\n"
        "from holdfast.sim.faults import random_faults\n"
        "from holdfast.sim.world import run_sim\n"
        "for seed in range(3):\n"
        "    faults = random_faults(random.Random(seed), 16, 2.0, 4)\n"
        "    print(run_sim(16, seed, faults).digest)\n"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "4242")
    ]
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0].split())) == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_resume_that_some_ranks_never_heard_is_said_again(rank: int) -> None:
    """The controller dies between its orders to resume, as soon as one rank has followed its own order."""
    faults = (
        SimFault(kind="kill", at_s=1.0, rank=2),
        SimFault(kind="controller", at_s=1.05, rank=rank, state="ready"),
    )
    for seed in range(60):
        result = run_sim(3, seed, faults)
        assert (result.code, result.step) == (Exit.OK, 12), f"seed {seed}"


@pytest.mark.parametrize("kind", [StateOffered, StateDigests, JoinAsked, Joined])
def test_a_word_that_dies_with_its_agent_is_said_again(kind: type[Message]) -> None:
    """The agent is killed while a message of the recovery is in flight. No rank is killed for its absence."""

    class Swallowing(World):
        struck = False

        def uplink(self, worker: SimWorker, message: Message) -> None:
            super().uplink(worker, message)
            if isinstance(message, kind) and not self.struck:
                self.struck = True
                self.kill_agent(worker.node_id)

    for seed in range(0, 40, 4):
        result = run_sim(4, seed, (SimFault(kind="kill", at_s=1.0, rank=2),), world=Swallowing)
        assert (result.code, result.step) == (Exit.OK, 12), f"seed {seed}: {result.reason}"
        assert [r.data["action"] for r in result.records if r.kind == "verdict"] == ["replace"], (
            f"seed {seed}"
        )
        assert result.time_s < 60.0, f"seed {seed}: virtual time"


def test_spares_take_seats_and_die_without_a_trace() -> None:
    called = 0
    for seed in range(1, 150, 5):
        rng = random.Random(seed)
        kills = tuple(
            SimFault(kind="kill", at_s=rng.uniform(0.8, 1.5), rank=rng.randrange(4)) for _ in range(2)
        )
        spare = SimFault(kind="spare", at_s=rng.uniform(0.3, 1.5), rank=0)
        result = run_sim(4, seed, (*kills, spare))
        assert result.code == Exit.OK and result.step == 12
        called += result.spares_called
    assert called > 10
