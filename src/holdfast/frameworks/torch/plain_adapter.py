"""The adapter for PyTorch with torch's own process groups: a fault restarts all workers.

It is used where Holdfast's groups cannot be installed. A process cannot leave a broken collective, and a group cannot
be rebuilt. So no block runs twice in one process: it is neither rehearsed nor checked by a second run. Votes use a
separate gloo group of torch. The state of a rank at the start of its step can still be saved before all workers
restart.
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
"""Texts that identify torch's error for a lost connection, which is a plain RuntimeError."""


class PlainTorchAdapter(TorchAdapter):
    """The :class:`TorchAdapter` for torch's own process groups; arguments and errors are the same."""

    own_groups: ClassVar[bool] = False

    def __init__(
        self, model: Models, optimizer: Any, scheduler: Any, scaler: Any, extras: dict[str, Any], seed: int
    ) -> None:
        super().__init__(model, optimizer, scheduler, scaler, extras, seed)
        self._voters = dist.new_group(backend="gloo") if self.world_size > 1 else None

    def is_fault(self, error: BaseException) -> bool:
        """Return True if ``error`` means that a peer is lost.

        In this case, poison this process and call the callbacks that report a fault, before the return.
        """
        if self.world_size == 1 or not _lost_peer(error):
            return False
        self._fabric.broke("a collective", error, self._fabric.epoch)
        return True

    def vote(self, vector: list[int]) -> list[int]:
        """Return the sum of ``vector`` over all ranks. Raises: PeerLost."""
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
        """Raise GroupError: torch's own groups cannot be rebuilt."""
        raise GroupError("torch's own process groups cannot be rebuilt in place: the workers must restart")

    def rehearse(self) -> bool:
        """Return False: no newcomer joins, so no step is rehearsed."""
        return False

    def go_alone(self, *, first: bool, suspected: bool) -> bool:
        """Return False: no block can run without peers."""
        return False

    def _heal(self) -> None:
        """Do nothing: this process runs no further block, so its wrappers need no reset."""


def _lost_peer(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _TRANSPORTS)
