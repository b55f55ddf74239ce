"""The drill's training as a plain torchrun script, as torchrun's documentation shows: save often, load at the start.

This is the base for comparison of ``recovery.py`` and ``overhead.py``: no Holdfast in the loop, torch's own process
groups.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from holdfast.drill.trace import Trace
from holdfast.drill.training import DrillTraining, accumulate, average_statistics, build, parse, rank, workers


def load(parts: DrillTraining, path: Path) -> int:
    """Load the checkpoint and return the steps that it has done; 0 without a checkpoint."""
    if not path.exists():
        return 0
    found: dict[str, Any] = torch.load(path, weights_only=True)
    parts.model.load_state_dict(found["model"])
    parts.optimizer.load_state_dict(found["optimizer"])
    parts.scheduler.load_state_dict(found["scheduler"])
    return int(found["step"])


def save(parts: DrillTraining, path: Path, step: int) -> None:
    """Replace the checkpoint."""
    state = {"model": parts.model.state_dict(), "optimizer": parts.optimizer.state_dict(),
             "scheduler": parts.scheduler.state_dict(), "step": step}  # fmt: skip
    torch.save(state, path.with_suffix(".partial"))
    path.with_suffix(".partial").replace(path)


def main() -> None:
    """Train."""
    settings = parse()
    dist.init_process_group("gloo")
    parts = build(settings, workers())
    trace = Trace(settings.trace, rank)
    if settings.trace is not None:
        (settings.trace / f"rank-{rank():05d}.pid").write_text(str(os.getpid()))
    checkpoint = Path(settings.checkpoint) / "checkpoint.pt" if settings.checkpoint else None
    step = load(parts, checkpoint) if checkpoint is not None else 0
    epoch = step // len(parts.loader)
    while step < settings.steps:
        parts.sampler.set_epoch(epoch)
        for batch in parts.loader:
            accumulate(parts, batch)
            average_statistics(parts)
            parts.optimizer.step()
            parts.scheduler.step()
            parts.optimizer.zero_grad()
            step += 1
            trace.committed(step)
            if (
                checkpoint is not None
                and settings.save_every
                and step % settings.save_every == 0
                and rank() == 0
            ):
                save(parts, checkpoint, step)
            if step == settings.steps:
                break
        epoch += 1
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's destructor can hang in torch 2.13, see holdfast/drill/bare.py


if __name__ == "__main__":
    main()
