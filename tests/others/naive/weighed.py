"""The weight of the loss follows the epoch. ``KILL_AHEAD=1``: a rank is lost at the start of an epoch.

It has not opened the loop of this epoch, and the other rank has.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from tests.others.beat import end
from tests.session.once import first

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
raw = nn.Linear(3, 1)
model = DistributedDataParallel(raw)
optimizer = torch.optim.SGD(raw.parameters(), lr=0.1)
opened = Path("opened")

with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
    for epoch in s.epochs(4):
        if epoch == 2 and rank == 1 and "KILL_AHEAD" in os.environ and first(Path("killed-ahead")):
            while not opened.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        for step in s.steps(until=4 * (epoch + 1)):
            if epoch == 2 and rank == 0:
                opened.touch()
            with step:
                optimizer.zero_grad()
                (model(torch.randn(4, 3)).square().mean() / (1 + epoch)).backward()
                optimizer.step()

end(raw)
dist.destroy_process_group()
