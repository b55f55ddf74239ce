"""A training whose batches come from a game of each rank, in ``s.own``; a rank dies before the blocks of some steps.

Arguments: the file of the result, and ``RANK@STEP.TIMES,...``: the rank kills itself before the block of the step, in
the first TIMES processes that come there. ``large``: at step 3 the values of a rank become too large. With a third
argument, rank 1 opens its loop late after a restart.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

import holdfast
from holdfast.session.loops import loop
from holdfast.session.loops.loop_bounds import compare_bounds

STEPS = 8


def main(result: Path, kills: str) -> None:
    """Train, and write a digest of the weights."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with holdfast.session(model=model, optimizer=optimizer) as s:
        s.own = s.own or [rank + 1]
        for step in s.steps(until=STEPS):
            for place in kills.split(","):
                here, _, times = place.partition(".")
                marks = [result.with_suffix(f".{here}.{number}") for number in range(int(times or 0))]
                free = [mark for mark in marks if not mark.exists()]
                if here == f"{rank}@{step.number}" and free:
                    free[0].touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            if step.number % 2 == 0 and not step.again:
                dist.barrier()  # a rank that waits here for a lost one leaves, and all ranks start again
            with step:
                game = torch.Generator().manual_seed(s.own[0])
                model(torch.randn(4, 8, generator=game)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                s.own = [s.own[0] * 31 % 1009]
                if kills == "large" and step.number == 3:
                    s.own.append("x" * 200_000)
    if rank == 0:
        digest = xxhash.xxh3_128()
        for parameter in model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        result.write_text(digest.hexdigest())
    dist.destroy_process_group()


def compare_late(*given: Any) -> None:
    """Compare the ends of the loops, after rank 0 of this attempt is dead."""
    if os.environ["RANK"] == "1" and any(Path.cwd().glob("result.*.0")):
        time.sleep(0.5)
    compare_bounds(*given)


if __name__ == "__main__":
    if len(sys.argv) > 3:
        vars(loop)["compare_bounds"] = compare_late
    main(Path(sys.argv[1]), sys.argv[2])
