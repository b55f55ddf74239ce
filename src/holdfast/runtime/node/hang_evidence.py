"""Evidence about a worker without progress, collected from outside: its status page, /proc, and stacks that it writes.

On ``STACKS_SIGNAL``, a worker that Holdfast started writes the stack of its main thread with Python's ``faulthandler``.
The signal handler needs neither the GIL nor memory, so it works even if C code holds the GIL forever. ``faulthandler``
could also write the stacks of all threads. But it reads stacks while their threads run, and a thread that starts or
ends at that moment crashes the worker. So Python code writes the stacks of the other threads, as soon as the main
thread executes Python again. A stopped process writes its stacks when it runs again. A process in an uninterruptible
wait writes none, and only /proc is left as evidence.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import faulthandler
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from traceback import walk_stack
from typing import NamedTuple, TextIO

import msgspec

from holdfast.core.ids import MemberId
from holdfast.core.protocol.health_messages import Records
from holdfast.core.protocol.status_page import PageFlag, Word
from holdfast.runtime.node.rundir import RunDir, open_log, write_private
from holdfast.runtime.node.stack_texts import is_complete, stacks_path
from holdfast.runtime.node.status_page import Page

STACKS_SIGNAL = signal.SIGRTMIN + 7
SAMPLE_S = 0.12  # CPU time is counted in hundredths of a second
ANSWER_S = 0.5  # a process without stacks after this time does not answer
POLL_S = 0.01
STACKS_SIZE_BYTES_MAX = 256 * 1024
RECORDS_SIZE_BYTES_MAX = 16 << 20
FRAMES_MAX = 100  # most frames written of one thread, as in faulthandler
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
_TGKILL = {"x86_64": 234, "aarch64": 131}.get(
    platform.machine()
)  # glibc has a function for it only from 2.30 on
_open_files: list[TextIO] = []  # faulthandler keeps the descriptor only


class ProcessSample(NamedTuple):
    """One reading of a process from /proc.

    ``process``: its state letter. ``cpu_s``: CPU seconds of its main thread. ``wchan``: the kernel function in which it
    waits. ``at_s``: the time of the reading, on the monotonic clock.
    """

    process: str
    cpu_s: float
    wchan: str
    at_s: float


class ProcessEvidence(NamedTuple):
    """The evidence about one process. ``cpu`` is the share of one core that its main thread uses, from 0 to 1."""

    process: str
    cpu: float
    wchan: str
    stacks: str
    records: Records


def offer_stacks(path: Path, page: Page) -> None:
    """Make ``STACKS_SIGNAL`` append the stacks of all threads of this worker to the file ``path``.

    Raises:
        OSError: the file cannot be made.
    """
    file = os.fdopen(open_log(path), "a")
    _open_files.append(file)
    if threading.current_thread() is threading.main_thread():  # otherwise Python accepts no handler
        signal.signal(STACKS_SIGNAL, lambda signum, frame: _write_others(file.fileno()))
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=False, chain=True)
    atexit.register(_stop_offering)
    page[Word.FLAGS] |= PageFlag.STACKS


def _stop_offering() -> None:
    """Ignore ``STACKS_SIGNAL`` from now on.

    When Python ends, it restores the default action, which would kill the process.
    """
    faulthandler.unregister(STACKS_SIGNAL)
    signal.signal(STACKS_SIGNAL, signal.SIG_IGN)


def _write_others(fd: int) -> None:
    """Write the stacks of all threads except the main thread, in the form of ``faulthandler``: innermost call first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        if ident == threading.main_thread().ident:
            continue
        lines = ["", f"Thread {names.get(ident, 'without a name')} (most recent call first):"]
        for call, line in islice(walk_stack(frame), FRAMES_MAX):
            lines.append(f'  File "{call.f_code.co_filename}", line {line} in {call.f_code.co_name}')
        with contextlib.suppress(OSError):  # no room: the evidence lacks it
            os.write(fd, "\n".join([*lines, ""]).encode(errors="replace"))  # a file object is not reentrant


def offer_records(path: Path, read: Callable[[], Records]) -> None:
    """Write the result of ``read()`` to the file ``path``, in a thread, because ``read`` may wait for a device."""

    def write() -> None:
        with contextlib.suppress(OSError):  # no room, or the run ends: the evidence lacks it
            write_private(path, msgspec.json.encode(read()))

    threading.Thread(target=write, name="holdfast-records", daemon=True).start()


