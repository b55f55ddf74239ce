"""A script under torchrun's own agent with Holdfast's groups and no session: SIGKILL ends its first two attempts.

In each later attempt one rank comes late. Until then, its peer finds only keys of dead processes in torchrun's store.
"""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist

import holdfast.frameworks.torch.comm.backend as groups

LATE_S = 1.0


def main() -> None:
    """Sum over both ranks, in the default group and in a second group."""
    life, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    if life and rank == life % 2:
        time.sleep(LATE_S)
    assert groups.installed()
    dist.init_process_group("gloo")
    pair = dist.new_group([0, 1])
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.all_reduce(total, group=pair)
    if life < 2 and rank == life:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    print(f"rank {rank} of attempt {life}: {total.item():g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
