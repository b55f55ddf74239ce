"""Cost of a session per step, timed directly: the drill's model and optimizer, without forward, backward or update.

    holdfast run --nproc-per-node 4 bench/breakdown.py [--steps 400] [--size 10m]

An optimizer without gradients updates nothing. All the time of such a step is therefore spent by Holdfast: seeding, the
copy of the state that forward changes, the broadcast of buffers, the vote, the status page. The vote and the seeding
are also timed alone. In a vote, each rank waits for the slowest one. ``groups.py`` measures the cost of the groups per
collective.
Prints markdown, microseconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch.distributed as dist

import holdfast
from holdfast.drill.training import build, parse, rank, workers
from holdfast.frameworks.torch.comm.backend import fabric
from holdfast.frameworks.torch.state.rng import Draws, reseed

WARM_UP = 50


def row(name: str, times_us: list[float]) -> str:
    """Return one line of the table."""
    ordered = sorted(times_us)
    return f"| {name} | {len(ordered)} | {ordered[len(ordered) // 2]:.0f} | {ordered[len(ordered) * 9 // 10]:.0f} |"


def timed(call: Callable[[int], object], rounds: int) -> list[float]:
    """Return the time of each call in microseconds, without the warm-up calls."""
    times = []
    for number in range(rounds):
        began_ns = time.perf_counter_ns()
        call(number)
        times.append((time.perf_counter_ns() - began_ns) / 1e3)
    return times[WARM_UP:]


def main() -> None:
    """Entry point of each rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--size", default="10m")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    parts = build(parse(["--size", given.size]), workers())
    vector = [1, 0, 0, 0, 0, 1, 1]
    votes = timed(lambda _: fabric().reduce_vote(vector), given.steps)
    seeds = timed(lambda step: reseed(0, Draws.same(rank()), step), given.steps)
    steps: list[float] = []
    with holdfast.session(
        model=parts.network, optimizer=parts.optimizer, scheduler=parts.scheduler, resume="never"
    ) as s:
        last_ns = time.perf_counter_ns()
        for step in s.steps(until=given.steps):
            with step:
                parts.optimizer.step()
            now_ns = time.perf_counter_ns()
            steps.append((now_ns - last_ns) / 1e3)
            last_ns = now_ns
    if rank() == 0:
        print("| microseconds per step | n | median | p90 |\n|---|---|---|---|")
        print(row("all of the session (with the vote)", steps[WARM_UP:]))
        print(row("the vote alone, ranks idle", votes))
        print(row("seeding alone", seeds))


if __name__ == "__main__":
    main()
