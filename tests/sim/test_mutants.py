"""Mutants of the protocol: versions with a planted error. Each must be caught by the check that exists for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import msgspec
import pytest

import holdfast.core.agent as agent_module
import holdfast.core.controller as controller_module
import holdfast.core.job.recovery as recovery_module
from holdfast.core.agent import Agent
from holdfast.core.decide.decision import Decision, RankReport, decide
from holdfast.core.decide.stop_policy import Situation
from holdfast.core.ids import NO_VERSION, Generation, LayoutVersion, MemberId
from holdfast.core.job.fault import Fault
from holdfast.core.job.membership import Roster
from holdfast.core.job.recovery import Recovery
from holdfast.core.job.situation import Survey
from holdfast.core.job.spares import Spares
from holdfast.core.protocol.health_messages import CopyDigest
from holdfast.core.protocol.layout_messages import Layout, Layouts
from holdfast.core.protocol.messages import Assignment, Command, LogRecord, Receive, Settled
from holdfast.core.worker.decision_orders import OrderBook
from holdfast.core.worker.layout_agreement import LayoutAgreement, LayoutAnnouncement
from holdfast.core.worker.position import ScriptMachine
from holdfast.core.worker.vote import Ballot, Tally
from holdfast.core.worker.worker_machine import GroupsBuilt, WorkerMachine
from holdfast.errors import InternalError
from holdfast.sim.faults import SimFault, random_faults
from holdfast.sim.invariants import Violation
from holdfast.sim.sim_layouts import SimLayouts
from holdfast.sim.sim_store import SimSave, SimStore
from holdfast.sim.worker import SimWorker
from holdfast.sim.world import World, run_sim

SEEDS = 400
RANKS = 4


def faults_of(seed: int) -> tuple[SimFault, ...]:
    """Return two to four random faults, drawn as in the ordinary simulation."""
    rng = random.Random(seed)
    return random_faults(rng, RANKS, 1.5, rng.randint(2, 4))


def catch(world: type[World] = World, among: frozenset[str] = frozenset()) -> set[str]:
    """Run seeds until a check fails (one of ``among``, if it is not empty). Return its name, or an empty set."""
    for seed in range(SEEDS):
        try:
            run_sim(RANKS, seed, faults_of(seed), world=world)
        except Violation as violation:
            if not among or violation.name in among:
                return {violation.name}
    return set()


def test_the_unmutated_protocol_is_not_caught() -> None:
    assert catch() == set()


def test_accepting_a_stale_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    def never_stale(message: Generation, current: Generation) -> bool:
        return False

    monkeypatch.setattr(controller_module, "is_stale", never_stale)
    assert catch(World, frozenset({"decided_after_all_settled", "decision_is_true", "one_fate_per_step"}))


class Careless(SimStore):
    """A store that plans every save, and seals a save as soon as every source has written."""

    def uncovered(self, layouts: Layouts, sources: tuple[int, ...]) -> str:
        return ""

    def is_complete(self, save: SimSave) -> bool:
        return set(save.shares) == set(save.sources)


def test_sealing_what_is_not_covered() -> None:
    class Mutant(World):
        store_type = Careless

    # Ranks 0 and 2 hold shard 0 of 2. After both have died at once, no rank holds it.
    faults = tuple(SimFault(kind="kill", at_s=0.75, rank=rank) for rank in (0, 2))
    with pytest.raises(Violation) as caught:
        run_sim(RANKS, 1, faults, world=Mutant)
    assert caught.value.name == "sealed_is_covered"


def test_acting_before_persisting() -> None:
    class Mutant(World):
        """A controller that sends its orders before it writes the journal."""

        def execute_controller(self, commands: list[Command]) -> None:
            for command in commands:
                self._act_for_controller(command)
            self.journal.extend(c for c in commands if isinstance(c, LogRecord))

    assert catch(Mutant) == {"persist_then_act"}


def test_deciding_alone_in_doubt() -> None:
    class Rash(SimWorker):
        """A worker that discards a step on its own when its vote breaks, and begins the step again."""

        def vote_broken(self) -> None:
            if self.alive and not self.stopped and self.machine.state == "voting":
                self.machine.vote_refused()
                self.advanced()

    class Mutant(World):
        worker_type = Rash

    assert catch(Mutant, frozenset({"one_fate_per_step", "decision_is_true"}))


def test_applying_alone_in_doubt() -> None:
    class Rash(SimWorker):
        """A worker that treats a broken vote as passed."""

        def vote_broken(self) -> None:
            if self.alive and not self.stopped and self.machine.state == "voting":
                self.vote_result(Tally(passed=True))

    class Mutant(World):
        worker_type = Rash

    assert catch(Mutant, frozenset({"one_fate_per_step", "decision_is_true", "one_step_at_a_time"}))


def test_deciding_before_all_have_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = Recovery.progress

    def hasty(recovery: Recovery, now: float) -> None:
        living = recovery.job.roster.living
        if recovery.phase == "fencing" and len(recovery.reports) * 2 >= len(living) > 0:
            recovery._plan(now)
        else:
            progress(recovery, now)

    monkeypatch.setattr(Recovery, "progress", hasty)
    assert catch(World, frozenset({"decided_after_all_settled", "decision_is_true"}))


def test_never_going_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    def timid(reports: Sequence[RankReport], sealed_step: int = -1) -> Decision:
        undecided = [r for r in reports if r.state in ("in_doubt", "aborted")]
        return decide(undecided or reports, sealed_step)

    monkeypatch.setattr(recovery_module, "decide", timid)
    assert catch(World, frozenset({"decision_is_true", "no_committed_step_is_lost"}))


def test_resuming_before_the_newcomers_have_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = Recovery.progress

    def hasty(recovery: Recovery, now: float) -> None:
        for member in recovery.job.roster.living:
            if recovery.rules.then == "replace" and member.joining and member.said_hello:
                member.joining = False
                recovery.reports.setdefault(
                    member.rank,
                    Settled(
                        member_id=member.member_id,
                        generation=recovery.job.generation,
                        state="ready",
                        step=recovery.job.step,
                    ),
                )
        progress(recovery, now)

    monkeypatch.setattr(Recovery, "progress", hasty)
    assert catch(World, frozenset({"resumed_together"}))


def test_saving_without_comparing_the_copies() -> None:
    class Trusting(SimWorker):
        """A worker that saves its state without a comparison."""

        def _compare(self, then: Callable[[], None]) -> None:
            then()

    class Mutant(World):
        worker_type = Trusting

    assert catch(Mutant, frozenset({"sealed_was_compared"}))


def test_giving_without_comparing_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def vouching_for_anything(holding: SimLayouts, differs: bool) -> CopyDigest:
        return CopyDigest(str(holding._owner.rank), "w", 7 + differs)

    monkeypatch.setattr(SimLayouts, "copy", vouching_for_anything)
    assert catch(World, frozenset({"sealed_was_compared", "given_was_compared"}))


def test_keeping_it_secret_that_a_layout_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    ballot = LayoutAgreement.ballot

    def secretive(told: LayoutAgreement, said: Ballot, generation: Generation, have: LayoutVersion) -> Ballot:
        return msgspec.structs.replace(ballot(told, said, generation, have), moved=False)

    monkeypatch.setattr(LayoutAgreement, "ballot", secretive)
    assert catch(World) == {"saved_by_one_catalogue"}


def test_taking_a_catalogue_that_never_came_for_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    ballot = LayoutAgreement.ballot

    def confident(told: LayoutAgreement, said: Ballot, generation: Generation, have: LayoutVersion) -> Ballot:
        return ballot(told, said, generation, told.version)

    monkeypatch.setattr(LayoutAgreement, "ballot", confident)
    assert catch(World) == {"saved_by_one_catalogue"}


def test_telling_a_change_under_a_version_that_others_know(monkeypatch: pytest.MonkeyPatch) -> None:
    note = LayoutAgreement.note

    def eager(told: LayoutAgreement, layout: Layout, generation: Generation) -> LayoutAnnouncement | None:
        return note(told, layout, generation) and LayoutAnnouncement(told.version, layout)

    monkeypatch.setattr(LayoutAgreement, "note", eager)
    assert catch(World) == {"one_catalogue_per_version"}


def test_a_catalogue_of_several_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(roster: Roster, world_size: int) -> LayoutVersion:
        versions = [told.version for told in roster.layouts.values()]
        return max(versions) if len(versions) == world_size else NO_VERSION

    monkeypatch.setattr(Roster, "agreed", careless)
    assert catch(World) == {"one_catalogue_per_version"}


def test_a_newcomer_that_claims_the_version_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    inherit = LayoutAgreement.inherit

    def claiming(told: LayoutAgreement, version: LayoutVersion, layout: Layout) -> LayoutAnnouncement:
        telling = inherit(told, version, layout)
        told._under = layout
        return telling

    monkeypatch.setattr(LayoutAgreement, "inherit", claiming)
    assert catch(World) == {"saved_by_one_catalogue"}


def test_trusting_the_living_after_their_copies_differed(monkeypatch: pytest.MonkeyPatch) -> None:
    situation = Survey.situation

    def trusting(
        survey: Survey, decided: Decision, answers: Mapping[int, Settled], faults: Sequence[Fault]
    ) -> Situation:
        survey.job.unequal = ""
        return situation(survey, decided, answers, faults)

    monkeypatch.setattr(Survey, "situation", trusting)
    # With four holders, the rank with the wrong copy is killed, and would be replaced.
    with pytest.raises(Violation) as caught:
        run_sim(RANKS, 10, (SimFault(kind="flip", at_s=0.75, rank=2),), shards=1)
    assert caught.value.name == "given_was_compared"


def test_a_spare_that_is_called_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Spares.take

    def keeping(spares: Spares, seat: Assignment) -> MemberId | None:
        living = dict(spares.living)
        taken = take(spares, seat)
        spares.living = living
        return taken

    monkeypatch.setattr(Spares, "take", keeping)
    assert catch(World, frozenset({"a_spare_is_called_once"}))


def test_a_spare_whose_words_leave_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "is_spare", lambda member_id: False)
    monkeypatch.setattr(Agent, "check", lambda agent: None)
    assert catch(World, frozenset({"a_spare_is_nobody"}))


def test_a_spare_that_trains_on_what_it_was_built_with() -> None:
    class Vain(SimWorker):
        """A newcomer that joins with its own parameters, as if it had received a state."""

        def _receive(self, order: Receive) -> None:
            super()._receive(order)
            if self.opened and self.script.joining:
                self.applied = 0

    class Mutant(World):
        worker_type = Vain

    assert catch(Mutant, frozenset({"updates_what_it_holds", "sealed_is_one_step"}))


def test_a_state_that_does_not_wait_for_the_code_after_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptMachine, "awaits", lambda script, *, replaces: False)
    monkeypatch.setattr(ScriptMachine, "may_hold_other_weights", False)
    assert catch(World, frozenset({"sealed_is_one_step", "updates_what_it_holds", "memory_is_one_step"}))


def test_a_state_that_does_not_wait_for_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OrderBook, "_is_at_step", lambda book, order, at: True)
    assert catch(World, frozenset({"sealed_is_one_step", "updates_what_it_holds"}))


def test_an_order_to_continue_that_counts_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    built = WorkerMachine._built

    def keeping(machine: WorkerMachine, event: GroupsBuilt, found: list[Command]) -> None:
        order = machine._resume
        built(machine, event, found)
        machine._resume = order

    monkeypatch.setattr(WorkerMachine, "_built", keeping)
    with pytest.raises(InternalError, match=r"'re(try|wind)' does not fit"):
        catch()
