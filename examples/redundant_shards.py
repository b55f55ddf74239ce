"""Shards with replicas: a rank dies; its part of weights and optimizer comes from the rank that holds the same part.

    holdfast run --nproc-per-node 4 examples/redundant_shards.py
    holdfast ckpt holders runs/*/checkpoints/step-*                     # which rank holds which part

Four ranks as two replicas of two shards (FSDP2 on a 2-D mesh): ranks 0 and 2 hold the same half, 1 and 3 the other.
Rank 0 is killed at step 6; no file of rank 2 is copied to rank 0 by hand.
Holdfast adds: import holdfast; with holdfast.session(...) as s; for step in s.steps(...); with step as batch.
"""

import argparse
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast  # + Holdfast


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--lose", type=int, default=0, help="the rank that is killed at step 6")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replica", "shard"))
    torch.manual_seed(0)
    net = nn.Transformer(32, 2, 1, 1, 64, batch_first=True)
    for layer in (net.encoder, net.decoder):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    with holdfast.session(model=net, optimizer=optimizer) as s:  # + Holdfast
        first_life = s.step == 0
        for step in s.steps(until=given.steps):  # + Holdfast
            with step:  # + Holdfast
                source = torch.randn(4, 8, 32)  # seeded by (rank, step): equal after a restart
                loss = (net(source, source) - source.flip(1)).square().mean()
                loss.backward()
                if first_life and step.number == 6 and rank == given.lose:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
                optimizer.zero_grad()
            if step.committed and rank == 0:
                print(f"step {step.number + 1} loss {loss.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
