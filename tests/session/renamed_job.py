"""Two ranks whose script names another checkpoint directory in each process that starts later, as by a time stamp.

``python renamed_job.py``. ``KILL`` names the kills, as in ``tests/others/beat.py``. With ``KILL_ALL`` all ranks are
killed at step 7. Each rank writes its weights and the directory of its session into ``ended-RANK``.
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
from holdfast.store.manage.checkpoint_root import Root
from tests.others.beat import beat
from tests.session.once import first

LATER = Path("begun").exists() or bool(os.environ.get("HOLDFAST_SPARE"))


def kill_all(step: int) -> None:
    """At step 7 let rank 0 kill all ranks at once, if ``KILL_ALL`` says so, once."""
    rank, done = dist.get_rank(), Path("killed-all")
    if step == 0:
        Path(f"pid-{rank}").write_text(str(os.getpid()))
    if step == 7 and rank == 0 and os.environ.get("KILL_ALL") and first(done):
        for other in (1, 0):
            os.kill(int(Path(f"pid-{other}").read_text()), signal.SIGKILL)


def main() -> None:
    """Train twelve steps."""
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    place = "later" if LATER else "first"
    with holdfast.session(model=model, optimizer=optimizer, checkpoint=place, save_every_steps=5) as s:
        for step in s.steps(until=12):
            with step:
                beat(s.step)
                kill_all(s.step)
                optimizer.zero_grad()
                model(torch.full((2, 4), s.step + 1.0)).square().sum().backward()
                optimizer.step()
            Path("begun").touch()
            while s.step == 6 and not any(found.valid for found in Root(Path("first")).list()):
                time.sleep(0.01)  # the save of step 5 is written in the background
    Path(f"ended-{dist.get_rank()}").write_text(f"{s.root} {model.module.weight.tolist()}")


if __name__ == "__main__":
    main()
