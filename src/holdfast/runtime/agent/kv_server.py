"""The key-value store inside an agent, for the rendezvous of process groups. It reads no clock.

Keys are text, values bytes. The callers put a prefix per generation before each key, so a new generation never reads
keys of an old one. Each change is appended to a log in shared memory before it is answered, so the store outlives its
agent. A client sends a change again if the agent died before the answer; the change is still made once. A long log is
replaced by a new file with the current keys and the answers that clients may request again. If shared memory had no
room to log a change, the log is replaced in the same way as soon as there is room. Until then a successor agent would
not have that change.

The keys stay until all workers of the job start again, or the run ends. Workers of other nodes may need them after the
last worker of this node is gone.

Only ``wait`` blocks. Meaning of a reply by operation:

========== ===================================================================================
set        stores ``value`` under ``keys[0]``
get        ``value``; ``error="missing"`` when absent
add        adds ``amount`` to the decimal number under ``keys[0]`` (absent = 0); ``number`` = the sum
append     appends ``value`` to the value of ``keys[0]`` (absent = empty); ``value`` = the whole
compare_set like ``torch.distributed.Store``: ``value`` is the current value afterwards, ``ok`` = it was set
check      ``ok`` = all ``keys`` exist
wait       answers when all ``keys`` exist, or ``error="timeout"`` after ``timeout_s``
delete     ``number`` of keys removed
count      ``number`` of keys that begin with ``keys[0]`` (all keys if ``keys`` is empty)
========== ===================================================================================
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Self

import msgspec

from holdfast.core.ids import MemberId
from holdfast.core.protocol.messages import FRAME_SIZE_BYTES_MAX, KvReply, KvRequest
from holdfast.errors import ProtocolError
from holdfast.runtime.node.rundir import write_private
from holdfast.wire import FrameReader, frame

SIZE_BYTES_MAX = 256 * 1024 * 1024
KEYS_MAX = 1_000_000
LOG_SIZE_BYTES_MAX = 64 * 1024 * 1024  # a longer log is rewritten from the store if that halves it
ANSWERS_KEPT = 64  # replies kept per member

Replies = list[tuple[MemberId, KvReply]]


class _Change(msgspec.Struct, frozen=True, tag="change"):
    """A log record: a change that a member requested."""

    who: MemberId
    request: KvRequest


class _Key(msgspec.Struct, frozen=True, tag="key"):
    """A log record of one key and its value, written when the log is replaced by a shorter one."""

    key: str
    value: bytes


class _KvPlace(msgspec.Struct, frozen=True, tag="place"):
    """A log record: the number of the start (of all workers) of the keys, and the node that serves the keys."""

    attempt: int
    home: str


class _Answer(msgspec.Struct, frozen=True, tag="answer"):
    """A log record: the reply to a member's request to change the store.

    It is written when the log is replaced by a shorter one, because the member may send the request again.
    """

    who: MemberId
    reply: KvReply


_Line = _Change | _Key | _KvPlace | _Answer
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[_Line] = msgspec.msgpack.Decoder(_Line)


class KvServer:
    """The key-value store of one agent, created by :meth:`open`. Its methods return replies, which the caller sends.

    Attributes:
        attempt: the number of the job's start (of all workers) to which the keys belong; -1 if unknown.
        home: the node whose agent has the keys of this node's workers; empty means this node.
    """

    def __init__(self, log: Path, fd: int) -> None:
        self.attempt = -1
        self.home = ""
        self._log = log
        self._fd = fd
        self._shorten_at_bytes = LOG_SIZE_BYTES_MAX
        self._lacks = False  # True: a change that was made is missing in the log
        self._data: dict[str, bytes] = {}
        self._size_bytes = 0
        self._waits: dict[tuple[MemberId, int], tuple[float, tuple[str, ...]]] = {}
        self._answers: dict[MemberId, dict[int, KvReply]] = {}
        self._reads: dict[str, Callable[[KvRequest], KvReply]] = {
            "get": self._get,
            "check": self._check,
            "count": self._count,
        }
        self._changes: dict[str, Callable[[KvRequest], KvReply]] = {
            "set": self._set,
            "add": self._add,
            "append": self._append,
            "compare_set": self._compare_set,
            "delete": self._delete,
        }

    @classmethod
    def open(cls, log: Path) -> Self:
        """Return the store with the log file ``log``, and with the keys that an earlier agent logged there.

        Raises:
            OSError: the file cannot be written.
        """
        server = cls(log, _open(log))
        server._recall()
        return server

    def request(self, now: float, who: MemberId, request: KvRequest) -> Replies:
        """Execute one request of member ``who``, and return the replies that are due now.

        A ``wait`` is answered when its keys exist. ``now`` is in seconds, on the same clock as for :meth:`expire`.
        """
        if request.op == "wait":
            if all(key in self._data for key in request.keys):
                return [(who, KvReply(request_id=request.request_id))]
            self._waits[who, request.request_id] = (now + request.timeout_s, request.keys)
            return []
        if request.op != "count" and not request.keys:
            return [(who, KvReply(request_id=request.request_id, ok=False, error="missing"))]
        if request.op in self._reads:
            return [(who, self._reads[request.op](request))]
        answered = self._answers.get(who, {}).get(request.request_id)
        if answered is not None:
            return [(who, answered)]
        self._write(_Change(who, request))
        return [(who, self._change(who, request)), *self._wake()]

    def expire(self, now: float) -> Replies:
        """Return a ``timeout`` reply for each ``wait`` request whose time limit has passed at ``now``, in seconds."""
        over = [wait for wait, (deadline, _) in self._waits.items() if deadline <= now]
        return [
            (who, KvReply(request_id=number, ok=False, error="timeout")) for who, number in self._drop(over)
        ]

    def forget(self, who: MemberId) -> None:
        """Drop the unanswered ``wait`` requests of a member that is gone."""
        self._drop([wait for wait in self._waits if wait[0] == who])

    def begin(self, attempt: int) -> None:
        """Begin the ``attempt``-th start of all workers: drop the keys of earlier starts.

        A repeated call does nothing.
        """
        if attempt > self.attempt:
            self.attempt = attempt
            self._clear()
            self._write(self._place)

    def live_at(self, home: str) -> None:
        """Set the node whose agent has the keys of this node's workers; empty means this node."""
        if home != self.home:
            self.home = home
            self._write(self._place)

    @property
    def _place(self) -> _KvPlace:
        return _KvPlace(self.attempt, self.home)

    def _clear(self) -> None:
        os.ftruncate(self._fd, 0)
        self._lacks = False
        self._shorten_at_bytes = LOG_SIZE_BYTES_MAX
        self._data.clear()
        self._answers.clear()
        self._waits.clear()
        self._size_bytes = 0

    def _change(self, who: MemberId, request: KvRequest) -> KvReply:
        reply = self._changes[request.op](request)
        self._note(who, reply)
        return reply

    def _note(self, who: MemberId, reply: KvReply) -> None:
        answers = self._answers.setdefault(who, {})
        answers[reply.request_id] = reply
        if len(answers) > ANSWERS_KEPT:
            del answers[next(iter(answers))]

    def _write(self, line: _Change | _KvPlace) -> None:
        """Append a record to the log, before the change is made.

        If shared memory is full, the change is made without a record.
        """
        data = frame(_ENCODER.encode(line))
        try:
            if self._lacks or os.fstat(self._fd).st_size > self._shorten_at_bytes:
                self._shorten()
                self._lacks = False
            size_bytes = os.fstat(self._fd).st_size
            if os.write(self._fd, data) < len(data):
                self._lacks = True
                os.ftruncate(self._fd, size_bytes)
        except OSError:
            self._lacks = True

    def _shorten(self) -> None:
        """Replace the log atomically by a shorter one with the same content.

        A successor finds the old or the new file.
        """
        lines: list[_Line] = [self._place]
        lines += [_Key(key, value) for key, value in self._data.items()]
        lines += [_Answer(who, reply) for who, kept in self._answers.items() for reply in kept.values()]
        data = b"".join(frame(_ENCODER.encode(line)) for line in lines)
        write_private(self._log, data)
        before, self._fd = self._fd, _open(self._log)
        os.close(before)
        # Twice the size: the log of a large store would otherwise be rewritten with every change.
        self._shorten_at_bytes = max(LOG_SIZE_BYTES_MAX, 2 * len(data))

    def _read(self, line: _Line) -> None:
        match line:
            case _Change():
                self._change(line.who, line.request)
            case _Key():
                self._store(line.key, line.value)
            case _KvPlace():
                self.attempt, self.home = line.attempt, line.home
            case _Answer():
                self._note(line.who, line.reply)

    def _recall(self) -> None:
        """Restore the store from its log. An incomplete record at the end was never answered, so it is cut off."""
        reader = FrameReader(FRAME_SIZE_BYTES_MAX)
        whole_bytes = 0
        reader.feed(self._log.read_bytes())
        try:
            while (payload := reader.next()) is not None:
                self._read(_DECODER.decode(payload))
                whole_bytes += len(frame(payload))
            os.ftruncate(self._fd, whole_bytes)
        except (ProtocolError, msgspec.MsgspecError):
            self._clear()  # a worker that waits for a lost key gets a timeout and rebuilds its group

    def _drop(self, waits: list[tuple[MemberId, int]]) -> list[tuple[MemberId, int]]:
        for wait in waits:
            del self._waits[wait]
        return waits

    def _wake(self) -> Replies:
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


def _open(log: Path) -> int:
    return os.open(log, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
