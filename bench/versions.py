"""Holdfast on several versions of PyTorch, in turn: recovery from kill -9, and the cost of a step.

    python bench/versions.py --python .venv-2.13/bin/python --python .venv-2.15/bin/python [--rounds 10] [--size 10m]

Each round runs, on each version, one job in which a random rank is killed at a random moment (``bench/recovery.py``,
the same draw for all versions). It also runs one pair of jobs without faults, plain torchrun and Holdfast
(``bench/overhead.py``). The order of the versions is reversed every time. Prints markdown. Ratios are against the first
version.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import overhead
import recovery
from rounds import quantile

KEPT = {"resumed": "kill -9 to the next committed step, s", "freed": "last survivor out of its collective, s"}
STEP = "a step under Holdfast / under torchrun"
STEPS = 80


def measure(seed: int, size: str) -> dict[str, float]:
    """Run one round on the version of this process. Return the figures by name."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory:
        base = Path(directory)
        found = recovery.ours(base, seed, size, 0, random.Random(seed))
        train = [
            "-m",
            "holdfast",
            "run",
            "--nproc-per-node",
            str(overhead.NPROC),
            "-m",
            "holdfast.drill.train",
        ]
        plain = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(overhead.NPROC),
                 str(Path(overhead.__file__).with_name("plain.py").resolve())]  # fmt: skip
        times: dict[str, float] = {}
        for name, command in (("plain", plain), ("holdfast", train))[:: 1 if seed % 2 else -1]:
            (base / name).mkdir()
            times[name] = overhead.step_ms(command, base / name, STEPS, size)
    return {
        **{name: found[name] for name in KEPT if name in found},
        "step": times["holdfast"] / times["plain"],
    }


def show(found: dict[str, list[dict[str, float]]]) -> None:
    """Print one line for each figure and version."""
    print("| figure | torch | n | p50 | p90 | p50 against the first |\n|---|---|---|---|---|---|")
    for key, title in (*KEPT.items(), ("step", STEP)):
        base = 0.0
        for version, rounds in found.items():
            values = [each[key] for each in rounds if key in each]
            if not values:
                continue
            middle = quantile(values, 0.5)
            base = base or middle
            p90 = quantile(values, 0.9)
            print(f"| {title} | {version} | {len(values)} | {middle:.3f} | {p90:.3f} | {middle / base:.2f} |")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", action="append", default=[], help="of an environment with Holdfast")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--size", default="10m")
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.seed:
        print(json.dumps(measure(given.seed, given.size)))
        return
    names = [
        subprocess.run(
            [python, "-c", "import torch; print(torch.__version__)"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for python in given.python
    ]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(1, given.rounds + 1):
        pairs = list(zip(names, given.python, strict=True))
        for name, python in pairs[:: 1 if number % 2 else -1]:
            command = [python, __file__, "--seed", str(number), "--size", given.size]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"round {number}, torch {name}: {found[name][-1]}", file=sys.stderr)
    show(found)


if __name__ == "__main__":
    main()
