"""Cost of Holdfast's process groups per call: ours and plain gloo in the same processes, call by call in turn.

``python -m bench.groups [--ranks 2] [--rounds 400]`` starts the ranks with torchrun's environment over a file store. It
prints medians and 90th percentiles in microseconds. The vote is an int64 all-reduce of seven numbers on its own group.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from holdfast.frameworks.torch.comm.backend import fabric, install

VOTE = [1, 0, 0, 0, 0, 1200, 1_440_000]
SIZES = (1, 16_384, 1_048_576)


def _time_us(call: Callable[[], object]) -> float:
    began = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - began) / 1e3


def _show(name: str, times_us: list[float]) -> None:
    ordered = sorted(times_us)
    print(
        f"{name:38s} p50 {ordered[len(ordered) // 2]:9.1f} us   p90 {ordered[len(ordered) * 9 // 10]:9.1f} us"
    )


def _pair(
    rounds: int, ours: Callable[[], object], plain: Callable[[], object]
) -> tuple[list[float], list[float]]:
    """Return the times of both calls, taken in turn so that noise of the machine affects both."""
    a: list[float] = []
    b: list[float] = []
    for i in range(rounds + 20):
        first, second = (a, b) if i % 2 == 0 else (b, a)
        first.append(_time_us(ours if first is a else plain))
        second.append(_time_us(ours if second is a else plain))
    return a[20:], b[20:]


def _compare(
    group: Any, plain: Any, numel: int, ranks: int, count: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Return the times of Holdfast's group and of gloo by operation.

    Each rank has float32 tensors of ``numel`` elements.
    """
    x, y = torch.ones(numel), torch.ones(numel)
    out, whole = torch.empty(numel * ranks), torch.empty(numel * ranks)
    return {
        "all_reduce": _pair(count, lambda: group.allreduce([x]).wait(), lambda: plain.allreduce([y]).wait()),
        "all_gather": _pair(
            count,
            lambda: group.all_gather_single(out, x).wait(),
            lambda: plain._allgather_base(whole, y).wait(),
        ),
    }


def run_rank(rank: int, ranks: int, folder: str, rounds: int) -> None:
    """Measure as one rank. Rank 0 prints."""
    torch.set_num_threads(1)
    plain: Any = dist.ProcessGroupGloo(
        FileStore(f"{folder}/plain", ranks), rank, ranks, timedelta(seconds=60)
    )
    install()
    dist.init_process_group("gloo", store=FileStore(f"{folder}/ours", ranks), rank=rank, world_size=ranks)
    group: Any = dist.group.WORLD
    for numel in SIZES:
        count = max(20, rounds // (1 + numel // 65_536))
        for name, (ours, gloo) in _compare(group, plain, numel, ranks, count).items():
            if rank == 0:
                _show(f"{name} {numel * 4} B ours", ours)
                _show(f"{name} {numel * 4} B gloo", gloo)
    votes, gloo = _pair(
        rounds, lambda: fabric().reduce_vote(VOTE), lambda: plain.allreduce([torch.tensor(VOTE)]).wait()
    )
    fabric().shield(True)
    fabric().poison("bench")
    tensor = torch.ones(1)
    poisoned = [_time_us(lambda: group.allreduce([tensor]).wait()) for _ in range(rounds)]
    if rank == 0:
        _show("vote", votes)
        _show("all_reduce of a vote, gloo", gloo)
        _show("poisoned all_reduce", poisoned)


def main() -> None:
    """Start the ranks and wait."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank >= 0:
        run_rank(given.rank, given.ranks, given.folder, given.rounds)
        return
    with tempfile.TemporaryDirectory() as folder:
        base = [
            sys.executable,
            "-m",
            "bench.groups",
            "--ranks",
            str(given.ranks),
            "--rounds",
            str(given.rounds),
        ]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen([*base, "--rank", str(rank), "--folder", folder], env=env)
            for rank in range(given.ranks)
        ]
        codes = [process.wait(timeout=300) for process in ranks]
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")


if __name__ == "__main__":
    main()
