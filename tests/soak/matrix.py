"""Faults in all combinations of phase, victim, kind and layout, and many kills at random moments.

``python -m tests.soak.matrix [--layout ddp] [--kind kill] [--run-dir DIR]``
``python -m tests.soak.matrix --soak 50``

Each layout has one undisturbed run. A disturbed run has several faults, each after the recovery from the fault before
it. Results are compared bit for bit. The exit code is 0 only if every fault was injected, no step was lost, and the
bits are equal.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from holdfast.drill.exercise import LAYOUTS as ALL_LAYOUTS
from holdfast.drill.exercise import Drill, DrillVerdict, require_torch, small
from holdfast.drill.fault_spec import DEATHS, DOUBT, MOMENT, STEP_PHASES, UNVOTED, InjectedFault, Kind
from holdfast.text import plural

NPROC = 4
PHASES = (*STEP_PHASES, "save")
"""The phases that the training of the drill has."""
PAIRED = ("ddp", "hsdp")
LAYOUTS = (*PAIRED, "fsdp")
VICTIMS = (0, 2)
SPACING = (
    12  # steps between two faults: a job whose survivors live is soon fast, and must not pass the next fault
)
SAVE_EVERY = 4
SOAK_KILLS_PER_RUN = 10
Cell = tuple[str, int]
"""A phase and the rank that is the victim."""


def schedule(kind: Kind, cells: Sequence[Cell]) -> list[InjectedFault]:
    """Return one fault per cell, ``SPACING`` steps apart."""
    return [InjectedFault(kind, (rank,), SPACING * (i + 1), phase) for i, (phase, rank) in enumerate(cells)]


def pairwise(layout: str) -> list[InjectedFault]:
    """Return the faults of one layout for pairwise coverage: half of the combinations of phase and kind.

    Together with the other layout's half, every pair of values of two dimensions (phase, kind, victim, layout) occurs.
    """
    chosen = [
        (kind, phase, VICTIMS[(p // 2 + k) % 2])
        for (p, phase), (k, kind) in product(enumerate(PHASES), enumerate(DEATHS))
        if PAIRED[(p + k) % 2] == layout
    ]
    return [
        InjectedFault(kind, (rank,), SPACING * (i + 1), phase) for i, (kind, phase, rank) in enumerate(chosen)
    ]


def steps_for(faults: int) -> int:
    """Return the number of steps that a run needs for this number of faults."""
    return SPACING * (faults + 4)


def drill_for(base: Path, layout: str, steps: int, seed: int) -> Drill:
    """Return a drill on the tiny model that prints no progress."""
    exercise = small(layout, steps, SAVE_EVERY, NPROC)
    return Drill(base / layout, exercise, seed, lambda _name, _step, _done: None)


def rows(verdict: DrillVerdict) -> Iterator[str]:
    """Yield one line per injected fault."""
    for fault in verdict.faults:
        resumed = "never" if fault.resumed_s is None else f"{fault.resumed_s:6.2f} s"
        place = f"{fault.kind:9}  {fault.phase:9}  rank {fault.rank}  step {fault.step:4}"
        yield f"  {place}  {resumed}  {'redone' if fault.redone else 'lost'} {fault.steps_lost}"


def summary(name: str, verdict: DrillVerdict) -> str:
    """Return one line about a run."""
    facts = [
        plural(len(verdict.faults), "fault"),
        f"weights {'identical' if verdict.identical else 'DIFFERENT'}",
        f"{plural(verdict.steps_lost, 'step')} lost",
        *([f"{verdict.steps_redone} redone from memory"] if verdict.steps_redone else []),
        f"in doubt {verdict.decisions_forward} forward {verdict.decisions_back} back",
        f"{verdict.disturbed_s:.0f} s",
        *(f"not injected: {missed}" for missed in verdict.missed),
        "PASSED" if verdict.passed else f"FAILED (code {verdict.code}) {verdict.reason} {verdict.directory}",
    ]
    return f"{name}: {', '.join(facts)}"


def matrix(base: Path, layouts: Sequence[str], kinds: Sequence[Kind], seed: int) -> bool:
    """Run every cell of the chosen layouts and kinds. Return True if all passed."""
    cells = list(product(PHASES, VICTIMS))
    good = True
    for layout in layouts:
        drill = drill_for(base, layout, steps_for(len(cells)), seed)
        for kind in kinds:
            verdict = drill.disturbed(kind, schedule(kind, cells))
            print("\n".join([summary(f"{layout} {kind}", verdict), *rows(verdict)]), flush=True)
            good &= verdict.passed and len(verdict.faults) == len(cells)
    return good


def soak(base: Path, layouts: Sequence[str], kills: int, seed: int) -> bool:
    """Kill random ranks ``kills`` times at random moments, and some around the vote. Return True if all runs passed.

    In-doubt decisions of both directions must have occurred. Otherwise nothing was proved about them.
    """
    per_run = min(SOAK_KILLS_PER_RUN, kills)
    steps = steps_for(len(random_faults(per_run, seed)))
    drills = [drill_for(base, layout, steps, seed) for layout in layouts]
    forward = back = done = faults = 0
    good = True
    for number in range(-(-kills // per_run)):
        drill = drills[number % len(drills)]
        drill.seed = seed + number
        planned = random_faults(min(per_run, kills - done), drill.seed)
        verdict = drill.disturbed(f"soak-{number:03d}", planned)
        print(summary(f"{layouts[number % len(layouts)]} soak {number}", verdict), flush=True)
        forward, back = forward + verdict.decisions_forward, back + verdict.decisions_back
        done += sum(fault.phase == MOMENT for fault in planned)
        faults += len(verdict.faults)
        good &= verdict.passed
    print(
        f"{plural(done, 'kill')} at random moments, {faults} in all; in-doubt decisions: {forward} forward, {back} back"
    )
    return good and forward > 0 and back > 0


def random_faults(kills: int, seed: int) -> list[InjectedFault]:
    """Return kills of random ranks: ``kills`` at random moments, and additional ones around the vote.

    A fifth of ``kills`` comes before the end of the vote: the other ranks are in doubt and go back. Another fifth comes
    after the end: ranks that have not received the result go forward.
    """
    draw = random.Random(seed)
    phases = [MOMENT] * kills + [DOUBT, UNVOTED] * max(1, kills // 5)
    draw.shuffle(phases)
    return [
        InjectedFault("kill", (draw.randrange(NPROC),), SPACING * (i + 1), phase)
        for i, phase in enumerate(phases)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    parser = argparse.ArgumentParser(description="prove the recovery, cell by cell")
    parser.add_argument("--layout", choices=ALL_LAYOUTS, action="append")
    parser.add_argument("--kind", choices=DEATHS, action="append")
    parser.add_argument("--soak", type=int, default=0, metavar="KILLS")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run-dir", type=Path, default=Path("runs"))
    given = parser.parse_args(argv)
    require_torch()
    base = given.run_dir / time.strftime("matrix-%Y%m%d-%H%M%S")
    layouts, started_s = given.layout or LAYOUTS, time.monotonic()
    if given.soak:
        good = soak(base, layouts, given.soak, given.seed)
    else:
        good = matrix(base, layouts, given.kind or DEATHS, given.seed)
    print(f"{'PASSED' if good else 'FAILED'} in {time.monotonic() - started_s:.0f} s, logs in {base}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
