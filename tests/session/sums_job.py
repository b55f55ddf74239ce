"""A training that sums its loss over all ranks after each block, as many scripts do for their log.

Arguments: the file of the result, and ``RANK@STEP,...`` of ranks that each kill themselves once, in their block.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash

import holdfast

STEPS = 8


def main(result: Path, victims: list[str]) -> None:
    """Train, and write a digest of the weights and the sums of the committed steps."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sums = {}
    with holdfast.session(model=model, optimizer=optimizer) as s:
        for step in s.steps(until=STEPS):
            loss = torch.zeros(())
            with step:
                dist.barrier()  # no rank is left in the sum of the step before
                here = f"{rank}@{step.number}"
                if here in victims and not result.with_suffix(f".{here}").exists():
                    result.with_suffix(f".{here}").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                loss = model(torch.randn(4, 64)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total)
            sums[step.number] = float(total)
    gathered: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, sums[STEPS - 1])
    assert len(set(gathered)) == 1, "all ranks have summed in the last step"
    if rank == 0:
        digest = xxhash.xxh3_128()
        for parameter in model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        result.write_text(f"{digest.hexdigest()} {sums[STEPS - 1]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","))
