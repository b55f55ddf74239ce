"""A job that is as irregular as real jobs and does not hang: no rank may be killed.

    python bench/soak_hang.py [--minutes 10] [--step-s 0.25] [--nproc 4] [--run-dir DIR]

Steps take 0.25 s. At random, and on each rank independently, there are steps up to 8 times as long (longer than the
lower limit of the bounds), garbage collections that hold the GIL for up to 1 s, batches that take up to 2 s, and files
that are written and synced between steps. There is a checkpoint every 20 steps and an announced evaluation of up to 8 s
every 50 steps. Every third evaluation is on rank 0 only, while the others wait in the next step. Prints what was
survived. The exit code is 0 when no fault was recorded and no process was killed.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from holdfast import event_log

STEP_S = 0.25
SLOW_SHARE, SLOW_MAX = 0.04, 8.0
PAUSE_SHARE, PAUSE_S_MAX = 0.01, 1.0
BATCH_SHARE, BATCH_S_MAX = 0.01, 2.0
DISK_SHARE, DISK_SIZE_BYTES = 0.02, 16 << 20
EVALUATE_EVERY, EVALUATE_S_MAX = 50, 8.0


def train(seconds: float, step_s: float, scratch: Path) -> None:
    """Train as one rank."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import holdfast

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    draw = random.Random(rank)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
    network = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(network.parameters())
    started_s = time.monotonic()
    counts = {"slow steps": 0, "pauses": 0, "slow batches": 0, "slow writes": 0, "evaluations": 0}

    class Batches:
        """Batches without an end; some are slow."""

        def __iter__(self) -> Iterator[torch.Tensor]:
            while True:
                if draw.random() < BATCH_SHARE:
                    counts["slow batches"] += 1
                    time.sleep(draw.uniform(0.2, BATCH_S_MAX))
                yield torch.randn(16, 256)

    with holdfast.session(model=network, optimizer=optimizer, seed=1, save_every_steps=20) as s:
        over = torch.zeros(1)
        for step in s.steps(Batches(), until=1_000_000):
            with step as batch:
                spend(step_s, draw, counts)
                network(batch).square().mean().backward()
                over.fill_(float(time.monotonic() - started_s > seconds))
                dist.all_reduce(over)
                optimizer.step()
                optimizer.zero_grad()
            if draw.random() < DISK_SHARE:
                counts["slow writes"] += 1
                write(scratch / f"rank-{rank}", draw)
            if step.number % EVALUATE_EVERY == EVALUATE_EVERY - 1:
                evaluate(s, step.number // EVALUATE_EVERY, rank, counts)
            if over.item() > 0:
                break
        print(f"rank {rank}: {s.step} steps, {counts}", flush=True)
    dist.destroy_process_group()


def spend(step_s: float, draw: random.Random, counts: dict[str, int]) -> None:
    """Spend the compute time of one step. Some steps are slow, some are interrupted by a pause that holds the GIL."""
    factor = 1.0
    if draw.random() < SLOW_SHARE:
        counts["slow steps"] += 1
        factor = draw.uniform(2.0, SLOW_MAX)
    time.sleep(step_s * factor)
    if draw.random() < PAUSE_SHARE:
        counts["pauses"] += 1
        garbage: list[object] = [[] for _ in range(100_000)]
        garbage.append(garbage)
        del garbage
        gc.collect()
        ctypes.PyDLL(None).usleep(int(1e6 * draw.uniform(0.1, PAUSE_S_MAX)))


def write(path: Path, draw: random.Random) -> None:
    """Write and sync a file."""
    with path.open("wb") as file:
        for _ in range(4):
            file.write(os.urandom(DISK_SIZE_BYTES // 4))
            file.flush()
            os.fsync(file.fileno())
            time.sleep(draw.uniform(0.0, 0.5))


def evaluate(s: object, number: int, rank: int, counts: dict[str, int]) -> None:
    """Evaluate on all ranks, or on rank 0 alone. ``number`` seeds the duration."""
    if number % 3 == 2 and rank != 0:
        return
    with s.section("eval"):  # type: ignore[attr-defined]
        counts["evaluations"] += 1
        time.sleep(random.Random(number).uniform(1.0, EVALUATE_S_MAX))


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--step-s", type=float, default=STEP_S)
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--run-dir", type=Path, default=Path("runs"))
    parser.add_argument("--scratch", type=Path, default=None)
    given = parser.parse_args()
    if "RANK" in os.environ:
        train(60 * given.minutes, given.step_s, given.scratch)
        return 0
    name = time.strftime("soak-hang-%Y%m%d-%H%M%S")
    scratch = (given.run_dir / f"{name}.scratch").absolute()
    scratch.mkdir(parents=True)
    command = [sys.executable, "-m", "holdfast", "run", "--run-dir", str(given.run_dir), "--run-id", name,
               "--tee", "3", "--nproc-per-node", str(given.nproc), __file__, "--minutes", str(given.minutes),
               "--step-s", str(given.step_s),
               "--scratch", str(scratch)]  # fmt: skip
    code = subprocess.run(command, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode
    for path in scratch.iterdir():
        path.unlink()
    scratch.rmdir()
    events = event_log.read(given.run_dir / name / "events.jsonl").events
    of = {
        kind: [e for e in events if e.kind == kind]
        for kind in ("stalled", "moved", "hang", "detected", "straggler")
    }
    killed = [e for e in of["hang"] if e.data["answer"] != "wait"]
    print(", ".join(f"{len(found)} {kind}" for kind, found in of.items()))
    good = code == 0 and not killed and not of["detected"]
    print(f"{'PASSED: no rank was killed' if good else 'FAILED'}, code {code}, log {given.run_dir / name}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
