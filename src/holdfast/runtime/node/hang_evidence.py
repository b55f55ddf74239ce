"""What can be seen of a worker that stands still, from outside: its page, /proc, and the stacks that it writes.

A worker that this library started makes Python's own ``faulthandler`` write the stack of its main thread on
``STACKS_SIGNAL``: that runs in the signal handler and needs neither the GIL nor memory, so it also answers while C code
holds the GIL for ever. ``faulthandler`` can write the stacks of all threads, too, and reads them while they run: a
thread that starts or ends meanwhile is a segmentation fault of the worker. So those of the other threads are written by
Python, as soon as the main thread executes Python again. A stopped process answers when it runs again, one in an
uninterruptible wait not at all: then /proc has to do.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import faulthandler
import os
import platform
import re
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
from holdfast.runtime.node.status_page import Page

STACKS_SIGNAL = signal.SIGRTMIN + 7
SAMPLE_S = 0.12  # CPU time is counted in hundredths of a second
ANSWER_S = 0.5  # stacks are there within this, or the process does not answer
POLL_S = 0.01
STACKS_SIZE_BYTES_MAX = 256 * 1024
RECORDS_SIZE_BYTES_MAX = 16 << 20
WHERE_LENGTH_MAX = 240
FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)
MAIN = "Stack (most recent call first):"
FRAMES_MAX = 100  # of one thread, as in faulthandler
INNER = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen", f"{Path(__file__).parents[1]}/")
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
_TGKILL = {"x86_64": 234, "aarch64": 131}.get(
    platform.machine()
)  # glibc has a function for it only from 2.30 on
_open_files: list[TextIO] = []  # faulthandler keeps the descriptor only


class ProcessSample(NamedTuple):
    """One look at a process: the letter of its state, CPU seconds of its main thread, its kernel wait."""

    process: str
    cpu_s: float
    wchan: str
    at_s: float


class ProcessEvidence(NamedTuple):
    """What was found about one process."""

    process: str
    cpu: float
    wchan: str
    stacks: str
    records: Records


def offer_stacks(path: Path, page: Page) -> None:
    """In a worker: from now on ``STACKS_SIGNAL`` appends all stacks to ``path``.

    Raises:
        OSError: the file cannot be made.
    """
    file = os.fdopen(open_log(path), "a")
    _open_files.append(file)
    if threading.current_thread() is threading.main_thread():  # else Python takes no handler
        signal.signal(STACKS_SIGNAL, lambda signum, frame: _write_others(file.fileno()))
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=False, chain=True)
    atexit.register(_stop_offering)
    page[Word.FLAGS] |= PageFlag.STACKS


def _stop_offering() -> None:
    """Python puts the default action back when it ends, which is to be killed."""
    faulthandler.unregister(STACKS_SIGNAL)
    signal.signal(STACKS_SIGNAL, signal.SIG_IGN)


def _write_others(fd: int) -> None:
    """The stacks of all threads but the main one, in the form of ``faulthandler``; the innermost call is first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        if ident == threading.main_thread().ident:
            continue
        lines = ["", f"Thread {names.get(ident, 'without a name')} (most recent call first):"]
        for call, line in islice(walk_stack(frame), FRAMES_MAX):
            lines.append(f'  File "{call.f_code.co_filename}", line {line} in {call.f_code.co_name}')
        with contextlib.suppress(OSError):  # no room: the evidence lacks it
            os.write(fd, "\n".join([*lines, ""]).encode(errors="replace"))  # a file object is not reentrant


def stacks_path(run: RunDir, member_id: MemberId) -> Path:
    """Where a worker writes its stacks: beside its page, so that no slow disk is in the way."""
    return run.pages() / f"stacks-{member_id}"


def offer_records(path: Path, read: Callable[[], Records]) -> None:
    """In a worker that is asked for them: write ``read()`` to ``path``, in a thread that may wait for a device."""

    def write() -> None:
        with contextlib.suppress(OSError):  # no room, or the run ends: the evidence lacks it
            write_private(path, msgspec.json.encode(read()))

    threading.Thread(target=write, name="holdfast-records", daemon=True).start()


def records_path(run: RunDir, member_id: MemberId) -> Path:
    """Where a worker writes what its framework has recorded."""
    return run.pages() / f"records-{member_id}"


def sample(pid: int) -> ProcessSample:
    """Look at a process; an empty state when it is gone."""
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
    """State and share of a core between two looks; only what was uninterruptible both times is."""
    passed_s = max(second.at_s - first.at_s, 1e-6)
    cpu = min(1.0, max(0.0, (second.cpu_s - first.cpu_s) / passed_s))
    process = second.process if second.process != "D" or first.process == "D" else first.process
    return process, cpu


def ask_for_stacks(pid: int) -> None:
    """Send ``STACKS_SIGNAL`` to the main thread: a signal to the process may go to another one, and show its stack.

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
    """Look at all workers (member, pid, page) at once; takes at most ``ANSWER_S``.

    Args:
        ask: sends :class:`~holdfast.core.protocol.health_messages.ShowRecords` to a worker; False where that is not
        possible.
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
    waits = {
        m: "" for m in asked if before[m].process not in ("T", "t")
    }  # with what was there at the last look
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
    """Nothing where the worker did not answer."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(RECORDS_SIZE_BYTES_MAX), type=Records)
    except (OSError, msgspec.MsgspecError):
        return Records()


def is_complete(stacks: str) -> bool:
    """The stack of the main thread is there, or its beginning: it comes line by line, and nothing marks its end."""
    return MAIN in stacks and stacks.endswith("\n") and bool(FRAME.search(_main(stacks)))


def _new_text(path: Path, offset: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(STACKS_SIZE_BYTES_MAX).decode("utf-8", "replace")
    except OSError:
        return ""


def _main(stacks: str) -> str:
    return stacks.partition(MAIN)[2].partition("\n\n")[0]


def where(stacks: str) -> str:
    """Innermost frame of the main thread, and the first one of the user's code."""
    frames = [match.groupdict() for match in FRAME.finditer(_main(stacks))]
    if not frames:
        return ""
    text = _frame(frames[0])
    user = next((f for f in frames if not any(inner in f["file"] for inner in INNER)), None)
    if user is not None and user is not frames[0]:
        text = f"{text}, called from {_frame(user)}"
    return whole_words(text, WHERE_LENGTH_MAX)


def whole_words(text: str, length_max: int) -> str:
    """``text`` in so many characters, ended after a whole word where there is one."""
    if len(text) <= length_max:
        return text
    head = text[: length_max - 3]
    return f"{head.rpartition(' ')[0] or head}..."


def _frame(frame: dict[str, str]) -> str:
    return f"{frame['name']} ({Path(frame['file']).name}:{frame['line']})"
