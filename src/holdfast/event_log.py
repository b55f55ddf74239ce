"""The event log of a run (``events.jsonl``), which status, report and a restarted controller read.

One JSON object per line:

    ``{"v":1,"seq":12,"t_wall":...,"t_mono":...,"who":"controller","kind":"fenced","data":{...},"crc":"<16 hex>"}``

``t_wall`` is Unix time, ``t_mono`` CLOCK_MONOTONIC of this machine, both in seconds. ``crc`` is xxh3-64 of the bytes of
the line before ``,"crc"``. Several processes append (under a file lock), so an append reads the last ``seq`` from the
file. Before that it cuts off an incomplete last line, which a process that died has left.

Disk space. A decision is logged before it is executed, so a run whose log has no disk space can neither recover nor
end. A daemon (agent or controller) therefore reserves blocks after the end of its log file (``fallocate``), which no
other file can use. If the file system cannot reserve blocks, or they are used up, an append waits for free space.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, Self

import msgspec
import xxhash

from holdfast.core.protocol.messages import Field
from holdfast.errors import NO_ROOM, ProtocolError

SCHEMA_VERSION = 1
LINE_SIZE_BYTES_MAX = 1024 * 1024
ROOM_WAIT_S = 120.0  # limit of a daemon's wait for disk space
ROOM_LOOK_S = 0.2
# Size of the reserved blocks after the end of a daemon's log. When the disk becomes full, at least half is left.
ROOM_KEPT_BYTES = 256 * 1024
_CRC_FIELD = b',"crc":"'
_CRC_SIZE_BYTES = len(_CRC_FIELD) + 16 + len(b'"}')
_TAIL_SIZE_BYTES = 64 * 1024
_BLOCK_SIZE_BYTES = 1024 * 1024
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # FALLOC_FL_*: the file does not become longer; free the blocks


class Event(msgspec.Struct, frozen=True):
    """One line of the log."""

    v: int
    seq: int
    t_wall: float
    t_mono: float
    who: str
    kind: str
    data: dict[str, Any]


class LogReading(msgspec.Struct, frozen=True):
    """The events of a log up to its last complete line. Later bytes are an incomplete line.

    ``damaged`` has the numbers (from 1) of complete lines whose checksum or form is wrong. These lines are left out
    of ``events``.
    """

    events: list[Event]
    damaged: list[int]


def encode_line(event: Event) -> bytes:
    """Return an event as a line of the log, with checksum and line end."""
    body = msgspec.json.encode(event)[:-1]
    return body + _CRC_FIELD + f"{xxhash.xxh3_64_intdigest(body):016x}".encode() + b'"}\n'


def decode_line(line: bytes) -> Event:
    """Return the event of a line (without the line end); the inverse of :func:`encode_line`.

    Raises:
        ProtocolError: the checksum is wrong, or the line is not an event of this schema.
    """
    body, tail = line[:-_CRC_SIZE_BYTES], line[-_CRC_SIZE_BYTES:]
    if tail != _CRC_FIELD + f"{xxhash.xxh3_64_intdigest(body):016x}".encode() + b'"}':
        raise ProtocolError("the checksum of a line of the event log is wrong")
    try:
        event = msgspec.json.decode(body + b"}", type=Event)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"a line of the event log has a wrong form: {error}") from error
    if event.v != SCHEMA_VERSION:
        raise ProtocolError(f"the event log has schema version {event.v}, not {SCHEMA_VERSION}")
    return event


def read(path: Path) -> LogReading:
    """Return all events of the log up to its last complete line. A missing file is an empty log."""
    follower = Follower(path)
    return LogReading(list(follower.poll()), follower.damaged)


class Follower:
    """A reader of a log that grows.

    Args:
        path: the log; the file may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged: list[int] = []
        self._offset = 0
        self._line = 0

    def skip_to(self, offset: int) -> None:
        """Continue at the line that begins at the byte offset ``offset``."""
        self._offset = offset

    def poll(self) -> Iterator[Event]:
        """Yield the events of the lines that were completed since the last call."""
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self._offset)
            while line := _whole_line(file):
                self._offset = file.tell()
                self._line += 1
                try:
                    event = decode_line(line[:-1])
                except ProtocolError:
                    self.damaged.append(self._line)
                    continue
                yield event


