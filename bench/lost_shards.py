"""Pure FSDP with the gradient log, compared with DDP after a lost rank, and with FSDP without the log per step.

    python bench/lost_shards.py [--rounds 20] [--pairs 6] [--steps 96] [--size 10m]

Recovery: each round kills a random rank at a random moment, once under DDP and once under ``fully_shard`` with
    ``--memory-every 8``. Both get the same draw, and the order is reversed every time. The goal: no step is done again,
    and the next step comes within 1.3 times of DDP's time. Cost: a run with the log and a run without memory tier, in
    turns. The goal is 1 %.
Prints markdown.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from overhead import NPROC, step_ms
from recovery import MEMORY_EVERY, ours
from rounds import quantile

LAYOUTS = ("ddp", "fsdp")
RECOVERY_GOAL, COST_GOAL = 1.3, 1.01


def row(name: str, values: Sequence[float], goal: float | None = None) -> str:
    """Return n, median, p90 and the share that met the goal, as one line of the table."""
    ordered = sorted(values)
    middle, high = quantile(ordered, 0.5), quantile(ordered, 0.9)
    met = "" if goal is None else f"{sum(value <= goal for value in values)} of {len(values)}"
    return f"| {name} | {len(values)} | {middle:.3f} | {high:.3f} | {met} |"


def recoveries(base: Path, rounds: int, size: str) -> None:
    """Print the seconds from the kill to the next committed step.

    ``recovery.ours`` refuses a run that does a step again.
    """
    found: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
    for layout in LAYOUTS:
        (base / layout).mkdir()
    for number in range(rounds):
        for layout in LAYOUTS[:: 1 if number % 2 else -1]:
            one = ours(base / layout, number, size, 0, random.Random(number), layout)
            found[layout].append(one["resumed"])
        print(f"round {number}: {[found[layout][-1] for layout in LAYOUTS]} s", file=sys.stderr)
    ratios = [fsdp / ddp for ddp, fsdp in zip(found["ddp"], found["fsdp"], strict=True)]
    print(row("DDP: kill -9 to the next step, s", found["ddp"]))
    print(row("FSDP with the log: the same, s", found["fsdp"]))
    print(row("FSDP / DDP, goal 1.3", ratios, RECOVERY_GOAL))


def costs(base: Path, pairs: int, steps: int, size: str) -> None:
    """Print the median step of each run, and the ratio of each pair."""
    ratios: list[float] = []
    for number in range(pairs):
        times: dict[str, float] = {}
        for every in ("0", MEMORY_EVERY)[:: 1 if number % 2 else -1]:
            place = base / f"cost-{number}-{every}"
            place.mkdir()
            command = ["-m", "holdfast", "run", "--nproc-per-node", str(NPROC), "--memory-every", every,
                       "-m", "holdfast.drill.train", "--layout", "fsdp"]  # fmt: skip
            times[every] = step_ms(command, place, steps, size)
        ratios.append(times[MEMORY_EVERY] / times["0"])
        print(f"pair {number}: {times} ms", file=sys.stderr)
    print(row("a step with states and log / without, goal 1.01", ratios, COST_GOAL))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--size", default="10m")
    given = parser.parse_args()
    print("| | n | median | p90 | met the goal |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory:
        if given.rounds:
            recoveries(Path(directory), given.rounds, given.size)
        if given.pairs:
            costs(Path(directory), given.pairs, given.steps, given.size)


if __name__ == "__main__":
    main()
