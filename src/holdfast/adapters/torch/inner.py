"""Building the real group under a reconfigurable one: a plain C++ ``ProcessGroup`` with gloo and/or NCCL backends.

A bare backend lacks methods of a group, and the miss would look like a fault; so every inner group is a C++ group.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from holdfast.adapters.torch import private
from holdfast.adapters.torch.gloo import Endpoints, Recorder, connect
from holdfast.adapters.torch.nccl import Abort, Abortable
from holdfast.adapters.torch.private import Backend, PrefixStore, Store
from holdfast.errors import GroupError, HoldfastError

GLOO = "gloo"
NCCL = "nccl"


@dataclass(frozen=True)
class GroupSpec:
    """All that is needed to build a group again.

    Attributes:
        name: key space inside a generation, equal on all members: ordinal and global ranks.
        order: (global ranks, empty for the default group; ordinal): all ranks rebuild in this order.
        rank, world_size: of this process in the group, and of the group.
        backends: device type -> ``gloo`` or ``nccl``.
        timeout: of collectives.
        options: the user's ``pg_options`` (NCCL only), or None.
        device: the device that the default group was bound to, or None.
    """

    name: str
    order: tuple[tuple[int, ...], int]
    rank: int
    world_size: int
    backends: tuple[tuple[str, str], ...]
    timeout: timedelta
    options: Any = None
    device: torch.device | None = None


class BuiltGroup:
    """One generation of one group. Made by :func:`build`."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        store: Store,
        endpoints: Sequence[Endpoints],
        abortable: Sequence[Abortable],
    ) -> None:
        self._group = group
        self._store = store  # NCCL connects late, and C++ does not keep the Python half of a store
        self._endpoints = endpoints
        self._abortable = abortable
        self._lock = threading.Lock()
        self._aborts: list[Abort] | None = None
        self._burial: threading.Thread | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The C++ group."""
        return self._group

    def sever(self) -> None:
        """Shut gloo's sockets, begin to abort NCCL. Idempotent, from any thread.

        Whoever lets go of the group from now on does not destroy it: its destructor joins threads that may wait for a
        long time yet.
        """
        with self._lock:
            if self._aborts is None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
                self._aborts = [Abort(backend).start() for backend in self._abortable]
        for endpoints in self._endpoints:
            endpoints.shutdown()

    def severed(self) -> bool:
        """True when every abort that was begun has returned."""
        return all(abort.done for abort in self._aborts or ())

    def close(self) -> None:
        """Orderly end. The threads of gloo are joined when the caller lets go of this object."""
        if self._aborts is None:
            self._group.shutdown()
        for endpoints in self._endpoints:
            endpoints.close()

    def bury(self) -> None:
        """Give back what a severed group holds: our duplicates at once, what gloo has beside the caller.

        NCCL's own end could wait for peers: with it the group stays for ever.
        """
        self.close()
        if not self._abortable:
            self._burial = threading.Thread(target=self._destroy, name="holdfast-burial", daemon=True)
            self._burial.start()

    def buried(self, timeout_s: float = 0.0) -> bool:
        """Nothing is left of a group that was to be buried."""
        if self._burial is not None:
            self._burial.join(timeout_s)
        return self._burial is not None and not self._burial.is_alive()

    def _destroy(self) -> None:
        """The destructor runs, without the interpreter's lock, where the last reference ends: here."""
        group = self._group
        del self._group
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))  # of :meth:`sever`


def build(spec: GroupSpec, store: Store, connect_timeout: timedelta, stop: Callable[[], str]) -> BuiltGroup:
    """Connect the members of ``spec`` through ``store``.

    Args:
        connect_timeout: bound of the connection phase.
        stop: non-empty: do not wait for the peers any longer.

    Raises:
        GroupError: the members did not find each other, or stopped.
    """
    nccl = any(backend == NCCL for _, backend in spec.backends)
    group = private.new_inner_group(store, spec.rank, spec.world_size, spec.name, nccl)
    endpoints: list[Endpoints] = []
    abortable: list[Abortable] = []
    made: dict[str, Backend] = {}
    try:
        for device, name in spec.backends:
            if name not in made:
                prefixed = PrefixStore(f"{name}/", store)
                if name == GLOO:
                    made[name] = _gloo(spec, prefixed, connect_timeout, stop, endpoints)
                else:
                    made[name] = _nccl(spec, prefixed, abortable)
                private.number_collectives(made[name])
            private.give_backend(group, device, made[name], name == NCCL)
    except HoldfastError:
        raise
    except RuntimeError as error:
        raise GroupError(
            f"process group {spec.name} (rank {spec.rank} of {spec.world_size}) could not be built: {error}"
        ) from error
    if spec.device is not None and NCCL in made:
        group.bound_device_id = spec.device
        made[NCCL].eager_connect_single_device(spec.device)
    return BuiltGroup(group, store, endpoints, abortable)


def _gloo(
    spec: GroupSpec,
    store: Store,
    connect_timeout: timedelta,
    stop: Callable[[], str],
    endpoints: list[Endpoints],
) -> Backend:
    def make() -> Backend:
        return dist.ProcessGroupGloo(store, spec.rank, spec.world_size, timeout=connect_timeout)

    with Recorder() as recorder:
        backend = connect(make, stop)
    endpoints.append(recorder.endpoints(store, spec.rank, spec.world_size))
    private.bound_work(backend, spec.timeout)
    private.name_backend(backend, spec.order[0], spec.name)
    return backend


def _nccl(spec: GroupSpec, store: Store, abortable: list[Abortable]) -> Backend:
    options = private.nccl_options(spec.options, spec.timeout, spec.order[0], spec.name)
    backend = private.new_nccl(store, spec.rank, spec.world_size, options, spec.device)
    abortable.append(backend)
    return cast(Backend, backend)
