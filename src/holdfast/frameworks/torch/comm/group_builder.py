"""The construction of inner groups: plain C++ ``ProcessGroup`` objects with gloo and/or NCCL backends.

An inner group carries the collectives of a reconfigurable group for one generation. It is a C++ group and not a bare
backend: a backend lacks some methods of a group, and a missing method would look like a fault.
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

from holdfast.errors import GroupError, HoldfastError
from holdfast.frameworks.torch import private_api
from holdfast.frameworks.torch.comm.gloo_abort import Endpoints, Recorder, connect
from holdfast.frameworks.torch.comm.nccl_abort import Abort, Abortable, error_of
from holdfast.frameworks.torch.private_api import Backend, PrefixStore, Store

GLOO = "gloo"
NCCL = "nccl"


@dataclass(frozen=True)
class GroupSpec:
    """The parameters from which a group can be built again.

    Attributes:
        name: key space inside a generation, equal on all members: global ranks and ordinal (see ``order``).
        order: sort key by which all ranks rebuild their groups: (global ranks, ordinal). The global ranks are empty
            for the default group. The ordinal counts the groups of the same ranks.
        rank, world_size: rank of this process in the group, and size of the group.
        backends: pairs (device type, ``gloo`` or ``nccl``).
        timeout: timeout of collectives.
        options: the user's ``pg_options`` (NCCL only), or None.
        device: the device that the default group was bound to, or None.
        place: line of code that made the group, as ``train.py:31``.
    """

    name: str
    order: tuple[tuple[int, ...], int]
    rank: int
    world_size: int
    backends: tuple[tuple[str, str], ...]
    timeout: timedelta
    options: Any = None
    device: torch.device | None = None
    place: str = ""


class BuiltGroup:
    """The inner group of one generation, made by :func:`build`."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        store: Store,
        endpoints: Sequence[Endpoints],
        abortable: Sequence[Abortable],
        recorder: Any = None,
    ) -> None:
        self._group = group
        self._kept = (
            store,
            recorder,
        )  # NCCL connects late, and C++ keeps neither the Python object of a store nor a hook
        self._endpoints = endpoints
        self._abortable = abortable
        self._lock = threading.Lock()
        self._abort: Abort | None = None
        self._burial: threading.Thread | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The C++ process group."""
        return self._group

    def unsevered(self) -> Sequence[Abortable]:
        """Return the NCCL backends whose abort has not begun."""
        return self._abortable if self._abort is None else ()

    def sever(self, abort: Abort | None = None) -> None:
        """Shut down gloo's sockets and begin the abort of NCCL. Idempotent, from any thread.

        Afterwards dropping the last reference does not destroy the group, because its destructor joins threads that may
        wait for a long time.

        Args:
            abort: the common abort of the NCCL backends of several groups, this group's included. If None, make and
                start an abort for this group alone.
        """
        with self._lock:
            if self._abort is None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
                self._abort = abort or Abort(self._abortable).start()
        for endpoints in self._endpoints:
            endpoints.shutdown()

    def severed(self) -> bool:
        """Return True unless an abort of NCCL is still running; also True if no abort was begun."""
        return self._abort is None or self._abort.done

    def error(self) -> str:
        """Return an error that NCCL found outside of the collectives, or an empty text."""
        return next(filter(None, map(error_of, self.unsevered())), "")

    def connected(self) -> bool:
        """Return True if NCCL has already connected this group."""
        return any(private_api.is_connected(backend) for backend in self._abortable)

    def close(self) -> None:
        """Shut down a healthy group and close duplicated sockets.

        The threads of gloo are joined when the caller drops this object.
        """
        if self._abort is None:
            self._group.shutdown()
        for endpoints in self._endpoints:
            endpoints.close()

    def bury(self) -> None:
        """Release the group's resources after :meth:`sever`: duplicated sockets at once, the C++ group in a thread."""
        self.close()
        self._burial = threading.Thread(target=self._destroy, name="holdfast-burial", daemon=True)
        self._burial.start()

    def buried(self, timeout_s: float = 0.0) -> bool:
        """Return True if the destruction begun by :meth:`bury` has ended, after a wait of at most ``timeout_s``."""
        if self._burial is not None:
            self._burial.join(timeout_s)
        return self._burial is not None and not self._burial.is_alive()

    def _destroy(self) -> None:
        """Drop the last reference to the C++ group; its destructor runs in this thread, without Python's lock.

        A group of NCCL holds device memory and the tensors of its collectives. The destructor would wait for an abort
        in progress, so this method waits first. If an abort never returns, the group is never destroyed.
        """
        if self._abort is not None:
            self._abort.wait()
        self._abortable = ()
        group = self._group
        del self._group, self._kept
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))  # taken in :meth:`sever`


def build(
    spec: GroupSpec,
    store: Store,
    connect_timeout: timedelta,
    stop: Callable[[], str],
    connect_on: torch.device | None = None,
) -> BuiltGroup:
    """Build the inner group of ``spec`` and connect its members through ``store``.

    Args:
        connect_timeout: bound of the connection phase.
        stop: returns a reason to stop waiting for the peers, or an empty text.
        connect_on: the device on which NCCL connects at once; if None, it connects at its first collective.

    Returns:
        The connected group.

    Raises:
        GroupError: the members did not find each other, or ``stop`` has returned a reason.
    """
    nccl = any(backend == NCCL for _, backend in spec.backends)
    group = private_api.new_inner_group(store, spec.rank, spec.world_size, spec.name, nccl)
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
                    made[name] = _nccl(spec, prefixed, connect_on, stop, abortable)
                private_api.number_collectives(made[name])
            private_api.give_backend(group, device, made[name], name == NCCL)
    except HoldfastError:
        raise
    except RuntimeError as error:
        raise GroupError(
            f"process group {spec.name} (rank {spec.rank} of {spec.world_size}) could not be built: {error}"
        ) from error
    recorder = None
    if NCCL in made:
        recorder = private_api.record_collectives(group, made[NCCL], spec.order[0] or range(spec.world_size))
        if spec.device is not None:
            group.bound_device_id = spec.device
    return BuiltGroup(group, store, endpoints, abortable, recorder)


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
    private_api.bound_work(backend, spec.timeout)
    private_api.name_backend(backend, spec.order[0], spec.name)
    return backend


def _nccl(
    spec: GroupSpec,
    store: Store,
    connect_on: torch.device | None,
    stop: Callable[[], str],
    abortable: list[Abortable],
) -> Backend:
    """Make an NCCL backend in a separate thread, which is abandoned if a fault comes first (:func:`connect`).

    While NCCL connects, it waits for its peers. Only an abort ends that wait.
    """
    options = private_api.nccl_options(spec.options, spec.timeout, spec.order[0], spec.name)
    device = private_api.nccl_device(spec.device or connect_on)
    begun: list[Any] = []

    def make() -> Backend:
        backend = private_api.new_nccl(store, spec.rank, spec.world_size, options, device)
        begun.append(backend)
        if connect_on is not None:
            backend.eager_connect_single_device(connect_on)
        return cast(Backend, backend)

    try:
        made = connect(make, stop)
    except GroupError:
        Abort(begun).start()
        raise
    abortable.append(cast(Abortable, made))
    return made
