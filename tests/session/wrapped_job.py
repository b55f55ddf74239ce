"""A small DDP training in which rank 1 may be killed; one digest file per rank.

``python wrapped_job.py --what compiled|HOOK [--late] [--kill STEPS]``: DDP around a compiled module, or DDP with a
communication hook of torch. The hook is registered before the session or, with ``--late``, inside it. Rank 1 is killed
once at each of the steps.
"""

from __future__ import annotations

import argparse
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import xxhash
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast

STEPS = 10


def register(net: Any, what: str) -> None:
    """Register one of torch's communication hooks by its name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    if what == "powerSGD_hook":
        state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=3, min_compression_rate=0.1)
        net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        net.register_comm_hook(None, getattr(default_hooks, what))


def main() -> None:
    """Train ``STEPS`` steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--what", required=True)
    parser.add_argument("--late", action="store_true")
    parser.add_argument("--kill", type=int, nargs="*", default=())
    given = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4))
    compiled = given.what == "compiled"
    net = DistributedDataParallel(torch.compile(net) if compiled else net)
    if not compiled and not given.late:
        register(net, given.what)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    data = [(torch.randn(8, 16), torch.randint(0, 4, (8,))) for _ in range(STEPS)]
    with holdfast.session(model=net, optimizer=optimizer, checkpoint="ckpt") as s:
        if given.late:
            register(net, given.what)
        for step in s.steps(until=STEPS):
            with step:
                mark = Path(f"killed-{step.number}")
                if rank == 1 and step.number in given.kill and not mark.exists():
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                x, y = data[step.number]
                loss: Any = F.cross_entropy(net(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    total = xxhash.xxh3_128()
    for parameter in net.parameters():
        total.update(parameter.detach().numpy().tobytes())
    Path(f"digest-{rank}").write_text(total.hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
