"""The bare twin of ``train.py``: the same training in plain torch.

It shares the documented seed function (random numbers of a step are a function of seed, rank and step) and nothing
else of Holdfast: no session, no vote, torch's own process groups. Its digest must equal that of the session's run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor

from holdfast.adapters.torch.rng import reseed
from holdfast.drill.parts import (
    Parts,
    accumulate,
    average_statistics,
    build,
    parse,
    place,
    result_of,
    write_result,
)
from holdfast.drill.trace import Trace


def batches(parts: Parts, steps: int) -> Iterator[tuple[int, list[Tensor]]]:
    """Step numbers and batches over as many epochs as ``steps`` needs."""
    step = epoch = 0
    while step < steps:
        parts.sampler.set_epoch(epoch)
        for batch in parts.loader:
            yield step, batch
            step += 1
            if step == steps:
                return
        epoch += 1


def main() -> None:
    """Train, then write what this rank holds."""
    settings = parse()
    rank, world_size = place()
    if world_size > 1:
        dist.init_process_group("gloo")
    parts = build(settings, rank, world_size)
    trace = Trace(settings.trace, rank)
    loss = 0.0
    for step, batch in batches(parts, settings.steps):
        reseed(settings.seed, rank, step)
        loss = accumulate(parts, batch)
        average_statistics(parts)
        parts.optimizer.step()
        parts.scheduler.step()
        parts.optimizer.zero_grad()
        trace.committed(step + 1)
    if settings.layout == "ddp" and dist.is_initialized():
        for buffer in parts.gpt.buffers():  # DDP would do it before the next forward: buffers follow rank 0
            dist.broadcast(buffer, 0)
    if settings.result is not None:
        write_result(result_of(parts, settings, rank, world_size, loss), settings.result)
    # No destructors: ~ProcessGroupGloo holds the GIL and waits for gloo's loop, which may hold its lock and want the
    # GIL to free the last collective's tensors (seen on torch 2.13: the process hangs for ever).
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
