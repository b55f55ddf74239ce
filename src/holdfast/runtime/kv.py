"""The key-value store inside an agent, for the rendezvous of process groups. No I/O, no clock.

Keys are text, values bytes; callers put a prefix per generation in front, so that nothing of an old membership is ever
read by a new one. Only ``wait`` blocks. Meaning of a reply by operation:

========== ===================================================================================
set        stores ``value`` under ``keys[0]``
get        ``value``; ``error="missing"`` when absent
add        adds ``amount`` to the decimal number under ``keys[0]`` (absent = 0); ``number``
append     appends ``value``
compare_set like ``torch.distributed.Store``: ``value`` is what is stored afterwards, ``ok`` = it was set
check      ``ok`` = all ``keys`` exist
wait       answers when all ``keys`` exist, or ``error="timeout"`` after ``timeout_s``
delete     ``number`` of keys removed
count      ``number`` of keys that begin with ``keys[0]`` (all without ``keys``)
========== ===================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from holdfast.core.messages import KvReply, KvRequest

SIZE_BYTES_MAX = 256 * 1024 * 1024
KEYS_MAX = 1_000_000

W = TypeVar("W", bound=Hashable)
Replies = list[tuple[W, KvReply]]


class KvServer(Generic[W]):
    """All keys of one node's run. ``W`` names a caller; every method returns the replies to send."""

    def __init__(self) -> None:
        self._data: dict[str, bytes] = {}
        self._size_bytes = 0
        self._waits: dict[tuple[W, int], tuple[float, tuple[str, ...]]] = {}
        self._ops: dict[str, Callable[[KvRequest], KvReply]] = {
            "set": self._set,
            "get": self._get,
            "add": self._add,
            "append": self._append,
            "compare_set": self._compare_set,
            "check": self._check,
            "delete": self._delete,
            "count": self._count,
        }

    def request(self, now: float, who: W, request: KvRequest) -> Replies[W]:
        """Carry out one request; its reply may wait for other callers."""
        if request.op == "wait":
            if all(key in self._data for key in request.keys):
                return [(who, KvReply(request_id=request.request_id))]
            self._waits[who, request.request_id] = (now + request.timeout_s, request.keys)
            return []
        if request.op != "count" and not request.keys:
            return [(who, KvReply(request_id=request.request_id, ok=False, error="missing"))]
        reply = self._ops[request.op](request)
        return [(who, reply), *self._wake()]

    def expire(self, now: float) -> Replies[W]:
        """Answers ``timeout`` to waits whose time is over."""
        over = [wait for wait, (deadline, _) in self._waits.items() if deadline <= now]
        return [
            (who, KvReply(request_id=number, ok=False, error="timeout")) for who, number in self._drop(over)
        ]

    def deadline(self) -> float | None:
        """When :meth:`expire` has something to do; None: never."""
        return min((deadline for deadline, _ in self._waits.values()), default=None)

    def forget(self, who: W) -> None:
        """The caller is gone: nobody waits for its replies."""
        self._drop([wait for wait in self._waits if wait[0] == who])

    def clear(self) -> None:
        """A new set of processes begins: drop all keys and waits."""
        self._data.clear()
        self._waits.clear()
        self._size_bytes = 0

    def _drop(self, waits: list[tuple[W, int]]) -> list[tuple[W, int]]:
        for wait in waits:
            del self._waits[wait]
        return waits

    def _wake(self) -> Replies[W]:
        ready = [wait for wait, (_, keys) in self._waits.items() if all(key in self._data for key in keys)]
        return [(who, KvReply(request_id=number)) for who, number in self._drop(ready)]

    def _store(self, key: str, value: bytes) -> bool:
        size_bytes = self._size_bytes + len(value) - len(self._data.get(key, b""))
        if size_bytes > SIZE_BYTES_MAX or (key not in self._data and len(self._data) >= KEYS_MAX):
            return False
        self._data[key] = value
        self._size_bytes = size_bytes
        return True

    def _stored(self, request: KvRequest, value: bytes, number: int = 0) -> KvReply:
        if not self._store(request.keys[0], value):
            return KvReply(request_id=request.request_id, ok=False, error="full")
        return KvReply(request_id=request.request_id, value=value, number=number)

    def _set(self, request: KvRequest) -> KvReply:
        reply = self._stored(request, request.value)
        return KvReply(request_id=request.request_id, ok=reply.ok, error=reply.error)

    def _get(self, request: KvRequest) -> KvReply:
        value = self._data.get(request.keys[0])
        if value is None:
            return KvReply(request_id=request.request_id, ok=False, error="missing")
        return KvReply(request_id=request.request_id, value=value)

    def _add(self, request: KvRequest) -> KvReply:
        try:
            number = int(self._data.get(request.keys[0], b"0")) + request.amount
        except ValueError:
            return KvReply(request_id=request.request_id, ok=False, error="not a number")
        return self._stored(request, str(number).encode(), number)

    def _append(self, request: KvRequest) -> KvReply:
        return self._stored(request, self._data.get(request.keys[0], b"") + request.value)

    def _compare_set(self, request: KvRequest) -> KvReply:
        current = self._data.get(request.keys[0])
        if (current is None and request.expected == b"") or current == request.expected:
            return self._stored(request, request.value)
        value = request.expected if current is None else current
        return KvReply(request_id=request.request_id, value=value, ok=False)

    def _check(self, request: KvRequest) -> KvReply:
        return KvReply(request_id=request.request_id, ok=all(key in self._data for key in request.keys))

    def _delete(self, request: KvRequest) -> KvReply:
        gone = [self._data.pop(key) for key in request.keys if key in self._data]
        self._size_bytes -= sum(len(value) for value in gone)
        return KvReply(request_id=request.request_id, number=len(gone), ok=bool(gone))

    def _count(self, request: KvRequest) -> KvReply:
        prefix = request.keys[0] if request.keys else ""
        number = sum(1 for key in self._data if key.startswith(prefix))
        return KvReply(request_id=request.request_id, number=number)
