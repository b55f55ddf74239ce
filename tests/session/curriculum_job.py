"""Three phases with one loop over steps each; a rank is killed once, or ends its loop at another step.

``python curriculum_job.py WAY [RANK:STEP]``. WAY is how the ``until`` of a phase is computed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast

PHASES, PHASE_STEPS = 3, 4


def main(way: str, kill: str) -> None:
    """Train."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(60, 8, generator=draw), torch.randint(0, 4, (60,), generator=draw))
    model = DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
        phases: Iterable[int] = range(PHASES)
        if way == "skipping":
            phases = range(s.step // PHASE_STEPS, PHASES)
        for phase in (int(name) for number in phases for name in s.phase(f"{number}")):
            until = (s.step if way in ("counted", "own") else phase * PHASE_STEPS) + PHASE_STEPS
            loader = DataLoader(data, 2 + phase, sampler=DistributedSampler(data))
            for step in s.steps(loader, until=until + rank * (way == "own")):
                with step as (x, y):
                    loss: Any = functional.cross_entropy(model(x) / (phase + 1), y)
                    loss.backward()
                    if kill == f"{rank}:{step.number}" and not Path("struck").exists():
                        Path("struck").touch()
                        os.kill(os.getpid(), signal.SIGKILL)
                    optimizer.step()
                    optimizer.zero_grad()
        total = xxhash.xxh3_128()
        for parameter in model.parameters():
            total.update(parameter.detach().numpy().tobytes())
        print(f"rank {rank} ends at {s.step}: {total.hexdigest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "")
