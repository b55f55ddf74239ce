"""Jobs on several hosts, on a virtual clock: seeds with lost hosts, partitions, clocks and disks, and mutants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec
import pytest

import holdfast.core.agent as agent_module
import holdfast.core.job.job_state as job_state_module
from holdfast.core.config import Config
from holdfast.core.election import Election
from holdfast.core.ids import NodeId
from holdfast.core.job.log_replay import ReplayedState
from holdfast.core.job.membership import Member
from holdfast.core.job.shutdown import Shutdown
from holdfast.core.protocol.messages import Command, ExitOrder, JoinAsked, Joined, Message
from holdfast.core.protocol.peer_messages import LogHeld
from holdfast.exit_codes import Exit
from holdfast.sim.faults import SimFault
from holdfast.sim.hosts.host_faults import KINDS, HostFault, HostFaultKind
from holdfast.sim.hosts.host_schedules import hosts_case
from holdfast.sim.hosts.hosts_world import HostsCase, HostsResult, HostsWorld, run_hosts, run_requeued
from holdfast.sim.hosts.sim_disk import SimDisk
from holdfast.sim.invariants import Violation

SEEDS = 60
EXPECTED = {Exit.OK, Exit.REQUEUE, Exit.UNSAVED}


def kinds(result: HostsResult) -> list[str]:
    """Return the kinds of its records."""
    return [record.kind for record in result.records]


def test_seeds_with_every_kind_of_fault_keep_every_invariant() -> None:
    results = [run_hosts(seed, hosts_case(seed)) for seed in range(SEEDS)]
    assert {Exit(r.code) for r in results} <= EXPECTED
    assert sum(r.code == Exit.OK for r in results) > 0.75 * SEEDS
    assert all(r.step == 16 for r in results if r.code == Exit.OK)
    coverage = sum((Counter(r.coverage) for r in results), Counter[tuple[str, str]]())
    assert {kind for kind, _ in coverage} >= set(KINDS)
    assert len(coverage) > 50, "pairs of a fault and a phase that it struck in"
    assert sum("node_lost" in kinds(r) for r in results) > 10


def test_a_run_on_hosts_is_a_function_of_its_seed() -> None:
    assert run_hosts(3, hosts_case(3)).digest == run_hosts(3, hosts_case(3)).digest


@pytest.mark.parametrize("kind", sorted(set(KINDS)))
def test_one_fault_of_a_host_while_the_job_trains_ends_no_job(kind: HostFaultKind) -> None:
    """Three hosts hold ranks, and a fourth host is a spare."""
    for node in range(3):
        fault = HostFault(kind=kind, at_s=1.2, node=node, other=(node + 1) % 3, duration_s=3.0)
        result = run_hosts(node, HostsCase(spares=1, host_faults=(fault,)))
        assert (result.code, result.step) == (Exit.OK, 16), f"host {node}: {result.reason}"


def test_a_lost_leader_is_replaced_by_election() -> None:
    fault = HostFault(kind="lose_host", at_s=1.0, node=0)
    result = run_hosts(1, HostsCase(spares=1, host_faults=(fault,)))
    assert (result.code, result.step) == (Exit.OK, 16)
    assert kinds(result).count("run_started") == 2 and "member_lost" in kinds(result)


def test_a_job_shrinks_to_the_hosts_that_are_left_and_grows_again() -> None:
    fault = HostFault(kind="lose_host", at_s=1.0, node=2, duration_s=6.0)
    case = HostsCase(nodes=3, nodes_min=1, until=60, host_faults=(fault,))
    result = run_hosts(0, case)
    sizes = [record.data["ranks"] for record in result.records if record.kind == "resized"]
    assert (result.code, result.step, sizes) == (Exit.OK, 60, [1, 3])


def test_a_job_that_lost_its_majority_is_queued_again_and_shows_each_step() -> None:
    requeued = 0
    for seed in range(6):
        lost = tuple(HostFault(kind="lose_host", at_s=1.3, node=node) for node in (seed % 3, (seed + 1) % 3))
        case = HostsCase(host_faults=lost)
        requeued += run_hosts(seed, case).code == Exit.REQUEUE
        result = run_requeued(seed, case)
        assert (result.code, result.step) in {(Exit.OK, 16), (Exit.UNSAVED, -1)}
    assert requeued > 3


# -------------------------------------------------------------------- mutants


def caught(cases: Iterable[tuple[int, HostsCase]], world: type[HostsWorld] = HostsWorld) -> str:
    """Return the first check that fails in these runs, or an empty text."""
    for seed, case in cases:
        try:
            run_hosts(seed, case, world=world)
        except Violation as violation:
            return violation.name
    return ""


def drawn(count: int) -> list[tuple[int, HostsCase]]:
    """Return the schedules of the first ``count`` seeds."""
    return [(seed, hosts_case(seed)) for seed in range(count)]


def broken_lines() -> list[tuple[int, HostsCase]]:
    """Return schedules in which a host is cut off while a newcomer joins there.

    The cut breaks the connection of its agent, but ends before the host counts as lost.
    """
    kill = SimFault(kind="kill", at_s=1.1, rank=3)
    found = []
    for number in range(12):
        cut = HostFault(kind="split", at_s=1.19 + 0.012 * number, node=1, duration_s=3.5)
        found.append(
            (4 * number, HostsCase(nodes=2, per_node=2, witness=True, faults=(kill,), host_faults=(cut,)))
        )
    return found


def test_the_unmutated_machines_are_not_caught() -> None:
    assert caught(broken_lines()) == ""


def test_forgetting_what_a_newcomer_said_on_a_broken_line(monkeypatch: pytest.MonkeyPatch) -> None:
    words = tuple(kind for kind in agent_module.REMEMBERED if kind not in (JoinAsked, Joined))
    monkeypatch.setattr(agent_module, "REMEMBERED", words)
    monkeypatch.setattr(agent_module, "UPWARD", (*agent_module.UPWARD, JoinAsked, Joined))
    assert caught(broken_lines()) == "no_progress_is_killed"


def test_deciding_about_lost_nodes_in_a_minority() -> None:
    class Mutant(HostsWorld):
        def controller_config(self, disk: SimDisk, node_id: NodeId, term: int, alone: bool) -> Config:
            config = super().controller_config(disk, node_id, term, alone)
            return msgspec.structs.replace(config, voters=())

    cut = HostFault(kind="split", at_s=0.9, node=0, duration_s=15.0)
    case = HostsCase(nodes=3, spares=0, nodes_min=1, until=60, host_faults=(cut,))
    assert caught([(seed, case) for seed in range(3, 8)], Mutant) == "a_majority_decides"


def all_apart(duration_s: float, at_s: float = 1.2) -> tuple[HostFault, ...]:
    """Return the faults that separate three hosts from each other."""
    return tuple(HostFault(kind="split", at_s=at_s, node=node, duration_s=duration_s) for node in (0, 1))


def meets_again() -> list[tuple[int, HostsCase]]:
    """Return schedules in which the network works again while each side is alone, but has not fenced its ranks yet."""
    return [
        (seed, HostsCase(host_faults=all_apart(9.75 + 0.35 * number)))
        for number in range(6)
        for seed in (0, 1)
    ]


def test_a_side_without_a_majority_asks_no_rank_for_the_exit() -> None:
    """Regression: the flag of one rank went through the vote of all ranks once they met again, and ended the job."""
    assert caught(meets_again()) == ""
    for seed, case in meets_again():
        result = run_hosts(seed, case)
        assert result.code in EXPECTED and "exit_agreed" not in kinds(result)


def test_asking_ranks_for_the_exit_in_a_minority(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Shutdown.remind

    def remind(ending: Shutdown, member: Member) -> None:
        job = ending.job
        sound(ending, member)
        if job.config.alone and job.session:
            order = ExitOrder(member_id=member.member_id, generation=job.generation, source=job.exit_source)
            job.send(member, order)

    monkeypatch.setattr(Shutdown, "remind", remind)
    assert caught(meets_again()) == "a_minority_only_saves"


def asked_while_cut_off(until: int = 60) -> list[tuple[int, HostsCase]]:
    """Return schedules in which a user asks for the exit on the leader's host after it was cut off."""
    found = []
    for seed in range(8):
        cut = HostFault(kind="split", at_s=1.2, node=seed % 3, duration_s=3.0 + 0.5 * (seed % 6))
        asked = HostFault(kind="ask_exit_here", at_s=3.0 + 0.4 * (seed % 4), node=seed % 3)
        found.append((seed, HostsCase(spares=1, until=until, host_faults=(cut, asked))))
    return found


