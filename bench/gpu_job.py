"""The training of ``gpu.py``: a small GPT in bfloat16 on one GPU, under Holdfast or as a plain loop (``--bare``).

Each rank writes the times of its steps, the time when the device had done the last one, its peak of device memory and
a digest of its weights and moments. The plain
loop saves with ``torch.save`` and loads at its start, as the documentation of torchrun shows.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import xxhash
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import holdfast
from holdfast.drill.trace import Trace

SEED = 11
TOKENS = 4096


class Shape(NamedTuple):
    """Layers, heads, width, tokens per sequence and sequences per rank and step."""

    layers: int
    heads: int
    width: int
    context: int
    batch: int


SHAPES = {
    "tiny": Shape(12, 2, 32, 16, 1),
    "25m": Shape(8, 8, 512, 256, 8),
    "124m": Shape(12, 12, 768, 1024, 16),
    "355m": Shape(24, 16, 1024, 1024, 16),
}


class Block(nn.Module):
    """One layer: attention to earlier tokens, then two dense layers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norms = nn.ModuleList([nn.LayerNorm(shape.width) for _ in range(2)])
        self.attention = nn.Linear(shape.width, 3 * shape.width)
        self.join = nn.Linear(shape.width, shape.width)
        self.up, self.down = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer: (batch, context, width) -> the same."""
        rows, length, width = x.shape
        parts = self.attention(self.norms[0](x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind()
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).reshape(rows, length, width))
        return torch.add(x, self.down(F.gelu(self.up(self.norms[1](x)))))


class Gpt(nn.Module):
    """A GPT over ``TOKENS`` tokens."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.head = nn.Linear(shape.width, TOKENS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits: (batch, context) -> (batch, context, TOKENS)."""
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.blocks(self.tokens(x) + self.places(places)))  # type: ignore[no-any-return]


class Text(Dataset[torch.Tensor]):
    """Sequences of tokens; the next token depends on the last two."""

    def __init__(self, count: int, length: int) -> None:
        self.count, self.length = count, length

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return the tokens of one sequence: (length + 1,)."""
        at = torch.arange(self.length + 1)
        return (index * 31 + at * (index % 97 + 1) + (at * at) // 7) % TOKENS


class Parts(NamedTuple):
    """What both loops use."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: DataLoader[torch.Tensor]
    device: torch.device


def build(shape: Shape, device: torch.device, steps: int) -> Parts:
    """Return the model, the optimizer and the loader of this rank."""
    torch.manual_seed(SEED)
    model = DistributedDataParallel(Gpt(shape).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device.type == "cuda")
    data = Text(shape.batch * dist.get_world_size() * steps, shape.context)
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(data, seed=SEED)
    return Parts(model, optimizer, DataLoader(data, shape.batch, sampler=sampler), device)


def train(parts: Parts, batch: torch.Tensor) -> None:
    """Make one update."""
    tokens = batch.to(parts.device)
    with torch.autocast(parts.device.type, torch.bfloat16):
        logits = parts.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    parts.optimizer.step()
    parts.optimizer.zero_grad()


@contextmanager
def ended(given: argparse.Namespace, parts: Parts) -> Iterator[Trace]:
    """Yield the trace of the steps. Write the figures of this rank at the end."""
    trace = Trace(given.result, dist.get_rank)
    yield trace
    if parts.device.type == "cuda":
        torch.cuda.synchronize()
    ended_ns = time.monotonic_ns()
    trace.close()
    total = xxhash.xxh3_128()
    moments = [v for state in parts.optimizer.state.values() for v in state.values()]
    for tensor in (*parts.model.parameters(), *moments):
        total.update(tensor.detach().float().cpu().numpy().tobytes())
    peak = torch.cuda.max_memory_allocated() if parts.device.type == "cuda" else 0
    found = {"digest": total.hexdigest(), "peak_bytes": peak, "ended_ns": ended_ns}
    (given.result / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))


def die(given: argparse.Namespace, step: int) -> None:
    """Kill this process with SIGKILL once, while its kernels run, and record the time."""
    mark = given.result / "died"
    if dist.get_rank() == given.victim and step == given.die and not mark.exists():
        mark.write_text(str(time.monotonic_ns()))
        os.kill(os.getpid(), signal.SIGKILL)


def bare(given: argparse.Namespace, parts: Parts) -> None:
    """Train without Holdfast."""
    kept = given.result / "checkpoint.pt"
    step = 0
    if kept.exists():
        found: dict[str, Any] = torch.load(kept, weights_only=True, map_location=parts.device)
        parts.model.load_state_dict(found["model"])
        parts.optimizer.load_state_dict(found["optimizer"])
        step = int(found["step"])
    with ended(given, parts) as trace:
        batches = iter(parts.loader)
        for _ in range(step):
            next(batches)
        for batch in batches:
            train(parts, batch)
            die(given, step)
            step += 1
            trace.committed(step)
            if given.save_every and step % given.save_every == 0 and dist.get_rank() == 0:
                torch.save({"model": parts.model.state_dict(), "optimizer": parts.optimizer.state_dict(),
                            "step": step}, kept.with_suffix(".partial"))  # fmt: skip
                kept.with_suffix(".partial").replace(kept)


def kept_alive(given: argparse.Namespace, parts: Parts) -> None:
    """Train in a session of Holdfast."""
    with (
        holdfast.session(
            model=parts.model, optimizer=parts.optimizer, seed=SEED,
            checkpoint=given.result / "checkpoints" if given.save_every else None,
            save_every_steps=given.save_every or None,
        ) as s,
        ended(given, parts) as trace,  # ends before the session, whose last save is no part of a step
    ):  # fmt: skip
        for step in s.steps(parts.loader, until=given.steps):
            with step as batch:
                train(parts, batch)
                die(given, step.number)
            trace.committed(step.number + 1)


def main() -> None:
    """Train, and write the figures of this rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="124m")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--victim", type=int, default=-1)
    parser.add_argument("--die", type=int, default=-1)
    given = parser.parse_args()
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device(given.device)
    dist.init_process_group(given.backend)
    parts = build(SHAPES[given.shape], device, given.steps)
    (bare if given.bare else kept_alive)(given, parts)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
