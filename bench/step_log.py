"""A small training on an engine, and the file in which each of its ranks logs its committed steps.

A line of the file ``steps-RANK`` has the number of the start by the engine, the number of the step, and the time.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

SETUP = """
import os, sys, time
import torch
import torch.distributed as dist
import holdfast
from torch.nn.parallel import DistributedDataParallel

pause_s, place = float(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(7)
model = DistributedDataParallel(torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.arange(65536.0).reshape(-1, 16).sin())
loader = torch.utils.data.DataLoader(data, 8, sampler=torch.utils.data.DistributedSampler(data, seed=7))
start = os.environ.get("SLURM_RESTART_COUNT", "0")
"""
"""The begin of the script: arguments, model and data. Its arguments: length of a step in seconds, and directory."""


class Step(NamedTuple):
    """A step that a rank has committed."""

    start: int
    number: int
    at_s: float


def logged_steps(place: Path, rank: int) -> list[Step]:
    """Return the steps that a rank has committed so far, by its file in the directory ``place``."""
    path = place / f"steps-{rank}"
    text = path.read_text(errors="replace") if path.exists() else ""
    lines = [line.split() for line in text.split("\n")[:-1]]  # the last line may be incomplete
    return [Step(int(start), int(number), float(at_s)) for start, number, at_s in lines]
