"""Ranks that share one GPU: data-parallel training over gloo with CUDA tensors.

``python shared_job.py --result DIR [--die RANK@STEP] [--gate STEP] [--side]`` writes a digest per rank. A process that
has used the device creates a file. With ``--side``, the block trains on its own stream, which is behind its host.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import holdfast
from tests.session.job import BATCH, EPOCH_STEPS, SEED, WIDTH, Net, Noisy

DEVICE = torch.device("cuda", 0)
STEPS = 12
BEHIND_CYCLES = 20_000_000


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--die", default="-1@-1")
    parser.add_argument("--gate", type=int, default=-1)
    parser.add_argument("--side", action="store_true")
    arguments = parser.parse_args()
    result: Path = arguments.result
    victim, _, at = arguments.die.partition("@")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    world = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    net = Net().to(DEVICE)
    (result / f"device-{os.getpid()}").touch()
    # torch orders what gloo copies to the device before later work of the default stream alone. On another stream,
    # DDP's copies from its buckets to the gradients would come too early; gradients in the buckets need no copies.
    wrapped = DistributedDataParallel(net, device_ids=[DEVICE.index], gradient_as_bucket_view=arguments.side)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=3)
    average = torch.zeros(WIDTH, device=DEVICE)
    data = Noisy(EPOCH_STEPS * BATCH * world, None)
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data, seed=SEED))
    stream = torch.cuda.current_stream(DEVICE)
    if arguments.side:
        stream = torch.cuda.Stream(DEVICE)  # type: ignore[no-untyped-call]
    with holdfast.session(
        model=wrapped, optimizer=optimizer, scaler=scaler, state={"average": average}, seed=SEED
    ) as s:
        stream.wait_stream(torch.cuda.current_stream(DEVICE))
        for step in s.steps(loader, until=STEPS):
            with step as batch, torch.cuda.stream(stream):
                while step.number == arguments.gate and not (result / "go").exists():
                    time.sleep(0.01)
                fall_behind(arguments.side)
                x, y = (part.to(DEVICE) for part in batch)
                loss = (wrapped(x) - y).square().mean()
                if step.number == int(at) and dist.get_rank() == int(
                    victim
                ):  # a spare that asks for its rank is held here
                    die_once(result / "died")
                scaler.scale(loss).backward()
                stream.wait_stream(torch.cuda.default_stream(DEVICE))
                scaler.step(optimizer)
                scaler.update()
                fall_behind(arguments.side)
                average.lerp_(net.first.bias.detach(), 0.1)
                optimizer.zero_grad()
    torch.cuda.synchronize(DEVICE)
    total = xxhash.xxh3_128(repr(scaler.get_scale()).encode())
    states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    for tensor in (*net.parameters(), *net.buffers(), *states, average):
        total.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    (result / f"rank-{dist.get_rank()}").write_text(total.hexdigest())
    dist.destroy_process_group()


def fall_behind(side: bool) -> None:
    """Keep the current stream busy for a while."""
    if side:
        torch.cuda._sleep(BEHIND_CYCLES)  # type: ignore[no-untyped-call]


def die_once(mark: Path) -> None:
    """Kill this process with SIGKILL while kernels run. Its replacement stays alive."""
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