def records_path(run: RunDir, member_id: MemberId) -> Path:
    """Return the file for the flight records of a worker's framework."""
    return run.pages() / f"records-{member_id}"


def sample(pid: int) -> ProcessSample:
    """Return a reading of process ``pid`` from /proc. The state letter is empty if the process is gone."""
    base = Path(f"/proc/{pid}/task/{pid}")
    try:
        fields = (base / "stat").read_text().rpartition(")")[2].split()
        wchan = (base / "wchan").read_text().strip()
    except OSError:
        return ProcessSample("", 0.0, "", time.monotonic())
    return ProcessSample(
        fields[0], (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS, wchan, time.monotonic()
    )


def compare(first: ProcessSample, second: ProcessSample) -> tuple[str, float]:
    """Return the process state, and the used share of a core (0 to 1), from two readings of a process.

    The state is taken from the second reading. But "D" (uninterruptible wait) counts only if both readings have it.
    """
    passed_s = max(second.at_s - first.at_s, 1e-6)
    cpu = min(1.0, max(0.0, (second.cpu_s - first.cpu_s) / passed_s))
    process = second.process if second.process != "D" or first.process == "D" else first.process
    return process, cpu


def ask_for_stacks(pid: int) -> None:
    """Send ``STACKS_SIGNAL`` to the main thread of a process.

    A signal to the process as a whole could reach another thread, whose stack would then be shown.

    Raises:
        OSError: there is no such process, or it may not be signalled.
    """
    if _TGKILL is None:
        os.kill(pid, STACKS_SIGNAL)
    elif ctypes.CDLL(None, use_errno=True).syscall(_TGKILL, pid, pid, int(STACKS_SIGNAL)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


async def find(
    run: RunDir,
    workers: Sequence[tuple[MemberId, int, Page]],
    ask: Callable[[MemberId], bool] | None = None,
) -> dict[MemberId, ProcessEvidence]:
    """Collect evidence about all ``workers`` in parallel, in about ``ANSWER_S`` seconds. Return the evidence by member.

    Args:
        workers: (member, pid, status page) of each worker.
        ask: requests the flight records of a worker's framework; returns False if the worker is not connected. With
            None these records are not collected.
    """
    before = {member_id: sample(pid) for member_id, pid, _ in workers}
    records: dict[MemberId, Path] = {}
    for member_id, _, _ in workers if ask is not None else ():
        path = records_path(run, member_id)
        path.unlink(missing_ok=True)
        if ask is not None and ask(member_id):
            records[member_id] = path
    asked: dict[MemberId, tuple[Path, int]] = {}
    for member_id, pid, page in workers:
        path = stacks_path(run, member_id)
        if page[Word.FLAGS] & PageFlag.STACKS and path.exists():
            asked[member_id] = (path, path.stat().st_size)
            try:
                ask_for_stacks(pid)
            except ProcessLookupError:
                del asked[member_id]
    start_s = time.monotonic()
    waits = {m: "" for m in asked if before[m].process not in ("T", "t")}  # with the text that was read last
    while (passed_s := time.monotonic() - start_s) < ANSWER_S:
        texts = {m: _new_text(*asked[m]) for m in waits}
        waits = {m: text for m, text in texts.items() if not is_complete(text) or text != waits[m]}
        if passed_s >= SAMPLE_S and not waits and all(path.exists() for path in records.values()):
            break
        await asyncio.sleep(POLL_S)
    found = {}
    for member_id, pid, _ in workers:
        after = sample(pid)
        process, cpu = compare(before[member_id], after)
        stacks = _new_text(*asked[member_id]) if member_id in asked else ""
        shown = _read_records(records[member_id]) if member_id in records else Records()
        found[member_id] = ProcessEvidence(process, cpu, after.wchan, stacks, shown)
    return found


def _read_records(path: Path) -> Records:
    """Return the flight records that a worker has written; empty if it has written none."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(RECORDS_SIZE_BYTES_MAX), type=Records)
    except (OSError, msgspec.MsgspecError):
        return Records()


def _new_text(path: Path, offset: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(STACKS_SIZE_BYTES_MAX).decode("utf-8", "replace")
    except OSError:
        return ""
