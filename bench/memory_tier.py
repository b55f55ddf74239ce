"""The memory tier: its cost per step, and the cost of a lost shard with it and without it.

    python bench/memory_tier.py [--pairs 4] [--steps 64] [--size 10m] [--kills 20] [--kills-size tiny]

Runs the drill's model under ``fully_shard`` over four ranks, so that each rank alone holds its shards. Steps: the same
run with the tier off, automatic (``auto``) and at every step, one after the other. The order is reversed every time,
and *again* is off compared with off. Recovery: kills of random ranks at random moments, first with a state in memory at
every step, then with checkpoints on disk alone.
Prints markdown.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from overhead import NPROC, spread, step_ms

from holdfast.drill.exercise import Drill, Exercise
from tests.soak.matrix import random_faults, steps_for

RUNS = {"off": "0", "again": "0", "auto": "auto", "every step": "1"}
KILLS_PER_RUN = 10
SAVE_EVERY = 5


def costs(place: Path, pairs: int, steps: int, size: str) -> None:
    """Print step times in milliseconds, and their ratios to the run without the tier."""
    found: dict[str, list[float]] = {name: [] for name in RUNS}
    for number in range(pairs):
        for name in list(RUNS)[:: 1 if number % 2 == 0 else -1]:
            here = place / f"{name.replace(' ', '-')}-{number}"
            here.mkdir()
            command = ["-m", "holdfast", "run", "--nproc-per-node", str(NPROC), "--memory-every", RUNS[name],
                       "-m", "holdfast.drill.train", "--layout", "fsdp"]  # fmt: skip
            found[name].append(step_ms(command, here, steps, size))
            print(f"pair {number}: {name} {found[name][-1]:.1f} ms", file=sys.stderr)
    print("| a step, ms | min | median | max |\n|---|---|---|---|")
    for name, times in found.items():
        print(f"| {name} | {spread(times)} |")
    for name in list(RUNS)[1:]:
        ratios = [a / b for a, b in zip(found[name], found["off"], strict=True)]
        print(f"| {name} / off | {spread(ratios)} |")


def recoveries(place: Path, kills: int, size: str) -> None:
    """Print the seconds from a kill to the first committed step at full size, and the steps that were done again."""
    print(
        "\n| after a kill | runs | to the next step, s: min | median | max | steps done again: median | max |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, every in (("a state in memory at every step", "1"), ("checkpoints on disk alone", "0")):
        times: list[float] = []
        again: list[int] = []
        identical = 0
        for number in range(-(-kills // KILLS_PER_RUN)):
            faults = [fault for fault in random_faults(KILLS_PER_RUN, number) if fault.phase == "moment"]
            exercise = Exercise.builtin(
                nproc=NPROC, size=size, layout="fsdp", steps=steps_for(2 * KILLS_PER_RUN), save_every=SAVE_EVERY,
                flags=("--memory-every", every, "--max-restarts", "100"),
            )  # fmt: skip
            drill = Drill(place / f"{every}-{number}", exercise, number, lambda _name, _step, _done: None)
            verdict = drill.disturbed("kills", faults)
            identical += verdict.identical
            times += [fault.resumed_s for fault in verdict.faults if fault.resumed_s is not None]
            again += [fault.steps_lost for fault in verdict.faults]
            print(f"{name}: run {number}, code {verdict.code}, {verdict.reason}", file=sys.stderr)
        runs = f"{len(times)} kills, {identical} runs identical"
        print(f"| {name} | {runs} | {spread(times)} | {statistics.median(again):g} | {max(again)} |")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--size", default="10m")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--kills-size", default="tiny")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory:
        if given.pairs:
            costs(Path(directory), given.pairs, given.steps, given.size)
        if given.kills:
            recoveries(Path(directory), given.kills, given.kills_size)


if __name__ == "__main__":
    main()
