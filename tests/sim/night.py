"""Fresh seeds of the simulator: ``python -m tests.sim.night --runs 1000000``.

Faults are drawn close together, so that most of them meet the recovery that the one before has caused. Every second
seed is a job on several hosts. A schedule that breaks an invariant is shrunk and printed. That of a job on several
hosts is one line for ``tests/sim/found_schedules.jsonl``, whose lines are tests. At the end comes a table: how often
each fault struck in each phase of the job.

The first and the last line name the code by a digest of its sources. The runs of several nights add up if their digests
are equal and their seeds are not.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from holdfast.sim.faults import FaultKind, SimFault, random_faults
from holdfast.sim.hosts.host_schedules import FoundSchedule, hosts_breach, hosts_case, shrunk_hosts_case
from holdfast.sim.hosts.hosts_world import HostsCase, run_hosts
from holdfast.sim.invariants import Violation
from holdfast.sim.world import run_sim

RUNS_PER_TASK = 200
HOSTS_EVERY = 2
PROGRESS_S = 30.0
CLUSTERED: tuple[FaultKind, ...] = (
    *("kill", "kill", "kill", "controller", "controller", "agent", "raise", "glitch", "exit", "stop"),
    *("save_error", "ask_exit", "groups"),
)
Coverage = Counter[tuple[str, str]]


class Case(NamedTuple):
    """One schedule. ``memory``: steps between states in memory; 0: none. ``shards``: number of distinct boxes."""

    ranks: int
    memory: int
    shards: int
    faults: tuple[SimFault, ...]


class Found(NamedTuple):
    """One line for each seed that breaks an invariant, and the number of faults by kind and phase."""

    lines: list[str]
    coverage: Coverage


def case_of(seed: int) -> Case:
    """Return the schedule of a seed. In two of three schedules, the faults are close together."""
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
    """Return the invariant that a schedule breaks, with what was observed. Return an empty text if it breaks none."""
    try:
        run_sim(case.ranks, seed, case.faults, memory=case.memory, shards=case.shards)
    except Violation as violation:
        return str(violation)
    return ""


def shrunk(seed: int, case: Case) -> Case:
    """Return the schedule without the faults that the breach does not need."""
    name = breach(seed, case).partition(":")[0]
    for fault in case.faults:
        fewer = case._replace(faults=tuple(f for f in case.faults if f is not fault))
        if breach(seed, fewer).partition(":")[0] == name:
            return shrunk(seed, fewer)
    return case


def run_one(seed: int, coverage: Coverage) -> str:
    """Simulate a job on one or two nodes. Return a line about a breach, or an empty text."""
    case = case_of(seed)
    try:
        result = run_sim(case.ranks, seed, case.faults, memory=case.memory, shards=case.shards)
    except Violation:
        case = shrunk(seed, case)
        faults = msgspec.json.encode(case.faults).decode()
        return (
            f"VIOLATION seed {seed}, {case.ranks} ranks, memory {case.memory}, shards {case.shards}: "
            f"{breach(seed, case)[:300]}; faults {faults}"
        )
    coverage.update(result.coverage)
    return ""


def run_one_on_hosts(seed: int, coverage: Coverage) -> str:
    """Simulate a job on several hosts. Return a line about a breach, or an empty text."""
    case: HostsCase = hosts_case(seed)
    try:
        coverage.update(run_hosts(seed, case).coverage)
    except Violation as violation:
        found = FoundSchedule(seed=seed, broke=violation.name, case=shrunk_hosts_case(seed, case))
        seen = hosts_breach(seed, found.case)[:300]
        return f"VIOLATION {seen}; the line of its test:\n{msgspec.json.encode(found).decode()}"
    return ""


def run(first_seed: int, runs: int) -> Found:
    """Simulate ``runs`` seeds from ``first_seed`` on. An exception in a run is reported as a breach."""
    lines, coverage = list[str](), Coverage()
    for seed in range(first_seed, first_seed + runs):
        one = run_one if seed % HOSTS_EVERY else run_one_on_hosts
        try:
            line = one(seed, coverage)
        except Exception:  # of a state machine, or of the simulator; the other seeds are still run
            line = f"ERROR seed {seed}:\n{traceback.format_exc()}"
        if line:
            lines.append(line)
    return Found(lines, coverage)


def table(coverage: Coverage) -> str:
    """Return the coverage as a table with one row per kind of fault and one column per phase."""
    phases = sorted({phase for _, phase in coverage})
    kinds = sorted({kind for kind, _ in coverage})
    wide = max([len(kind) for kind in kinds], default=0)
    rows = [" " * wide + "".join(f" {phase:>10}" for phase in phases)]
    rows += [
        f"{kind:<{wide}}" + "".join(f" {coverage[kind, phase]:>10}" for phase in phases) for kind in kinds
    ]
    return "\n".join(rows)


def code_digest() -> str:
    """Return a digest of the sources that the runs execute: the state machines, the simulator and this file."""
    names = sorted(name for name in sys.modules if f"{name}.".startswith(("holdfast.core.", "holdfast.sim.")))
    files = [Path(sys.modules[name].__file__ or "") for name in names]
    text = b"".join(f"{name}\n".encode() + file.read_bytes() for name, file in zip(names, files, strict=True))
    return hashlib.sha256(text + Path(__file__).read_bytes()).hexdigest()[:12]


def _count(given: argparse.Namespace, first: int) -> int:
    """Return the number of runs of the task that begins with seed ``first``."""
    return min(RUNS_PER_TASK, int(given.first_seed) + int(given.runs) - first)


def _task(pool: ProcessPoolExecutor, given: argparse.Namespace, first: int) -> Future[Found]:
    return pool.submit(run, first, _count(given, first))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the seeds that the command line asks for. Return 1 if one of them broke an invariant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1_000_000)
    parser.add_argument("--first-seed", type=int, default=int(time.time() // 86400) * 10_000_000)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--minutes", type=float, default=0.0, help="end after this; 0: after all runs")
    given = parser.parse_args(arguments)
    code = code_digest()
    print(f"up to {given.runs} runs from seed {given.first_seed} of the code {code}", flush=True)
    begun_s = told_s = time.monotonic()
    end_s = begun_s + 60 * given.minutes if given.minutes else float("inf")
    firsts = iter(range(given.first_seed, given.first_seed + given.runs, RUNS_PER_TASK))
    failed = done = 0
    coverage = Coverage()
    with ProcessPoolExecutor(given.processes) as pool:
        running = {_task(pool, given, first): first for first in islice(firsts, given.processes)}
        while running:
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for task in ended:
                first, found = running.pop(task), task.result()
                done += _count(given, first)
                failed += len(found.lines)
                coverage += found.coverage
                if found.lines:
                    print("\n".join(found.lines), flush=True)
            now_s = time.monotonic()
            if now_s < end_s:
                running |= {_task(pool, given, first): first for first in islice(firsts, len(ended))}
            if now_s > told_s + PROGRESS_S:
                told_s = now_s
                print(f"{done} runs, {done / (now_s - begun_s):.0f} per second, {failed} failed", flush=True)
    print(table(coverage))
    what = "no invariant was broken" if not failed else f"{failed} seeds broke an invariant"
    print(f"{done} runs of the code {code}: {what}")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
