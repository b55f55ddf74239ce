"""Blocks of other copies of the model, run in this process with the batches and random numbers of those copies."""

from __future__ import annotations

import copy as copies
from collections.abc import Sequence
from typing import Any

import xxhash
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from holdfast.frameworks.common.optional_abilities import Copy
from holdfast.frameworks.torch.comm.comm_state import CommState
from holdfast.frameworks.torch.data.position import MapSource, TorchFeed, make_source, unwrapped
from holdfast.frameworks.torch.state.rng import RandomNumbers, loader_seed
from holdfast.frameworks.torch.state.state import TorchState
from holdfast.frameworks.torch.steps.block_proof import gradients_in
from holdfast.runtime.node.shm_allreduce import sum_in_votes


class OtherRanksBlocks:
    """The means to run blocks of other copies of the model in this process (``ForeignBlocks``).

    Args:
        fabric: sums vectors over all ranks.
        state: state of the session; its gradients are the result of a block.
        numbers: the random numbers of the session.
        copy: the copy that this process trains.
    """

    def __init__(self, fabric: CommState, state: TorchState, numbers: RandomNumbers, copy: Copy) -> None:
        self._fabric = fabric
        self._state = state
        self._random = numbers
        self.copy, self.numbers = copy

    def feed(self, loader: Any, copy: int, number: int = 0) -> TorchFeed | None:
        """Return the batches that copy number ``copy`` draws from the same loader; None if they are not known.

        ``number`` is the index of the loader among the loaders of its loop.
        """
        loader, device = unwrapped(loader)
        seed, draws = loader_seed(self._random.seed, number), self._random.draws(copy)
        if not isinstance(loader, DataLoader) or type(make_source(loader, seed, draws)) is not MapSource:
            return None
        sampler: Any = loader.sampler
        shares = isinstance(sampler, DistributedSampler) and type(loader.batch_sampler) is BatchSampler
        if not shares or sampler.num_replicas != self.numbers:
            return None
        other = copies.copy(sampler)
        other.rank = copy
        source = make_source(
            DataLoader(
                loader.dataset, loader.batch_size, sampler=other, drop_last=loader.drop_last,
                collate_fn=loader.collate_fn, generator=loader.generator,
            ),
            seed, draws,
        )  # fmt: skip
        source.device = device
        return TorchFeed(source)

    def act_as(self, copy: int, step: int) -> None:
        """Seed the next block with the random numbers of copy number ``copy`` at ``step``."""
        self._random.begin(copy, step, self._state.generators)

    def gradients(self) -> int | None:
        """Return the 64-bit digest of all present gradients; None if there are none."""
        total, any_there = xxhash.xxh3_64(), False
        for name, digest in gradients_in(self._state):
            any_there = True
            total.update(f"{name}:{digest};".encode())
        return int(total.intdigest()) if any_there else None

    def sum(self, vector: Sequence[int]) -> list[int]:
        """Return the sum of ``vector`` over all ranks, computed in pieces of the length of a vote. Raises: PeerLost."""
        return sum_in_votes(vector, self._fabric.reduce_vote)
