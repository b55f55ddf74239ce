"""A small training that fails in ways that leave the loop; one digest file per rank.

``python fallen_job.py --what WHAT --layout ddp|hsdp --result DIR``. WHAT is one of these:

- ``raise``: every rank raises at step 5, once;
- ``always``: the same in every life;
- ``check``: every rank raises after the block of step 5, and after each later block, in every life;
- ``exit``, ``exit-after``: every rank calls ``sys.exit(3)`` in the block of step 5, or after it, once;
- ``exit-always``: the same in the block in every life, as many scripts do for a loss that is not finite;
- ``caught``: as ``metric``, in a script that catches the exception of the collective and calls ``sys.exit(3)``;
- ``metric``: rank 1 is killed while the others are in a collective between two steps;
- ``spoil``: before the last step the checkpoint directory becomes a file, so no save can succeed;
- ``leave``: the job is asked to exit; when all is saved, rank 1 is killed in the code after its loop.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast

STEPS = 12
AT = 5


def meet() -> None:
    """Wait until every rank has passed the collectives of its step.

    A rank that a fault meets inside them raises nothing.
    """
    while len(list(Path().glob("struck-*"))) < dist.get_world_size():
        time.sleep(0.001)


def fail(words: str, *, exits: bool) -> NoReturn:
    """Raise an exception, or print the words and leave the script as scripts do for a loss that is not finite."""
    if not exits:
        raise ValueError(words)
    print(words, flush=True)
    sys.exit(3)


def reduce(loss: torch.Tensor, *, catches: bool) -> None:
    """Sum a copy of the loss over all ranks. With ``catches``, leave the script if the collective raises."""
    try:
        dist.all_reduce(loss.detach().clone())
    except Exception:
        if not catches:
            raise
        traceback.print_exc()
        sys.exit(3)


def digest_of(net: nn.Module) -> str:
    """Return a digest of the weights that this rank holds."""
    total = xxhash.xxh3_128()
    for parameter in net.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        total.update(local.detach().numpy().tobytes())
    return total.hexdigest()


def main() -> None:
    """Train ``STEPS`` steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--what", default="")
    parser.add_argument("--layout", default="ddp")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--save-every", type=int, default=1000)
    parser.add_argument("--keep", type=int, default=3)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    rank, place = dist.get_rank(), Path("ckpt")
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    model = net
    if given.layout == "hsdp":
        fully_shard(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))
    else:
        model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = [(torch.randn(8, 64), torch.randn(8, 1)) for _ in range(STEPS)]
    mark = Path(f"struck-{rank}")
    first = not mark.exists()
    with holdfast.session(
        model=model, optimizer=optimizer, checkpoint=place, save=given.save_every, keep=given.keep, memory=0
    ) as s:
        for step in s.steps(until=STEPS):
            with step:
                x, y = data[step.number]
                loss = ((model(x) - y) ** 2).mean()
                loss.backward()
                if step.number == AT and (
                    given.what.endswith("always") or (given.what in ("raise", "exit") and first)
                ):
                    mark.touch()
                    meet()
                    # also if the fence of the other ranks came first: then this rank runs the step again
                    first = False
                    fail(f"nan in rank {rank}", exits=given.what.startswith("exit"))
                if step.number == STEPS - 1 and given.what == "spoil" and rank == 0 and place.is_dir():
                    place.rename("ckpt-before")
                    place.write_text("in the way")
                optimizer.step()
                optimizer.zero_grad()
            if given.what == "check" and step.committed and step.number >= AT:
                raise ValueError(f"after step {step.number} the loss of rank {rank} is {loss.item()}")
            if given.what == "exit-after" and step.number == AT and first:
                mark.touch()
                meet()
                fail("after the block", exits=True)
            if given.what in ("metric", "caught"):
                if step.number == AT and rank == 1 and first:
                    mark.touch()
                    time.sleep(0.3)
                    os.kill(os.getpid(), signal.SIGKILL)
                reduce(loss, catches=given.what == "caught")
            if given.what == "leave" and step.number == AT and rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            if given.what == "leave":
                time.sleep(0.05)
        if given.what == "leave" and rank == 1 and first:
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if given.what == "leave":
            time.sleep(0.5)
    given.result.mkdir(exist_ok=True)
    (given.result / f"rank-{rank}.json").write_text(json.dumps({"digest": digest_of(net)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
