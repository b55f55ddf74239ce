"""Fresh seeds of the simulator: ``python -m tests.sim.night --runs 1000000``.

Faults are drawn close together, so that most of them meet the recovery that the one before has caused. A schedule that
breaks an invariant is shrunk, and printed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import msgspec

from holdfast.sim.faults import FaultKind, SimFault, random_faults
from holdfast.sim.invariants import Violation
from holdfast.sim.world import run_sim

RUNS_PER_TASK = 200
CLUSTERED: tuple[FaultKind, ...] = (
    *("kill", "kill", "kill", "controller", "controller", "agent", "raise", "glitch", "exit", "stop"),
    *("save_error", "ask_exit"),
)


class Case(NamedTuple):
    """One schedule. ``memory``: steps between states in memory, 0: none; ``shards``: kinds of ranks."""

    ranks: int
    memory: int
    shards: int
    faults: tuple[SimFault, ...]


def case_of(seed: int) -> Case:
    """The schedule of a seed: two of three are clustered."""
    rng = random.Random(seed)
    ranks, memory = rng.choice((2, 2, 3, 4, 6)), rng.choice((0, 0, 2, 3))
    shards = rng.choice((1, 2, ranks))
    if rng.random() < 1 / 3:
        return Case(
            ranks, memory, shards, random_faults(rng, ranks, rng.choice((2.0, 4.0)), rng.randint(1, 8))
        )
    at_s, faults = rng.uniform(0.4, 1.8), list[SimFault]()
    for _ in range(rng.randint(2, 5)):
        faults.append(SimFault(kind=rng.choice(CLUSTERED), at_s=at_s, rank=rng.randrange(ranks)))
        at_s += rng.expovariate(1 / rng.choice((0.03, 0.1, 0.3)))
    return Case(ranks, memory, shards, tuple(faults))


def breach(seed: int, case: Case) -> str:
    """The name of the invariant that this schedule breaks, and what was seen; empty: none."""
    try:
        run_sim(case.ranks, seed, case.faults, memory=case.memory, shards=case.shards)
    except Violation as violation:
        return str(violation)
    return ""


def shrunk(seed: int, case: Case) -> Case:
    """Without the faults that the breach does not need."""
    name = breach(seed, case).partition(":")[0]
    for fault in case.faults:
        fewer = case._replace(faults=tuple(f for f in case.faults if f is not fault))
        if breach(seed, fewer).partition(":")[0] == name:
            return shrunk(seed, fewer)
    return case


def run(first_seed: int, runs: int) -> list[str]:
    """A line for each seed that breaks an invariant."""
    found = []
    for seed in range(first_seed, first_seed + runs):
        if breach(seed, case_of(seed)):
            case = shrunk(seed, case_of(seed))
            faults = msgspec.json.encode(case.faults).decode()
            found.append(
                f"VIOLATION seed {seed}, {case.ranks} ranks, memory {case.memory}, shards {case.shards}: "
                f"{breach(seed, case)[:300]}; faults {faults}"
            )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """1 when a seed has broken an invariant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1_000_000)
    parser.add_argument("--first-seed", type=int, default=int(time.time() // 86400) * 10_000_000)
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args(arguments)
    firsts = range(given.first_seed, given.first_seed + given.runs, RUNS_PER_TASK)
    counts = [min(RUNS_PER_TASK, given.first_seed + given.runs - first) for first in firsts]
    print(f"{given.runs} runs from seed {given.first_seed}", flush=True)
    failed = 0
    with ProcessPoolExecutor(given.processes) as pool:
        for lines in pool.map(run, firsts, counts):
            failed += len(lines)
            if lines:
                print("\n".join(lines), flush=True)
    print("no invariant was broken" if not failed else f"{failed} seeds broke an invariant")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
