"""The byte-level GPT that the drill trains.

It deliberately has features that make an exact recovery hard: dropout (random numbers in forward), BatchNorm (forward
changes buffers), and enough parameters for several DDP buckets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256
DROPOUT = 0.1


@dataclass(frozen=True)
class Size:
    """The shape of the model and of its data. ``context`` is in tokens, ``batch`` in samples per rank and step."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    text_bytes: int
    epoch_steps: int


SIZES: dict[str, Size] = {
    "tiny": Size(layers=2, width=32, heads=2, context=16, batch=2, text_bytes=1 << 18, epoch_steps=64),
    "small": Size(layers=4, width=128, heads=4, context=32, batch=2, text_bytes=1 << 20, epoch_steps=32),
    "10m": Size(layers=8, width=320, heads=5, context=32, batch=2, text_bytes=1 << 22, epoch_steps=16),
}


class Block(nn.Module):
    """One transformer block: causal attention and a feed-forward layer, both with dropout."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_attention = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.norm_feed = nn.LayerNorm(size.width)
        self.feed = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations after the block; their shape in and out is ``(batch, context, width)``."""
        batch, context, width = x.shape
        q, k, v = self.qkv(self.norm_attention(x)).chunk(3, dim=-1)
        shape = (batch, context, self.heads, width // self.heads)
        attended = functional.scaled_dot_product_attention(
            q.view(shape).transpose(1, 2),
            k.view(shape).transpose(1, 2),
            v.view(shape).transpose(1, 2),
            is_causal=True,
        )
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(batch, context, width)))
        result: Tensor = x + self.dropout(self.feed(self.norm_feed(x)))
        return result


class Gpt(nn.Module):
    """Byte-level GPT; ``forward`` returns the mean next-byte loss, a scalar."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.statistics = nn.BatchNorm1d(size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss; ``tokens`` and ``targets`` are int64 of shape ``(batch, context)``."""
        x = embed(self, tokens)
        for block in self.blocks:
            x = block(x)
        return next_byte_loss(self.head(self.norm(x)), targets)


class Stage(nn.Module):
    """One stage of a pipeline: some blocks of a :class:`Gpt`, under the names that they have in the whole model.

    Args:
        gpt: the whole model.
        index: index of this stage.
        parts: number of stages.
    """

    def __init__(self, gpt: Gpt, index: int, parts: int) -> None:
        super().__init__()
        self.is_first, self.is_last = index == 0, index == parts - 1
        if self.is_first:
            self.tokens, self.positions, self.statistics = gpt.tokens, gpt.positions, gpt.statistics
        edges = [len(gpt.blocks) * i // parts for i in range(parts + 1)]
        own = range(edges[index], edges[index + 1])
        self.blocks = nn.ModuleDict({str(i): gpt.blocks[i] for i in own})
        if self.is_last:
            self.norm, self.head = gpt.norm, gpt.head

    def forward(self, x: Tensor) -> Tensor:
        """Return the stage's output: logits from the last stage, otherwise activations.

        ``x`` are tokens in the first stage, otherwise activations.
        """
        if self.is_first:
            x = embed(self, x)
        for block in self.blocks.values():
            x = block(x)
        if self.is_last:
            x = self.head(self.norm(x))
        return x


def embed(model: Gpt | Stage, tokens: Tensor) -> Tensor:
    """Return the activations for the first block, shape ``(batch, context, width)``.

    ``tokens``: ``(batch, context)``.
    """
    places = torch.arange(tokens.shape[1], device=tokens.device)
    x: Tensor = model.tokens(tokens) + model.positions(places)
    return model.statistics(x.flatten(0, 1)).view_as(x)  # type: ignore[no-any-return]


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of predicted and true next bytes, a scalar."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
