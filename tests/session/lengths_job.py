"""A job whose batches have several lengths, and whose model keeps tables for the longest batch so far.

Usage: ``lengths_job.py FORM``. ``FORM``: ``attributes`` (each rank has batches of other lengths), ``buffers`` (outside
of the ``state_dict``, the same lengths on all ranks), ``unsynced`` (such buffers with other lengths on each rank, and
no broadcast of buffers), ``sharded`` (attributes, under ``fully_shard``) or ``stretched`` (all entries depend on the
size of the table). Faults and the result are those of ``tests/others/beat.py``.
"""

from __future__ import annotations

import sys
import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import holdfast
from tests.others.beat import beat, end

(FORM,) = sys.argv[1:]
STEPS = 12
FEATURES = 4
BEGIN = 3


def positions(length: int) -> Tensor:
    """Return the table for batches up to ``length``: (length, FEATURES)."""
    return torch.outer(torch.arange(length, dtype=torch.float32), torch.linspace(0.1, 0.4, FEATURES)).cos()


class Attributes(nn.Module):
    """Tables in plain attributes: with their size in the table, in a number, and for two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Tensor | None = None
        self.extend(torch.zeros(1, BEGIN, FEATURES))
        self.size = 0
        self.mask: Tensor | None = None

    def extend(self, batch: Tensor) -> None:
        """Make ``first`` larger if the batch is longer."""
        if self.first is not None:
            if self.first.size(1) >= batch.size(1):
                if self.first.dtype != batch.dtype:
                    self.first = self.first.to(batch.dtype)
                return
        table = torch.zeros(batch.size(1), FEATURES)
        table[:, ::2] = positions(batch.size(1))[:, ::2]
        self.first = table.unsqueeze(0).to(batch.dtype)

    def make(self, length: int) -> None:
        """Make ``table`` for a length. ``stretched``: all entries depend on the length."""
        self.size = length
        self.table = positions(length) / (length if FORM == "stretched" else 1)

    def forward(self, batch: Tensor) -> Tensor:
        """Add the positions to a batch, of shape (1, length, FEATURES), and mix it."""
        length = batch.size(1)
        self.extend(batch)
        assert self.first is not None
        batch = batch + self.first[:, : batch.size(1)]
        if length > self.size:
            self.make(length)
        batch = batch + self.table[:length]
        if self.mask is None or self.mask.size(0) < length:
            self.mask = torch.full((length, length), -1e9).triu(1)
        weights = (batch @ batch.transpose(1, 2) + self.mask[:length, :length]).softmax(-1)
        return weights @ batch


class Buffers(nn.Module):
    """Tables in buffers outside of the ``state_dict``, as rotary embeddings have them."""

    table: Tensor
    late: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.make(BEGIN)
        self.register_buffer("late", None, persistent=False)

    def make(self, length: int) -> None:
        """Make ``table`` for a length."""
        self.longest = length
        self.register_buffer("table", positions(length)[None], persistent=False)

    def forward(self, batch: Tensor) -> Tensor:
        """Multiply a batch, of shape (1, length, FEATURES), by the tables."""
        length = batch.shape[1]
        if length > self.longest:
            self.make(length)
        if self.late is None or self.late.shape[0] < length:
            self.register_buffer("late", positions(length), persistent=False)
        assert self.late is not None
        return batch * self.table[:, :length] * self.late[:length]


class Net(nn.Module):
    """A model with tables."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.tables = Attributes() if FORM in ("attributes", "sharded", "stretched") else Buffers()
        self.last = nn.Linear(FEATURES, 1)

    def forward(self, batch: Tensor) -> Tensor:
        """Return (1, length, 1) for a batch of shape (1, length, FEATURES)."""
        output: Tensor = self.last(self.tables(self.first(batch)))
        return output


def length_at(step: int, rank: int) -> int:
    """Return the length of a batch, between 4 and 16."""
    return 4 + (5 * step + 3 * (rank if FORM != "buffers" else 0)) % 13


def main() -> None:
    """Train."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    net = Net()
    model: nn.Module = net
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the name of the argument
        if FORM == "sharded":
            fully_shard(net)
        else:
            model = nn.parallel.DistributedDataParallel(net, broadcast_buffers=FORM != "unsynced")
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
        for step in s.steps(until=STEPS):
            with step:
                length = length_at(step.number, rank)
                batch = torch.linspace(-1, 1, length * FEATURES).reshape(1, length, FEATURES) * (rank + 1)
                optimizer.zero_grad()
                loss = model(batch).pow(2).mean()
                beat(step.number)
                loss.backward()
                optimizer.step()
    end(model)


main()