def read_since(path: Path, kind: str) -> Iterator[Event]:
    """Yield the events from the newest event of kind ``kind`` on; all events if there is none.

    Earlier lines are not decoded, so the log may be long.
    """
    follower = Follower(path)
    follower.skip_to(_last_of(path, kind))
    return follower.poll()


def _last_of(path: Path, kind: str) -> int:
    """Return the byte offset of the newest valid line with an event of this kind; 0 if there is none."""
    needle = b'"kind":' + msgspec.json.encode(kind)
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return 0
    with file:
        end, rest = file.seek(0, os.SEEK_END), b""  # rest: the end of a line that begins in an earlier block
        while end > 0:
            start = max(0, end - _BLOCK_SIZE_BYTES)
            file.seek(start)
            data = file.read(end - start) + rest
            cut = data.find(b"\n") + 1 if start else 0
            if (at := _last_sound(data[cut:], needle)) >= 0:
                return start + cut + at
            end, rest = start, data[:cut]
    return 0


def _last_sound(lines: bytes, needle: bytes) -> int:
    """Return the byte offset of the last valid line that contains ``needle``; -1 if there is none."""
    at = len(lines)
    while (at := lines.rfind(needle, 0, at)) >= 0:
        first, last = lines.rfind(b"\n", 0, at) + 1, lines.find(b"\n", at)
        if last >= 0:
            with contextlib.suppress(ProtocolError):
                decode_line(lines[first:last])
                return first
    return -1


def _whole_line(file: BinaryIO) -> bytes:
    """Return the next line, or empty bytes if it is not complete.

    For a line that is longer than any event return only a line end.
    """
    piece = file.readline(LINE_SIZE_BYTES_MAX)
    too_long = False
    while len(piece) == LINE_SIZE_BYTES_MAX and not piece.endswith(b"\n"):
        piece, too_long = file.readline(LINE_SIZE_BYTES_MAX), True
    if not piece.endswith(b"\n"):
        return b""
    return b"\n" if too_long else piece


class Said(NamedTuple):
    """The time of an event: ``t_wall`` and ``t_mono`` of :class:`Event`."""

    t_wall: float
    t_mono: float


class EventSink(Protocol):
    """The interface to which events are appended."""

    def append(self, kind: str, data: Mapping[str, Field], *, durable: bool = False) -> object:
        """Append one event. If ``durable``, return after the event is on the disk."""
        ...