def test_an_exit_asked_for_on_a_host_that_is_cut_off_is_that_of_the_job_or_none() -> None:
    for seed, case in asked_while_cut_off():
        result = run_hosts(seed, case)
        asked = "exit_requested" in kinds(result)
        assert (result.code == Exit.OK) is not asked, f"seed {seed}: {result.code}, {result.reason}"


def test_numbers_of_a_side_that_is_alone_as_those_of_the_majority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_state_module, "MEMBERS_PER_TERM", 0)
    cases = []
    for seed in range(12):
        lost = tuple(HostFault(kind="split", at_s=1.2, node=node, duration_s=30.0) for node in (0, 1))
        cases.append((seed, HostsCase(host_faults=lost)))
    assert caught(cases) == "one_decision_per_generation"


def test_a_controller_that_does_not_read_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimDisk, "read", lambda disk, now_s, *, alone: ReplayedState())
    killed = SimFault(kind="controller", at_s=1.2)
    cases = [(seed, HostsCase(faults=(killed,))) for seed in range(4)]
    assert caught(cases) == "no_step_is_lost_unjudged"


def test_mirroring_lines_that_a_host_has_written_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimDisk, "last_place", (0, 0))
    cut = HostFault(kind="split", at_s=1.0, node=0, duration_s=4.0)
    assert caught([(seed, HostsCase(host_faults=(cut,))) for seed in range(4)]) == "a_line_is_logged_once"


def test_electing_a_host_that_has_lost_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two hosts loses power and its unsynced log lines. It returns after the other host has ceased to lead."""
    lost = HostFault(kind="lose_host", at_s=1.2, node=1, duration_s=9.0)
    cases = [(seed, HostsCase(nodes=2, witness=True, host_faults=(lost,))) for seed in range(8)]
    assert caught(cases) == ""

    class Mutant(Election):
        """A mutant that votes for a candidate with any log."""

        def handle(self, now: float, event: Message) -> list[Command]:
            return [] if isinstance(event, LogHeld) else super().handle(now, event)

    monkeypatch.setattr(HostsWorld, "election_type", Mutant)
    assert caught(cases) == "no_vote_for_an_older_log"
