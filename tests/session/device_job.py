"""A device that fails: ``device_job.py WAY``, with ``once`` or ``always``; see ``test_devices.py``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast

STEPS = 8
FAILS_AT = 4
FAILED = Path("failed")
ERROR = "CUDA error: uncorrectable ECC error encountered"


def main(way: str) -> None:
    """Train."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [torch.full((2, 4), float(number)) for number in range(STEPS)]
    broken = os.environ["LOCAL_RANK"] == "1" and (way == "always" or not FAILED.exists())
    with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
        for step in s.steps(data, until=STEPS):
            with step as batch:
                if broken and step.number == FAILS_AT:
                    FAILED.touch()
                    raise torch.AcceleratorError(ERROR)
                model(batch).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    print(f"ends at {s.step}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
