"""A small DDP training in which one process hangs before it has done a step; prints a digest of the weights.

``python start_job.py PLACE KIND``. KIND is `worker stops`: rank 1, in the first start; `newcomer stops` or `newcomer
loops`: the replacement of rank 1, which has killed itself; `loader stops`: a loader process of rank 1, at the first
batch; `none`.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import holdfast
from tests.session.once import first

DIE_STEP, STEPS, RANKS = 8, 12, 3


class Numbers(Dataset[torch.Tensor]):
    """A dataset with exactly the samples of the training."""

    def __init__(self, hangs: Path | None) -> None:
        self.hangs = hangs

    def __len__(self) -> int:
        return STEPS * RANKS

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.hangs is not None and first(self.hangs):
            os.kill(os.getpid(), signal.SIGSTOP)
        return torch.full((8,), float(index))


def begin(place: Path, kind: str) -> None:
    """Hang if this process is the one to hang."""
    if os.environ["RANK"] != "1" or not (kind == "worker stops" or (place / "died").exists()):
        return
    if kind.endswith("stops") and first(place / "stopped"):
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind.endswith("loops") and first(place / "looped"):
        while True:
            pass


def main(place: Path, kind: str) -> None:
    """Train."""
    begin(place, kind)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = Numbers(place / "stopped" if rank == 1 and kind == "loader stops" else None)
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(data, shuffle=False)
    with holdfast.session(model=model, optimizer=optimizer, seed=3) as s:
        for step in s.steps(DataLoader(data, 1, sampler=sampler, num_workers=1), until=STEPS):
            with step as batch:
                model(batch).square().mean().backward()
                dies = step.number == DIE_STEP and rank == 1 and kind.startswith("newcomer")
                if dies and first(place / "died"):
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
                optimizer.zero_grad()
    bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    (place / f"rank-{rank}.digest").write_text(hashlib.sha256(bits).hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
