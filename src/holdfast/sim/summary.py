"""A batch of simulated runs and the summary of their results."""

from __future__ import annotations

import random

import msgspec

from holdfast.sim.elections import ElectionSearch
from holdfast.sim.faults import SimFault, random_faults
from holdfast.sim.hosts.host_schedules import hosts_breach, hosts_case
from holdfast.sim.invariants import Violation
from holdfast.sim.model_checker import search
from holdfast.sim.world import run_sim

HORIZON_S = 2.0
FAULTS_MAX = 4
HOSTS_EVERY = 4


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The summary of a batch of simulated runs.

    Attributes:
        runs: number of seeds.
        virtual_s: sum of the virtual seconds of all runs.
        in_doubt_forward: number of decisions after which ranks in doubt apply the update.
        in_doubt_back: number of decisions after which ranks in doubt discard the update.
        searched_states: number of states that the exhaustive search of one step has visited.
        election_states: number of states that the exhaustive search of elections has visited.
        violations: broken invariants, each as "seed N: check: description". A correct protocol has none.
    """

    runs: int
    events: int
    virtual_s: float
    recoveries: int
    in_doubt_forward: int
    in_doubt_back: int
    searched_states: int
    election_states: int
    violations: tuple[str, ...]


def faults_of(ranks: int, seed: int) -> tuple[SimFault, ...]:
    """Return one to four random faults for a run of ``ranks`` ranks. The same seed gives the same faults."""
    rng = random.Random(seed)
    return random_faults(rng, ranks, HORIZON_S, rng.randint(1, FAULTS_MAX))


def summarize(ranks: int, seeds: range) -> Summary:
    """Simulate one run of ``ranks`` ranks per seed, and return a summary.

    Each run has one to four random faults. For every fourth seed a run on several hosts is also simulated. The orders
    of events around one step and in two elections are searched exhaustively.
    """
    events = recoveries = forward = back = states = elections = 0
    virtual_s = 0.0
    violations: list[str] = []
    for seed in seeds:
        try:
            result = run_sim(ranks, seed, faults_of(ranks, seed))
        except Violation as violation:
            violations.append(f"seed {seed}: {violation}"[:500])
            continue
        events += result.events
        virtual_s += result.time_s
        recoveries += result.recovered
        forward += result.forward
        if seed % HOSTS_EVERY == 0 and (breach := hosts_breach(seed, hosts_case(seed))):
            violations.append(f"seed {seed} on several hosts: {breach}"[:500])
        back += result.back
    try:
        states = search(ranks=3, deaths=2).states
        elections = ElectionSearch(3, (1, 2), 0, announced=False).run().states
    except Violation as violation:
        violations.append(f"search: {violation}"[:500])
    return Summary(
        runs=len(seeds),
        events=events,
        virtual_s=round(virtual_s, 3),
        recoveries=recoveries,
        in_doubt_forward=forward,
        in_doubt_back=back,
        searched_states=states,
        election_states=elections,
        violations=tuple(violations),
    )
