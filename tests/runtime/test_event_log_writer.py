"""A slow or full disk under an event log stops nothing but the log."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import threading
from pathlib import Path

import pytest

from holdfast import event_log
from holdfast.errors import ProtocolError
from holdfast.event_log import EventLog
from holdfast.runtime.node.event_log_writer import EventLogWriter

BOUND_S = 30.0


def log_at(path: Path) -> EventLog:
    return EventLog.open(path, "agent", room_wait_s=BOUND_S)


def test_a_loop_goes_on_while_its_log_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the disk was full for five seconds, and a healthy node counted as lost."""
    path, stuck, goes = tmp_path / "events.jsonl", threading.Event(), threading.Event()
    write = EventLog._write

    def waits(self: EventLog, line: bytes) -> None:
        if not goes.is_set():
            stuck.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, line)

    async def run() -> float:
        loop, scribe = asyncio.get_running_loop(), EventLogWriter(log_at(path))
        monkeypatch.setattr(EventLog, "_write", waits)
        scribe.append("first", {"number": 1}, durable=True)
        await loop.run_in_executor(None, stuck.wait, BOUND_S)
        for number in range(2, 5):
            scribe.append("more", {"number": number})
            await asyncio.sleep(0)
        assert not event_log.read(path).events
        said = loop.time()
        goes.set()
        scribe.flush()
        assert [event.data["number"] for event in event_log.read(path).events] == [1, 2, 3, 4]
        scribe.close()
        return said

    said = asyncio.run(run())
    assert all(event.t_mono <= said for event in event_log.read(path).events), (
        "when they were said, not written"
    )


def test_a_lock_that_another_process_holds_stops_nothing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"

    async def run() -> None:
        scribe = EventLogWriter(log_at(path))
        with path.open() as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            scribe.append("line", {})
            await asyncio.sleep(0)
        scribe.close()

    asyncio.run(run())
    assert [event.kind for event in event_log.read(path).events] == ["line"]


def test_what_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    async def run() -> None:
        scribe = EventLogWriter(log_at(tmp_path / "events.jsonl"))
        scribe.fail = errors.append
        for _ in range(3):
            scribe.append("line", {"text": "x" * event_log.LINE_SIZE_BYTES_MAX})
        scribe.flush()
        await asyncio.sleep(0)
        scribe.close()

    asyncio.run(run())
    assert [type(error) for error in errors] == [ProtocolError]
