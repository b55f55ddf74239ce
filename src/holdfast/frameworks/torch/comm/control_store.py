"""The control plane's key-value store as a ``dist.Store``, through which the ranks of a process group find each other.

A TCPStore lives on one rank, dies with that rank, and its clients never reconnect. If this process has a control client
(a connection to its agent), ``env://`` and every inner group use the key-value store of the agents instead. That store
survives the loss of any rank. Each generation has its own key space. Without a control client, torch's own rendezvous
is used, and groups cannot be rebuilt in place.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from holdfast.core.ids import Generation
from holdfast.core.protocol.messages import KvReply
from holdfast.errors import GroupError
from holdfast.frameworks.torch import private_api
from holdfast.frameworks.torch.private_api import Store
from holdfast.runtime.node.flight_recorder import Flight
from holdfast.runtime.worker.worker_client import KvOp, WorkerClient

DEFAULT_TIMEOUT_S = 300.0
WAIT_SLICE_S = 0.25
"""Longest time, in seconds, for which a blocking wait for a key does not notice a fault."""

POLL_S = 0.005

_kept: list[Store] = []  # torch keeps only the C++ object of a store, whose methods need the Python object


class ControlClient(Protocol):
    """The part of :class:`holdfast.runtime.worker.worker_client.WorkerClient` that process groups need."""

    generation: Generation
    rank: int
    world_size: int
    joining: bool

    @property
    def shared(self) -> Path | None: ...
    @property
    def directory(self) -> Path | None: ...
    @property
    def several_nodes(self) -> bool: ...
    @property
    def flight(self) -> Flight | None: ...

    def kv(
        self,
        op: KvOp,
        keys: tuple[str, ...] = (),
        value: bytes = b"",
        expected: bytes = b"",
        amount: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> KvReply: ...


def control_client() -> ControlClient | None:
    """Return the control client of this process, or None.

    It is looked up at each use, because a session may start the client late.
    """
    return WorkerClient.current()


def never() -> str:
    """Return an empty text: the stop function of a store whose waits nothing interrupts."""
    return ""


class ControlStore(Store):
    """A ``dist.Store`` over :meth:`ControlClient.kv`; every key gets ``prefix``.

    Args:
        client: the control client.
        prefix: key space, e.g. ``g1.4/default.0/``.
        stop: called at least every ``WAIT_SLICE_S`` during a wait; a non-empty result (the reason) ends the wait
            with :class:`GroupError`.

    Raises (from its methods): GroupError if stopped, ``dist.DistStoreError`` on timeout.
    """

    def __init__(self, client: ControlClient, prefix: str, stop: Callable[[], str] = never) -> None:
        super().__init__()
        self._client = client
        self._prefix = prefix
        self._stop = stop
        self._timeout_s = DEFAULT_TIMEOUT_S

    def _ask(
        self, op: KvOp, key: str, *, value: bytes = b"", expected: bytes = b"", amount: int = 0
    ) -> KvReply:
        reply = self._client.kv(op, (self._prefix + key,), value=value, expected=expected, amount=amount)
        if reply.error:
            raise GroupError(f"key-value store: {op} {self._prefix + key}: {reply.error}")
        return reply

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, value=_as_bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._ask("get", key).value

    def add(self, key: str, value: int) -> int:
        return self._ask("add", key, amount=value).number

    def append(self, key: str, value: str | bytes) -> None:
        self._ask("append", key, value=_as_bytes(value))

    def check(self, keys: list[str]) -> bool:
        return self._client.kv("check", tuple(self._prefix + key for key in keys)).ok

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._ask(
            "compare_set", key, value=_as_bytes(desired_value), expected=_as_bytes(expected_value)
        ).value

    def delete_key(self, key: str) -> bool:
        return self._ask("delete", key).ok

    def num_keys(self) -> int:
        return self._ask("count", "").number

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + limit_s
        names = tuple(self._prefix + key for key in keys)
        while True:
            if reason := self._stop():
                raise GroupError(f"waiting for peers was stopped: {reason}")
            left_s = deadline - time.monotonic()
            reply = self._client.kv("wait", names, timeout_s=max(0.0, min(WAIT_SLICE_S, left_s)))
            if not reply.error:
                return
            if reply.error != "timeout":
                raise GroupError(f"waiting for peers ended: {reply.error}")
            if left_s <= 0:
                raise dist.DistStoreError(f"no peer set {', '.join(names)} within {limit_s:g} s")

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys)
        return [self._ask("get", key).value for key in keys]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._timeout_s)

    def clone(self) -> ControlStore:
        """Return this store itself, not a copy.

        The store has no connection that could be copied, and C++ would lose the Python object of a copy at once.
        """
        return self


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def agree_on_start(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a name for this start of the ranks that no earlier start has used in ``store``. All ranks call it.

    torchrun's agent keeps one store for all starts, which still holds addresses of dead processes. The agent's restart
    count cannot serve as the name, because it differs on a node that joined later. So every other rank stores a random
    value (its hello), and rank 0 draws the name. Rank 0 answers each hello with the name, under a key that contains the
    hello. An answer to the hello of a dead process is never read.

    Raises:
        GroupError: not all ranks called it within ``timeout``.
    """
    own = secrets.token_hex(8)
    store.set(f"hello/{rank}", own)
    if rank != 0:
        try:
            store.wait([f"start/{own}"], timeout)
        except dist.DistStoreError as error:
            raise GroupError(f"rank 0 did not come within {timeout.total_seconds():g} s: {error}") from error
        name = store.get(f"start/{own}").decode()
        store.add(f"came/{name}", 1)
        return name
    deadline = time.monotonic() + timeout.total_seconds()
    answered: dict[int, bytes] = {}
    while (came := store.add(f"came/{own}", 0)) < world_size - 1:
        if time.monotonic() > deadline:
            raise GroupError(
                f"{world_size - 1 - came} of {world_size} ranks did not come within {timeout.total_seconds():g} s"
            )
        for peer in range(1, world_size):
            hello = store.get(f"hello/{peer}") if store.check([f"hello/{peer}"]) else b""
            if hello != answered.get(peer, b""):
                answered[peer] = hello
                store.set(f"start/{hello.decode()}", own)
        time.sleep(POLL_S)
    return own


def install_rendezvous() -> None:
    """Make ``env://`` return the control plane's store whenever this process has a control client. Idempotent.

    Raises: UnsupportedError if this torch has no table of rendezvous handlers.
    """
    handlers, scheme = private_api.rendezvous_handlers()
    original = handlers[scheme]
    if getattr(original, "holdfast", False):
        return

    def handler(
        url: str, timeout: timedelta = timedelta(seconds=DEFAULT_TIMEOUT_S), **kwargs: object
    ) -> Iterator[tuple[Store, int, int]]:
        client = control_client()
        if client is None:
            yield from original(url, timeout=timeout, **kwargs)
            return
        store = ControlStore(client, f"g{client.generation}/world/")
        _kept.append(store)
        store.set_timeout(timeout)
        yield store, client.rank, client.world_size

    handler.holdfast = True  # type: ignore[attr-defined]
    handlers[scheme] = handler