class EventLog:
    """An event log to which events are appended, made by :meth:`open`.

    Several processes may append at the same time, each in one thread.
    """

    def __init__(self, path: Path, who: str, fd: int, room_wait_s: float) -> None:
        self.path = path
        self.who = who
        self.room_wait_s = room_wait_s
        self._fd = fd
        self._end = -1  # offset up to which ``_seq`` is known
        self._seq = 0
        self._kept_end = 0  # offset up to which blocks are reserved
        if room_wait_s:
            self._keep_room(os.fstat(fd).st_size)

    @classmethod
    def open(cls, path: Path, who: str, *, room_wait_s: float = 0.0) -> Self:
        """Open or make the log at ``path`` (mode 0600). ``who`` names this process in its events.

        Args:
            room_wait_s: seconds for which an append waits for free space. Only a daemon gives more than 0, and blocks
                are then reserved for its lines. If these blocks are used up, the append waits, and with it the action
                that the event announces. A daemon that ended instead would lose its state.

        Raises:
            OSError: the log cannot be written.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        return cls(path, who, fd, room_wait_s)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def give_back_room(self) -> None:
        """Free the reserved blocks after the last line. A daemon calls this at the end of a run."""
        _allocate(self._fd, _KEEP_SIZE | _PUNCH_HOLE, os.fstat(self._fd).st_size, 2 * ROOM_KEPT_BYTES)

    def append(
        self, kind: str, data: Mapping[str, Field], *, durable: bool = False, said: Said | None = None
    ) -> Event:
        """Append one event.

        If ``durable``, return after the event is on the disk. ``said``: the event's time; None means now.

        Raises:
            OSError: the disk is full (for ``room_wait_s`` seconds) or gone. The log then has no incomplete line.
            ProtocolError: the event is longer than ``LINE_SIZE_BYTES_MAX``.
        """
        until_s = time.monotonic() + self.room_wait_s
        while True:
            try:
                event = self._append(kind, data, said)
                break
            except OSError as error:
                if error.errno not in NO_ROOM or time.monotonic() >= until_s:
                    raise
            time.sleep(ROOM_LOOK_S)
        if durable:
            self.sync()
        return event

    def sync(self) -> None:
        """Write all appended events to the disk. The file is not locked, so no other process waits for this.

        Raises:
            OSError: the disk is gone.
        """
        os.fdatasync(self._fd)

    def _append(self, kind: str, data: Mapping[str, Field], said: Said | None) -> Event:
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            self._catch_up()
            at = said or Said(time.time(), time.monotonic())
            event = Event(SCHEMA_VERSION, self._seq + 1, *at, self.who, kind, dict(data))
            line = encode_line(event)
            if len(line) > LINE_SIZE_BYTES_MAX:
                raise ProtocolError(f"an event {kind!r} of {len(line)} bytes is too long for the event log")
            self._write(line)
            self._end += len(line)
            self._seq = event.seq
            if self.room_wait_s and self._end > self._kept_end - ROOM_KEPT_BYTES // 2:
                self._keep_room(self._end)
            return event
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _keep_room(self, end: int) -> None:
        """Reserve blocks after the byte offset ``end``. On a full disk the earlier reservation stays."""
        if _allocate(self._fd, _KEEP_SIZE, end, ROOM_KEPT_BYTES):
            self._kept_end = end + ROOM_KEPT_BYTES

    def _write(self, line: bytes) -> None:
        try:
            written = os.write(self._fd, line)
            if written != len(line):
                raise OSError(
                    errno.ENOSPC,
                    f"only {written} of {len(line)} bytes of an event were written",
                    str(self.path),
                )
        except OSError:
            self._cut_at(self._end)
            raise

    def _cut_at(self, end: int) -> None:
        os.ftruncate(self._fd, end)
        self._kept_end = 0  # this also frees the reserved blocks

    def _catch_up(self) -> None:
        """Read the last ``seq`` that other processes have appended, and cut off an incomplete last line."""
        size_bytes = os.fstat(self._fd).st_size
        if size_bytes == self._end:
            return
        back_bytes = _TAIL_SIZE_BYTES
        while True:
            start = max(0, size_bytes - back_bytes)
            tail = os.pread(self._fd, size_bytes - start, start)
            whole = tail.rfind(b"\n") + 1
            if start == 0 or _last_seq(tail[:whole]) is not None:
                break
            back_bytes *= 4
        if whole < len(tail):
            self._cut_at(start + whole)
        self._end = start + whole
        self._seq = _last_seq(tail[:whole]) or 0


def _allocate(fd: int, mode: int, start: int, size_bytes: int) -> bool:
    """Reserve or free blocks of a file. Return False if the file system cannot do it, or has no free blocks."""
    failed = ctypes.CDLL(None).fallocate(fd, mode, ctypes.c_int64(start), ctypes.c_int64(size_bytes))
    return not failed


def _last_seq(data: bytes) -> int | None:
    for line in reversed(data.splitlines()):
        try:
            return decode_line(line).seq
        except ProtocolError:
            continue
    return None
