"""The connections of one process group, and the means to replace them.

torch 2.14 gave its backends an interface for new connections: ``supports_reconfigure``, ``get_reconfigure_handle()``,
``reconfigure(uuid, handles, timeout)`` and ``abort()``. :class:`Communicator` has the same methods, so torch's
implementation and Holdfast's can be compared (``bench/communicators.py``) and exchanged. For gloo on torch 2.15
Holdfast's is better: torch's ``abort()`` frees no rank from a collective, and its new connections take three times as
long. The figures and the decision are in ``docs/design/0024-communicators.md``.

Invariants:
1. A refused attempt to connect (:class:`~holdfast.errors.GroupError`) leaves the previous group unchanged.
2. A uuid is used for one attempt: the ranks exchange their addresses under it while they connect.
3. No caller waits for the end of a group that was replaced: see ``CommState.bury``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from holdfast.errors import GroupError
from holdfast.frameworks.torch.comm.comm_state import CommState
from holdfast.frameworks.torch.comm.group_builder import BuiltGroup, GroupSpec, build
from holdfast.frameworks.torch.private_api import Store


class Communicator(Protocol):
    """The connections of one group, with the methods of torch's reconfigure interface (2.14)."""

    @property
    def group(self) -> dist.ProcessGroup:
        """The C++ group of the newest successful attempt to connect. Raises: GroupError before the first success."""

    @property
    def supports_reconfigure(self) -> bool:
        """True if :meth:`reconfigure` can replace the connections."""

    def get_reconfigure_handle(self) -> str:
        """Return the handle of this rank, a text that identifies it in :meth:`reconfigure`."""

    def reconfigure(self, uuid: str, handles: Sequence[str], timeout: timedelta) -> None:
        """Replace the connections of this rank to its peers. All ranks call it.

        Args:
            uuid: name of the attempt: equal on all ranks, new in each attempt.
            handles: handles of all ranks, by rank.
            timeout: bound of the attempt.

        Raises:
            GroupError: the attempt was refused, or the peers did not find each other; the previous group is unchanged.
        """

    def abort(self) -> None:
        """Make every collective in progress end with an error; idempotent, from any thread, returns at once."""


class FreshGroups:
    """A communicator that makes a new C++ group in each attempt to connect and drops the previous one on success.

    Args:
        fabric: stops an attempt if this process is poisoned, and destroys the replaced group.
        spec: the parameters of the group.
        stores: ``stores(uuid, timeout)`` returns the store through which the ranks exchange their addresses.
    """

    def __init__(self, fabric: CommState, spec: GroupSpec, stores: Callable[[str, timedelta], Store]) -> None:
        self.spec = spec
        self.built: BuiltGroup | None = None
        self._fabric = fabric
        self._stores = stores

    @property
    def group(self) -> dist.ProcessGroup:
        if self.built is None:
            raise GroupError(
                f"process group {self.spec.name} has no connections: it was destroyed, or not rebuilt yet"
            )
        return self.built.group

    @property
    def supports_reconfigure(self) -> bool:
        return True

    def get_reconfigure_handle(self) -> str:
        """Return the handle of this rank: a name, not an address. The ranks exchange addresses through the store."""
        return _handle(self.spec, self.spec.rank)

    def all_handles(self) -> list[str]:
        """Return the handles (names) of all ranks of the group, by rank."""
        return [_handle(self.spec, rank) for rank in range(self.spec.world_size)]

    def reconfigure(self, uuid: str, handles: Sequence[str], timeout: timedelta) -> None:
        if list(handles) != self.all_handles():
            raise GroupError(
                f"process group {self.spec.name} cannot be connected to other ranks than it was made for: "
                f"{', '.join(handles)}"
            )
        stopped = self._fabric.stopped()
        built = build(self.spec, self._stores(uuid, timeout), timeout, stopped, self._connect_on())
        before, self.built = self.built, built
        if before is not None:
            self._fabric.bury(before)

    def abort(self) -> None:
        if self.built is not None:
            self._fabric.sever([self.built])

    def close(self) -> None:
        """Shut down the present group, which is healthy."""
        built, self.built = self.built, None
        if built is not None:
            built.close()

    def _connect_on(self) -> torch.device | None:
        """Return the device on which NCCL connects at once; None if it connects at its first collective.

        A fault can interrupt the connecting of NCCL only in the first case, and not inside a collective.
        """
        if self.spec.device is not None:
            return self.spec.device
        if self.built is not None and self.built.connected():
            return torch.device("cuda", torch.cuda.current_device())
        return None


def _handle(spec: GroupSpec, rank: int) -> str:
    return f"{spec.name}/{rank}"
