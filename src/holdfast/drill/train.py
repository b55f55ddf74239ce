"""The drill's training script, written as a user would write it.

``holdfast run --nproc-per-node 4 -m holdfast.drill.train --size 10m --steps 40``
"""

from __future__ import annotations

import torch.distributed as dist

import holdfast
from holdfast.drill.trace import Trace
from holdfast.drill.training import (
    accumulate,
    average_statistics,
    build,
    offer_faults,
    parse,
    rank,
    result_of,
    workers,
    write_result,
)


def main() -> None:
    """Train in a session, then write the digests of this rank's state."""
    settings = parse()
    world_size = workers()
    if world_size > 1:
        dist.init_process_group("gloo")
    parts = build(settings, world_size)
    trace = Trace(settings.trace, rank)
    offer_faults(parts, world_size)
    loss: float | None = None
    with holdfast.session(
        model=parts.network,
        optimizer=parts.optimizer,
        scheduler=parts.scheduler,
        checkpoint=settings.checkpoint,
        seed=settings.seed,
        save_every_steps=settings.save_every or None,
    ) as s:
        for step in s.steps(parts.loader, until=settings.steps):
            with step as batch:
                loss = accumulate(parts, batch)
                average_statistics(parts)
                parts.optimizer.step()
                parts.scheduler.step()
                parts.optimizer.zero_grad()
            if step.committed:
                trace.committed(step.number + 1)
                if rank() == 0 and step.number % 10 == 9:
                    print(f"step {step.number + 1}/{settings.steps} loss {loss:.4f}", flush=True)
    trace.close()
    if settings.result is not None:
        write_result(result_of(parts, settings, world_size, loss), settings.result)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
