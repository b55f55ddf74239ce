"""The drill's training without Holdfast, in plain torch: the reference for ``train.py``.

This script shares only the documented seed functions with Holdfast. The random numbers of a step are a function of
seed, rank and step. The random numbers of a sample are a function of seed, epoch and index. There is no session and no
vote, and the process groups are torch's own. The digest of its result must equal the digest of the run with a session.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from holdfast.drill.trace import Trace
from holdfast.drill.training import (
    DrillTraining,
    Pair,
    accumulate,
    average_statistics,
    build,
    parse,
    rank,
    result_of,
    workers,
    write_result,
)
from holdfast.frameworks.torch.state.rng import Draws, reseed, sample_seed, seed_all


class SeededWindows(Dataset[Pair]):
    """A dataset that seeds the default generators before each sample.

    Set ``epoch`` before the loader's processes start.
    """

    def __init__(self, inner: Dataset[Pair], seed: int) -> None:
        self.inner = inner
        self.seed = seed
        self.epoch = 0

    def __getitem__(self, index: int) -> Pair:
        """Return the sample ``index``, which is equal in every process that loads it."""
        seed_all(sample_seed(self.seed, self.epoch, index))
        return self.inner[index]


def batches(parts: DrillTraining, steps: int, seed: int) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield pairs of step number and batch for ``steps`` steps, over as many epochs as needed."""
    plain = parts.loader
    data = SeededWindows(plain.dataset, seed)
    loader = DataLoader(
        data,
        plain.batch_size,
        sampler=parts.sampler,
        num_workers=plain.num_workers,
        drop_last=plain.drop_last,
    )
    step = 0
    while step < steps:
        parts.sampler.set_epoch(data.epoch)
        for batch in loader:
            yield step, batch
            step += 1
            if step == steps:
                return
        data.epoch += 1


def main() -> None:
    """Train without Holdfast, then write the digests of this rank's state."""
    settings = parse()
    world_size = workers()
    if world_size > 1:
        dist.init_process_group("gloo")
    parts = build(settings, world_size)
    trace = Trace(settings.trace, rank)
    loss = 0.0
    for step, batch in batches(parts, settings.steps, settings.seed):
        reseed(settings.seed, Draws.same(0), step)  # the seeds of all ranks are equal
        loss = accumulate(parts, batch)
        average_statistics(parts)
        parts.optimizer.step()
        parts.scheduler.step()
        parts.optimizer.zero_grad()
        trace.committed(step + 1)
    if parts.group is not None:
        # DDP would do this before the next forward: it broadcasts the buffers of its rank 0.
        for buffer in parts.model.buffers():
            dist.broadcast(buffer, dist.get_global_rank(parts.group, 0), group=parts.group)
    if settings.result is not None:
        write_result(result_of(parts, settings, world_size, loss), settings.result)
    # No destructors: ~ProcessGroupGloo holds the GIL and waits for gloo's loop. The loop may hold gloo's lock and need
    # the GIL to free the last collective's tensors (seen on torch 2.13: the process hangs forever).
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
