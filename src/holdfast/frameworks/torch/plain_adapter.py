"""PyTorch with its own process groups, where Holdfast's cannot stand behind them: a fault restarts all workers.

A broken collective cannot be left, and a group cannot be rebuilt. So no block is run again in the same process: a block
is neither rehearsed nor checked by a second run. Votes go over a group of torch's own, and what a rank had at the start
of its step can still be saved before all start again.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist

from holdfast.core.ids import Generation
from holdfast.errors import GroupError, PeerLost
from holdfast.frameworks.torch.adapter import TorchAdapter
from holdfast.frameworks.torch.state.parameter_names import Models

_TRANSPORTS = ("gloo/", "NCCL", "store")
"""Part of what torch says when a connection is lost: as a RuntimeError without a class of its own."""


class PlainTorchAdapter(TorchAdapter):
    """:class:`TorchAdapter` on torch's own process groups; arguments and errors are the same."""

    own_groups: ClassVar[bool] = False

    def __init__(
        self, model: Models, optimizer: Any, scheduler: Any, scaler: Any, extras: dict[str, Any], seed: int
    ) -> None:
        super().__init__(model, optimizer, scheduler, scaler, extras, seed)
        self._voters = dist.new_group(backend="gloo") if self.world_size > 1 else None

    def is_fault(self, error: BaseException) -> bool:
        """A collective of torch's broke: tell the others at once."""
        if self.world_size == 1 or not _lost_peer(error):
            return False
        self._fabric.broke("a collective", error, self._fabric.epoch)
        return True

    def vote(self, vector: list[int]) -> list[int]:
        """Sum over all ranks. Raises: PeerLost."""
        if self._voters is None:
            return vector
        if self.poisoned:
            raise PeerLost(f"no vote: {self.reason}")
        votes = torch.tensor(vector, dtype=torch.int64)
        try:
            dist.all_reduce(votes, group=self._voters)
        except RuntimeError as error:
            self._fabric.broke("vote", error, self._fabric.epoch)
            raise PeerLost(f"the vote broke: {error}") from error
        return [int(x) for x in votes.tolist()]

    def reconfigure(self, generation: Generation) -> None:
        """Refuse. Raises: GroupError."""
        raise GroupError("torch's own process groups cannot be rebuilt in place: the workers must restart")

    def rehearse(self) -> bool:
        """No step is rehearsed: no newcomer joins."""
        return False

    def go_alone(self, *, first: bool, suspected: bool) -> bool:
        """No block is run without peers."""
        return False

    def _heal(self) -> None:
        """Wrappers stay as the fault left them: this process runs no other block."""


def _lost_peer(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _TRANSPORTS)
