"""The shared-memory status page of one worker (layout: ``core/protocol/status_page.py``).

The agent creates the file before the worker starts, and reads it even after the worker is gone. The worker maps the
file and stores single words. Once the file is mapped, no function here makes a system call, except for the trap of a
drill (a fault that a rehearsal sets for a step and phase).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import xxhash

from holdfast.core.protocol.messages import OutsideCollectives
from holdfast.core.protocol.status_page import (
    EPOCH_END,
    FILE_SIZE_BYTES,
    FLIGHT_AT,
    LOCAL_SLOT_BYTES,
    LOCAL_SLOTS,
    OUTSIDE_AT,
    OUTSIDE_SIZE_BYTES,
    PAGE_MAGIC,
    PAGE_SIZE_BYTES,
    PAGE_VERSION,
    SECTION_SIZE_BYTES,
    Phase,
    TrapAction,
    Word,
    pack_state,
    unpack_state,
    unpack_trap,
)
from holdfast.errors import ProtocolError, StateError
from holdfast.runtime.node.flight_recorder import Flight

_STATE = int(Word.STATE)
_ENTERED_NS = int(Word.ENTERED_NS)
_TRAP = int(Word.TRAP)
_SECTION_AT = 8 * int(Word.SECTION)
_OUTSIDE_LENGTH = OUTSIDE_AT // 8  # the words before the JSON
_OUTSIDE_MADE = _OUTSIDE_LENGTH + 1
_OUTSIDE_TEXT_AT = OUTSIDE_AT + 16
_OUTSIDE_LENGTH_MAX = OUTSIDE_SIZE_BYTES - 16
_HEADER_WORDS = 4  # sequence, step, length, digest
_HEADER_BYTES = 8 * _HEADER_WORDS
LOCAL_SIZE_BYTES_MAX = LOCAL_SLOT_BYTES - _HEADER_BYTES


class Page:
    """One mapped status page, made with :meth:`create` or :meth:`open`. ``close`` keeps the file."""

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        self.path = path
        self._map = mapping
        self._bytes = memoryview(mapping)
        self._words = self._bytes[:PAGE_SIZE_BYTES].cast("q")
        self.flight = Flight(self._bytes[FLIGHT_AT:FILE_SIZE_BYTES], self._words)
        self._actions: dict[TrapAction, Callable[[], object]] = {}
        self._sequence = max((header[0] for header in self._headers()), default=0)

    @staticmethod
    def create(path: Path | str, *, generation: int = 0, member: int = 0, rank: int = 0) -> Page:
        """Create the file (mode 0600, zeroed, its memory reserved), and return the mapped page.

        Raises:
            OSError: the file exists, or shared memory is full.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Without this reservation, a full tmpfs would raise SIGBUS at a later store.
            os.posix_fallocate(fd, 0, FILE_SIZE_BYTES)
            page = Page(Path(path), mmap.mmap(fd, FILE_SIZE_BYTES))
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(fd)
        page[Word.VERSION] = PAGE_VERSION
        page[Word.GENERATION] = generation
        page[Word.MEMBER] = member
        page[Word.RANK] = rank
        page[Word.MAGIC] = PAGE_MAGIC
        return page

    @staticmethod
    def open(path: Path | str) -> Page:
        """Return an existing page, mapped for reading and writing.

        Raises:
            OSError: there is no such file.
            ProtocolError: the file is not a status page of this version.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size != FILE_SIZE_BYTES:
                raise ProtocolError(
                    f"status page {path} has {os.fstat(fd).st_size} bytes, not {FILE_SIZE_BYTES}"
                )
            page = Page(Path(path), mmap.mmap(fd, FILE_SIZE_BYTES))
        finally:
            os.close(fd)
        magic, version = page[Word.MAGIC], page[Word.VERSION]
        if magic != PAGE_MAGIC or version != PAGE_VERSION:
            page.close()
            raise ProtocolError(f"status page {path} has magic {magic:#x}, version {version}, not ours")
        return page

    def close(self) -> None:
        """Unmap the page. The file is kept."""
        self.flight.close()
        self._words.release()
        self._bytes.release()
        self._map.close()

    def __getitem__(self, word: int) -> int:
        return self._words[word]

    def __setitem__(self, word: int, value: int) -> None:
        self._words[word] = value

    def enter(self, phase: Phase, step: int) -> None:
        """Store the phase and step of this worker. If a drill has set a trap for this phase and step, execute the trap.

        Raises:
            RuntimeError: the trap injects an exception.
        """
        words = self._words
        words[_STATE] = (step << 8) | phase
        words[_ENTERED_NS] = time.monotonic_ns()
        if words[_TRAP]:
            self._spring(phase, step)

    def end_epoch(self, step: int) -> None:
        """Execute the trap that a drill has set for the end of an epoch at this step, if there is one.

        Raises:
            RuntimeError: the trap injects an exception.
        """
        if self._words[_TRAP]:
            self._spring(EPOCH_END, step)

    def state(self) -> tuple[int, Phase]:
        """Return (step, phase), which the worker writes in one store."""
        return unpack_state(self._words[_STATE])

    def _spring(self, phase: int, step: int) -> None:
        action, at_phase, at_step = unpack_trap(self._words[_TRAP])
        # A trap that was set too late for its step fires at the next such phase.
        if phase != at_phase or step < at_step:
            return
        self._words[Word.SPRUNG_NS] = time.monotonic_ns()
        self._words[_TRAP] = 0
        while action is TrapAction.LOOP:
            pass
        if action is TrapAction.GIL:
            _hold_gil()
        if action in self._actions:
            self._actions[action]()
        if action is TrapAction.WAIT:
            threading.Event().wait()
        if action is TrapAction.RAISE:
            raise RuntimeError("drill: injected exception")
        if action is TrapAction.EXIT:
            os._exit(1)
        while action is TrapAction.HOLD:
            time.sleep(0.05)

    def section(self) -> str:
        """Return the name of the section that the script entered last, cut to ``SECTION_SIZE_BYTES``."""
        name = bytes(self._bytes[_SECTION_AT : _SECTION_AT + SECTION_SIZE_BYTES])
        return name.rstrip(b"\0").decode("utf-8", "replace")

    def announce(self, section: str) -> None:
        """Store the name of the section that the script enters. The caller calls :meth:`enter` next."""
        name = section.encode()[:SECTION_SIZE_BYTES]
        self._bytes[_SECTION_AT : _SECTION_AT + SECTION_SIZE_BYTES] = name.ljust(SECTION_SIZE_BYTES, b"\0")

    def write_outside(self, outside: OutsideCollectives) -> None:
        """Store the collectives that the script has made since its last block."""
        text = msgspec.json.encode(outside)
        if len(text) <= _OUTSIDE_LENGTH_MAX:
            self._words[_OUTSIDE_LENGTH] = 0
            self._bytes[_OUTSIDE_TEXT_AT : _OUTSIDE_TEXT_AT + len(text)] = text
            self._words[_OUTSIDE_MADE] = outside.made
            self._words[_OUTSIDE_LENGTH] = len(text)

    def count_outside(self, made: int) -> None:
        """Store only the number of the collectives since the last block, if their description has not changed."""
        self._words[_OUTSIDE_MADE] = made

    def outside(self) -> OutsideCollectives | None:
        """Return the collectives since the last block; None if the description is missing or being written."""
        length = self._words[_OUTSIDE_LENGTH]
        if not 0 < length <= _OUTSIDE_LENGTH_MAX:
            return None
        text = bytes(self._bytes[_OUTSIDE_TEXT_AT : _OUTSIDE_TEXT_AT + length])
        try:
            found = msgspec.json.decode(text, type=OutsideCollectives)
        except msgspec.MsgspecError:
            return None
        return msgspec.structs.replace(found, made=self._words[_OUTSIDE_MADE])

    def on_trap(self, action: TrapAction, act: Callable[[], object]) -> None:
        """Set the function ``act`` that executes a trap which only the training script can execute.

        Such a trap starts a collective that no other rank starts (``DEADLOCK``), or changes the rank's own memory
        (``FLIP``, ``FLIP_STATE``).
        """
        self._actions[action] = act

    def _slot(self, index: int) -> memoryview:
        start = PAGE_SIZE_BYTES + index * LOCAL_SLOT_BYTES
        return self._bytes[start : start + LOCAL_SLOT_BYTES]

    def _headers(self) -> list[tuple[int, int, int, int]]:
        """Return (sequence, step, length, digest) of every slot for rank-local values, unchecked."""
        headers = []
        for index in range(LOCAL_SLOTS):
            sequence, step, length, digest = self._slot(index)[:_HEADER_BYTES].cast("Q")
            headers.append((sequence, step, length, digest))
        return headers

    def write_local(self, step: int, payload: bytes) -> None:
        """Store the rank-local values of committed ``step``, encoded in ``payload``.

        The previous values are kept until the new ones are completely written.

        Raises:
            StateError: ``payload`` has more than ``LOCAL_SIZE_BYTES_MAX`` bytes.
        """
        if len(payload) > LOCAL_SIZE_BYTES_MAX:
            raise StateError(
                f"rank-local values take {len(payload)} bytes, the status page holds {LOCAL_SIZE_BYTES_MAX}",
                hint="keep less rank-local state (for instance a smaller shuffle buffer of the data loader)",
            )
        self._sequence += 1
        slot = self._slot(self._sequence % LOCAL_SLOTS)
        slot[_HEADER_BYTES : _HEADER_BYTES + len(payload)] = payload
        header = slot[:_HEADER_BYTES].cast("Q")
        header[0], header[1], header[2] = self._sequence, step, len(payload)
        header[3] = _digest(self._sequence, step, payload)

    def read_locals(self) -> dict[int, bytes]:
        """Return all complete payloads of :meth:`write_local`, by step. During a write the result may be empty."""
        found: dict[int, bytes] = {}
        for sequence, step, length, digest in sorted(self._headers()):
            if sequence and length <= LOCAL_SIZE_BYTES_MAX:
                payload = bytes(self._slot(sequence % LOCAL_SLOTS)[_HEADER_BYTES : _HEADER_BYTES + length])
                if digest == _digest(sequence, step, payload):
                    found[step] = payload
        return found

    def place(self, step: int, phase: Phase) -> None:
        """Store step and phase without executing traps. The agent calls this before the worker runs."""
        self._words[_STATE] = pack_state(step, phase)
        self._words[_ENTERED_NS] = time.monotonic_ns()


def _hold_gil() -> None:
    """Block in C forever without releasing the GIL: read from a pipe that never gets data."""
    read_end, _ = os.pipe()
    ctypes.PyDLL(None).read(read_end, ctypes.create_string_buffer(1), 1)


def _digest(sequence: int, step: int, payload: bytes) -> int:
    seed = (sequence * 0x9E3779B97F4A7C15 + step) & 0xFFFFFFFFFFFFFFFF
    return xxhash.xxh3_64_intdigest(payload, seed=seed)


def each_page(directory: Path, prefix: str) -> Iterator[Page]:
    """Yield the pages in ``directory`` whose names begin with ``prefix``, sorted. Each is closed before the next one.

    Pages that cannot be opened are left out: incomplete pages, pages of another version, and pages that were removed in
    the meantime.
    """
    try:
        paths = sorted(directory.glob(f"{prefix}*"))
    except FileNotFoundError:  # the run ended in the meantime
        return
    for path in paths:
        try:
            page = Page.open(path)
        except (OSError, ProtocolError):
            continue
        with closing(page):
            yield page


def committed_step(pages: Iterable[Page]) -> int:
    """Return the newest step that these pages show as committed; 0 if there is none.

    If a rank has several pages, only that of its newest member counts.
    """
    newest: dict[int, tuple[int, int]] = {}
    for page in pages:
        rank, found = page[Word.RANK], (page[Word.MEMBER], page[Word.COMMITTED])
        newest[rank] = max(found, newest.get(rank, found))
    return max((step for _, step in newest.values()), default=0)
