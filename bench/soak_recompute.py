"""Ranks that compute each other's gradients again, on correct devices: no check may find a difference.

    python bench/soak_recompute.py [--checks 100000] [--nproc 4] [--run-dir DIR]

Runs jobs of three kinds in turn (dense layers with dropout, convolutions, attention), each with its own seed, under
DistributedDataParallel with ``session(verify_ranks=1)``. At every step each rank runs the block of another rank: one
check per rank and step. Prints the checks of each kind. The exit code is 0 when no check found a difference, no rank
was replaced, and no rank reported that it checks nothing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from holdfast import event_log

KINDS = ("dense", "convolutions", "attention")
STEPS = 2500
BATCH, SAMPLES = 4, 960
SAID = ("checks nothing", "ComputeError", "differ")


def train(kind: str, seed: int, steps: int) -> None:
    """Train as one rank."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    import holdfast

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(seed)
    nets = {
        "dense": lambda: nn.Sequential(
            nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.2), nn.LayerNorm(64), nn.Linear(64, 1)
        ),
        "convolutions": lambda: nn.Sequential(
            nn.Unflatten(1, (1, 4, 8)),
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(256, 1),
        ),
        "attention": lambda: nn.Sequential(
            nn.Unflatten(1, (4, 8)),
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True),
            nn.Flatten(),
            nn.Linear(32, 1),
        ),
    }
    model = DistributedDataParallel(nets[kind]())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    data = TensorDataset(torch.randn(SAMPLES, 32, generator=torch.Generator().manual_seed(seed)))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, BATCH, sampler=sampler)
    with holdfast.session(model=model, optimizer=optimizer, seed=seed, verify_ranks=1) as s:
        for step in s.steps(loader, until=steps):
            with step as (x,):
                (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checks", type=int, default=100_000)
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--run-dir", type=Path, default=Path("runs"))
    parser.add_argument("--job", nargs=3, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job is not None:
        train(given.job[0], int(given.job[1]), int(given.job[2]))
        return 0
    done = dict.fromkeys(KINDS, 0)
    bad: list[str] = []
    seed, began_s = 0, time.monotonic()
    while sum(done.values()) < given.checks and not bad:
        kind = KINDS[seed % len(KINDS)]
        name = time.strftime(f"soak-recompute-%Y%m%d-%H%M%S-{seed}")
        command = [sys.executable, "-m", "holdfast", "run", "--run-dir", str(given.run_dir), "--run-id", name,
                   "--tee", "3", "--nproc-per-node", str(given.nproc), __file__, "--job", kind, str(seed),
                   str(STEPS)]  # fmt: skip
        job = subprocess.run(
            command, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
        )
        events = event_log.read(given.run_dir / name / "events.jsonl").events
        found = [e.kind for e in events if e.kind in ("detected", "verdict", "device_failed")]
        said = [line for line in (job.stdout + job.stderr).splitlines() if any(word in line for word in SAID)]
        ended = [e.data["step"] for e in events if e.kind == "run_ended"]
        if job.returncode != 0 or found or said or ended != [STEPS]:
            bad.append(f"{kind}, seed {seed}: code {job.returncode}, {found}, {said[:3]}, ended at {ended}")
        done[kind] += STEPS * given.nproc
        seed += 1
        print(
            f"{sum(done.values())} checks in {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True
        )
    print(", ".join(f"{number} checks of {kind}" for kind, number in done.items()))
    print("\n".join(bad) if bad else "PASSED: no check has found a difference")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
