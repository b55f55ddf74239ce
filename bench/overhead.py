"""Cost of Holdfast per step: the same model under ``holdfast run`` and under plain torchrun, and each part alone.

    python bench/overhead.py [--pairs 5] [--steps 120] [--size 10m] [--digests]

The runs of a pair follow each other, and the order is reversed every time, so that drift of the machine affects both.
A/A compares the plain run with itself: the noise of all ratios. The first ``WARM_UP`` steps do not count, nor do the
steps that start an epoch, where both start loader workers. ``--digests`` compares Holdfast with itself: with the
comparison of state copies at its default (``--verify-every``) and without it. Prints markdown.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from holdfast.drill.model import SIZES
from holdfast.drill.trace import read_trace

NPROC = 4
WARM_UP = 8


def step_ms(command: list[str], place: Path, steps: int, size: str) -> float:
    """Run a job and return the median time of a step of rank 0, in milliseconds."""
    arguments = ["--size", size, "--steps", str(steps), "--trace", str(place)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *command, *arguments], check=True, env=environment, cwd=place.parent,
                   capture_output=True, timeout=900)  # fmt: skip
    pairs = read_trace(place / "rank-00000.trace")
    epoch = SIZES[size].epoch_steps
    times = [
        (after - before) / 1e6
        for (_, before), (step, after) in pairwise(pairs)
        if step > WARM_UP and step % epoch not in (0, 1)
    ]
    return statistics.median(times)


def spread(values: list[float]) -> str:
    """Return min / median / max as text."""
    return f"{min(values):.3f} | {statistics.median(values):.3f} | {max(values):.3f}"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--size", default="10m")
    parser.add_argument("--digests", action="store_true")
    given = parser.parse_args()
    plain = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NPROC),
             str(Path(__file__).with_name("plain.py").resolve())]  # fmt: skip
    run, train = (
        ["-m", "holdfast", "run", "--nproc-per-node", str(NPROC)],
        ["-m", "holdfast.drill.train"],
    )
    commands = {"plain": plain, "again": plain, "holdfast": [*run, *train]}
    name_base, name_other = "plain torchrun", "Holdfast"
    if given.digests:
        never = [*run, "--verify-every", "0", *train]
        commands |= {"plain": never, "again": never}
        name_base, name_other = "copies never compared", "copies compared"
    found: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory:
        for number in range(given.pairs):
            for name in list(commands)[:: 1 if number % 2 == 0 else -1]:
                place = Path(directory) / f"{name}-{number}"
                place.mkdir()
                found[name].append(step_ms(commands[name], place, given.steps, given.size))
                print(f"pair {number}: {name} {found[name][-1]:.1f} ms", file=sys.stderr)
    base = found["plain"]
    print("| step | min | median | max |\n|---|---|---|---|")
    print(f"| {name_base}, ms | {spread(base)} |\n| {name_other}, ms | {spread(found['holdfast'])} |")
    print(
        f"| A/B ratio of the pairs | {spread([a / b for a, b in zip(found['holdfast'], base, strict=True)])} |"
    )
    print(
        f"| A/A ratio of the pairs | {spread([a / b for a, b in zip(found['again'], base, strict=True)])} |"
    )


if __name__ == "__main__":
    main()
