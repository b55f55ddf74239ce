"""A byte-level GPT on real text: a worker dies in the middle of a step, the others save that step, all continue.

    holdfast run --nproc-per-node 4 examples/gpt_last_gasp.py --lose 2@20

Holdfast adds: import holdfast; with holdfast.session(...) as s; for step in s.steps(...); with step as batch.
No checkpoint interval: the survivors write the last-gasp checkpoint when it is needed, and every rank loads it.
"""

import argparse
import os
import signal
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import holdfast  # + Holdfast

CONTEXT = 32


class Gpt(nn.Module):
    """A small Transformer that predicts the next byte."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, batch_first=True, norm_first=True)
        self.body, self.head = (
            nn.TransformerEncoder(layer, layers, enable_nested_tensor=False),
            nn.Linear(width, 256),
        )
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, text: Tensor) -> Tensor:
        """Return the mean loss of ``text``, int64 of shape (batch, CONTEXT + 1)."""
        x = self.tokens(text[:, :-1]) + self.places.weight
        logits = self.head(self.body(x, mask=self.mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lose", default="", help="RANK@STEP: this rank is killed there, once")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = DistributedDataParallel(Gpt())
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.steps)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    pieces = text.long().unfold(0, CONTEXT + 1, CONTEXT)
    loader = DataLoader(pieces, 8, sampler=DistributedSampler(pieces))

    with holdfast.session(model=net, optimizer=optimizer, scheduler=schedule) as s:  # + Holdfast
        first_life = s.step == 0
        for step in s.steps(loader, until=given.steps):  # + Holdfast
            with step as batch:  # + Holdfast
                loss = net(batch)
                loss.backward()
                if first_life and given.lose == f"{rank}@{step.number}":
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if step.committed and rank == 0:
                print(f"step {step.number + 1} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
