"""Two ranks whose script names another checkpoint directory in each process that starts later, as by a time stamp.

``python renamed_job.py``. ``KILL`` names the kills, as in ``tests/others/beat.py``. Each rank writes its weights and
the directory of its session into ``ended-RANK``.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.store.manage.checkpoint_root import Root
from tests.others.beat import beat

LATER = Path("begun").exists() or bool(os.environ.get("HOLDFAST_SPARE"))


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
                optimizer.zero_grad()
                model(torch.full((2, 4), s.step + 1.0)).square().sum().backward()
                optimizer.step()
            Path("begun").touch()
            while s.step == 6 and not any(found.valid for found in Root(Path("first")).list()):
                time.sleep(0.01)  # the save of step 5 is written in the background
    Path(f"ended-{dist.get_rank()}").write_text(f"{s.root} {model.module.weight.tolist()}")


if __name__ == "__main__":
    main()
