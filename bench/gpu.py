"""Holdfast on one GPU beside plain torchrun: cost per step, device memory, and kill -9 to the next committed step.

    python bench/gpu.py [--pairs 4] [--steps 60] [--shape 124m] [--kills 3] [--cpu]

Cost: one rank, NCCL, a GPT in bfloat16. Plain, plain again (the noise), Holdfast, and Holdfast with a memory tier that
copies the state every ``TIER_EVERY`` steps run in turn, and the order is reversed every time. The first ``WARM_UP``
steps do not count.
Recovery: four ranks share the device, over gloo, with a GPT of 25 million parameters. A rank is killed in its update.
torchrun starts all ranks again and loads the checkpoint of every tenth step; Holdfast replaces the rank, without a
spare and with one. ``--cpu`` tries the bench with a tiny model. Prints markdown: n, median, p90 and the
share that met the goal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import median

from lost_shards import COST_GOAL, row

from holdfast import event_log
from holdfast.drill.trace import read_trace

JOB = str(Path(__file__).with_name("gpu_job.py").resolve())
WARM_UP = 10
RANKS = 4
KILL_STEPS = 40
KILL_AT = 25
SAVE_EVERY = 10
LIMIT_S = 240.0
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
HOLDFAST = ("-m", "holdfast", "run", "--nproc-per-node")
TIER_EVERY = 20


def run(
    place: Path, ranks: int, launcher: tuple[str, ...], *arguments: str, flags: tuple[str, ...] = ()
) -> None:
    """Run one job of ``ranks`` ranks to its end in the new directory ``place``."""
    place.mkdir()
    bare = ("--bare",) if launcher is TORCHRUN else ()
    command = [sys.executable, *launcher, str(ranks), *flags, JOB, "--result", str(place), *bare, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(
        command, cwd=place, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)}: exit {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )


def figures(place: Path, rank: int = 0) -> dict[str, int | str]:
    """Return what a rank has written at its end."""
    return json.loads((place / f"rank-{rank}.json").read_text())  # type: ignore[no-any-return]


def step_ms(place: Path) -> float:
    """Return the mean time of a step of rank 0, in milliseconds. The host may be ahead of the device in between."""
    pairs = read_trace(place / "rank-00000.trace")
    begun_ns = next(moment for step, moment in pairs if step == WARM_UP)
    return (int(figures(place)["ended_ns"]) - begun_ns) / 1e6 / (pairs[-1][0] - WARM_UP)


def stall_ms(place: Path) -> float:
    """Return by how many milliseconds the longest step of rank 0 was longer than the median step."""
    moments = [moment for step, moment in read_trace(place / "rank-00000.trace") if step >= WARM_UP]
    steps = [(after - before) / 1e6 for before, after in pairwise(moments)]
    return max(steps) - median(steps)


def cost(base: Path, pairs: int, steps: int, job: tuple[str, ...]) -> list[str]:
    """Return the rows about the cost per step and the device memory."""
    tier = ("--memory-every", str(TIER_EVERY))
    kinds: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
        "plain": (TORCHRUN, ()), "again": (TORCHRUN, ()), "holdfast": (HOLDFAST, ()), "tier": (HOLDFAST, tier)
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in kinds}
    ends: dict[str, list[dict[str, int | str]]] = {name: [] for name in kinds}
    stalls: list[float] = []
    for number in range(pairs):
        for name in list(kinds)[:: 1 if number % 2 == 0 else -1]:
            place = base / f"{name}-{number}"
            launcher, flags = kinds[name]
            run(place, 1, launcher, "--steps", str(steps), *job, flags=flags)
            times[name].append(step_ms(place))
            ends[name].append(figures(place))
            stalls += [stall_ms(place)] if flags else []
            print(f"pair {number}: {name} {times[name][-1]:.2f} ms", file=sys.stderr, flush=True)
    digests = {str(end["digest"]) for all_ends in ends.values() for end in all_ends}
    peaks = {name: max(int(end["peak_bytes"]) for end in ends[name]) / 2**20 for name in kinds}
    against = {name: [a / b for a, b in zip(times[name], times["plain"], strict=True)] for name in kinds}
    return [
        row("plain torchrun, ms per step", times["plain"]),
        row("Holdfast, ms per step", times["holdfast"]),
        row("Holdfast / plain, goal 1.01", against["holdfast"], COST_GOAL),
        row("plain / plain (noise)", against["again"]),
        row(f"with the memory tier, every {TIER_EVERY} steps / plain", against["tier"]),
        row("longest step with the memory tier, ms more than the median step", stalls),
        f"{len(digests)} digest(s) of the weights in {len(kinds) * pairs} runs, due 1; peak of device memory, MiB: "
        + ", ".join(f"{name} {peak:.0f}" for name, peak in peaks.items()),
    ]


def next_step_s(place: Path) -> float:
    """Return the seconds from the death to the end of the step after the one in which it happened."""
    died_ns = int((place / "died").read_text())
    pairs = read_trace(place / "rank-00000.trace")
    return (min(moment for step, moment in pairs if moment > died_ns and step > KILL_AT + 1) - died_ns) / 1e9


def recovery(base: Path, kills: int, job: tuple[str, ...]) -> list[str]:
    """Return the rows about the time from a kill to the next step."""
    job = (*job, "--backend", "gloo", "--steps", str(KILL_STEPS))
    whole = base / "undisturbed"
    run(whole, RANKS, HOLDFAST, *job)
    due = [figures(whole, rank)["digest"] for rank in range(RANKS)]
    kinds = {
        "torchrun": (TORCHRUN, ("--max-restarts", "3"), ("--save-every", str(SAVE_EVERY))),
        "Holdfast": (HOLDFAST, (), ()),
        "Holdfast with a spare": (HOLDFAST, ("--spares", "1"), ()),
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    lost, wrong = 0, Counter[str]()
    for number in range(kills):
        victim = str((number + 1) % RANKS)
        for name, (launcher, flags, more) in list(kinds.items())[:: 1 if number % 2 == 0 else -1]:
            place = base / f"kill-{name.replace(' ', '-')}-{number}"
            run(place, RANKS, launcher, *job, *more, "--victim", victim, "--die", str(KILL_AT), flags=flags)
            found[name].append(next_step_s(place))
            wrong[name] += [figures(place, rank)["digest"] for rank in range(RANKS)] != due
            for log in place.glob("runs/*/events.jsonl"):
                lost += sum(e.data["steps_lost"] for e in event_log.read(log).events if e.kind == "recovered")
            print(f"kill {number}: {name} {found[name][-1]:.2f} s", file=sys.stderr, flush=True)
    again = KILL_AT % SAVE_EVERY
    return [
        *(row(f"{name}, s", values) for name, values in found.items()),
        row(
            "torchrun / Holdfast", [a / b for a, b in zip(found["torchrun"], found["Holdfast"], strict=True)]
        ),
        f"steps lost: {lost} with Holdfast, {again} per kill with torchrun; "
        f"runs of {kills} with other bits: " + ", ".join(f"{name} {wrong[name]}" for name in kinds),
    ]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--shape", default="124m")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    tiny = ("--device", "cpu", "--shape", "tiny")
    with tempfile.TemporaryDirectory(prefix="holdfast-gpu-") as directory:
        base = Path(directory)
        print("| one GPU | n | median | p90 | met the goal |\n|---|---|---|---|---|", flush=True)
        if given.pairs:
            one = (*tiny, "--backend", "gloo") if given.cpu else ("--shape", given.shape)
            print("\n".join(cost(base, given.pairs, given.steps, one)), flush=True)
        if given.kills:
            print(
                "\n".join(recovery(base, given.kills, tiny if given.cpu else ("--shape", "25m"))), flush=True
            )


if __name__ == "__main__":
    main()
