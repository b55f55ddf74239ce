"""A training whose batches come from a game of each rank, in ``s.own``; a rank dies before the blocks of some steps.

Arguments: the file of the result, and ``RANK@STEP.TIMES,...``: the rank kills itself before the block of the step, in
the first TIMES processes that come there. ``large``: at step 3 the values of a rank become too large. The third
argument is a form of the job. ``late``: rank 1 opens its loop late after a restart. ``epochs``: step 4 begins a second
epoch. ``rows``: as ``epochs`` without barriers, and each rank has rows that no other rank has, kept in memory.
``variable``: as ``rows``, and the game is in a variable that no process gets back.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

import holdfast
from holdfast.session.loops import loop
from holdfast.session.loops.loop_bounds import compare_bounds

STEPS = 8


def main(result: Path, kills: str, form: str) -> None:
    """Train, and write a digest of the weights."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    rows = torch.zeros(1, 8)
    alone, forgets, number = form in ("rows", "variable"), form == "variable", rank + 1
    if alone:
        holdfast.torch.declare(rows, (dist.get_world_size(), 8), (rank, 0))
    state = {"rows": rows} if alone else None
    with holdfast.session(model=model, optimizer=optimizer, state=state, memory=1 if alone else None) as s:
        s.own = s.own or [rank + 1]
        for step in steps_of(s, 1 if form in ("", "late") else 2):
            for place in kills.split(","):
                here, _, times = place.partition(".")
                marks = [result.with_suffix(f".{here}.{number}") for number in range(int(times or 0))]
                free = [mark for mark in marks if not mark.exists()]
                if here == f"{rank}@{step.number}" and free:
                    free[0].touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            if step.number % 2 == 0 and not (step.again or alone):
                dist.barrier()  # a rank that waits here for a lost one leaves, and all ranks start again
            with step:
                game = torch.Generator().manual_seed(number if forgets else s.own[0])
                model(torch.randn(4, 8, generator=game) + rows).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if alone:
                    rows += s.own[0] / 1009
                number = number * 31 % 1009 if forgets else number
                s.own = [s.own[0] * 31 % 1009]
                if kills == "large" and step.number == 3:
                    s.own.append("x" * 200_000)
    if rank == 0:
        digest = xxhash.xxh3_128()
        for parameter in model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        result.write_text(digest.hexdigest())
    dist.destroy_process_group()


def steps_of(session: Any, epochs: int) -> Iterator[Any]:
    """Yield the steps of the job; with one epoch, without a loop over epochs."""
    if epochs == 1:
        yield from session.steps(until=STEPS)
        return
    for epoch in session.epochs(epochs):
        yield from session.steps(until=STEPS * (epoch + 1) // epochs)


def compare_late(*given: Any) -> None:
    """Compare the ends of the loops, after rank 0 of this attempt is dead."""
    if os.environ["RANK"] == "1" and any(Path.cwd().glob("result.*.0")):
        time.sleep(0.5)
    compare_bounds(*given)


if __name__ == "__main__":
    given = sys.argv[3] if len(sys.argv) > 3 else ""
    if given == "late":
        vars(loop)["compare_bounds"] = compare_late
    main(Path(sys.argv[1]), sys.argv[2], given)
