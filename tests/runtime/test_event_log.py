"""The event log: order, torn ends, damage, several writers, a full disk."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import pytest

from holdfast import event_log
from holdfast.errors import ProtocolError
from holdfast.event_log import ROOM_KEPT_BYTES, EventLog


def test_append_read_and_numbers(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert event_log.read(path).events == []
    log = EventLog.open(path, "controller")
    log.append("run", {"nproc": 4, "name": "a\nb", "ok": True, "ranks": [1, 2]})
    log.append("fence", {"n": 2}, durable=True)
    log.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    reading = event_log.read(path)
    assert [(event.seq, event.kind, event.who) for event in reading.events] == [
        (1, "run", "controller"),
        (2, "fence", "controller"),
    ]
    assert reading.events[0].data == {"nproc": 4, "name": "a\nb", "ok": True, "ranks": [1, 2]}
    assert not reading.damaged


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_torn_tail_is_told_and_cut_by_the_next_writer(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog.open(path, "a")
    for number in range(3):
        log.append("tick", {"number": number})
    log.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - cut)
    reading = event_log.read(path)
    assert not reading.damaged and [event.seq for event in reading.events] == [1, 2]
    successor = EventLog.open(path, "b")
    successor.append("tick", {"number": 9})
    successor.close()
    reading = event_log.read(path)
    assert not reading.damaged, "what was torn has been cut off"
    assert [(event.seq, event.who) for event in reading.events] == [(1, "a"), (2, "a"), (3, "b")]


def test_a_flipped_bit_hides_only_its_own_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog.open(path, "a")
    for number in range(3):
        log.append("tick", {"number": number})
    data = bytearray(path.read_bytes())
    data[data.index(b'"number":1')] ^= 1
    path.write_bytes(data)
    log.close()
    reading = event_log.read(path)
    assert [event.seq for event in reading.events] == [1, 3] and reading.damaged == [2]


def test_a_foreign_schema_or_a_changed_line_is_refused() -> None:
    event = event_log.Event(99, 1, 0.0, 0.0, "a", "k", {})
    with pytest.raises(ProtocolError, match="version 99"):
        event_log.decode_line(event_log.encode_line(event).rstrip())
    with pytest.raises(ProtocolError, match="checksum"):
        event_log.decode_line(b"{}")


WRITER = """
import sys
from pathlib import Path
from holdfast.event_log import EventLog
log = EventLog.open(Path(sys.argv[1]), sys.argv[2])
for number in range(int(sys.argv[3])):
    log.append("tick", {"number": number, "text": "x" * 200})
"""


@pytest.mark.processes
def test_writers_side_by_side_share_one_numbering(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), name, "200"]) for name in ("a", "b", "c")
    ]
    assert [writer.wait(30) for writer in writers] == [0, 0, 0]
    events = event_log.read(path).events
    assert [event.seq for event in events] == list(range(1, 601))
    assert [e.data["number"] for e in events if e.who == "b"] == list(range(200))


@pytest.mark.processes
def test_a_killed_writer_leaves_a_readable_log(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path), "a", "1000000"]) as writer:
        deadline = time.monotonic() + 20
        while (not path.exists() or path.stat().st_size < 20_000) and time.monotonic() < deadline:
            time.sleep(0.005)
        os.kill(writer.pid, signal.SIGKILL)
    log = EventLog.open(path, "b")
    last = log.append("end", {}).seq
    log.close()
    reading = event_log.read(path)
    assert not reading.damaged and path.read_bytes().count(b"\n") == last
    assert [event.seq for event in reading.events] == list(range(1, last + 1))


def test_a_full_disk_raises_and_leaves_no_half_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog.open(path, "a")
    log.append("tick", {"text": "x" * 100})
    size_bytes = path.stat().st_size
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes + 50, old[1]))
        with pytest.raises(OSError, match=r"were written|File too large"):
            log.append("tick", {"text": "x" * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.stat().st_size == size_bytes
    assert log.append("tick", {}).seq == 2
    with pytest.raises(ProtocolError, match="too long"):
        log.append("tick", {"text": "x" * event_log.LINE_SIZE_BYTES_MAX})
    log.close()
    assert [event.seq for event in event_log.read(path).events] == [1, 2]


@pytest.mark.processes
def test_a_follower_sees_what_another_process_appends_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    follower, seen = event_log.Follower(path), list[int]()
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path), "a", "50"]) as writer:
        while writer.poll() is None:
            seen += [event.seq for event in follower.poll()]
    seen += [event.seq for event in follower.poll()]
    assert seen == list(range(1, 51))


def test_a_long_log_is_read_in_little_memory(tmp_path: Path) -> None:
    """The log has 20 MB of events, and of bytes that never were events."""
    path = tmp_path / "events.jsonl"
    line = event_log.encode_line(event_log.Event(1, 7, 0.0, 0.0, "a", "tick", {"text": "x" * 20_000}))
    path.write_bytes(
        line * 1000 + b"y" * (40 * event_log.LINE_SIZE_BYTES_MAX) + line + line + b"z" * 20_000_000
    )
    follower = event_log.Follower(path)
    tracemalloc.start()
    try:
        assert sum(event.seq for event in follower.poll()) == 7007
        assert tracemalloc.get_traced_memory()[1] < 5e6
    finally:
        tracemalloc.stop()
    assert follower.damaged == [1001]
    assert list(follower.poll()) == [], "what is not complete is not said"
    with path.open("ab") as file:
        file.write(b"\n" + line)
    assert [event.seq for event in follower.poll()] == [7] and follower.damaged == [1001, 1003]


def test_a_daemon_waits_for_room(tiny_disk: Path) -> None:
    log = EventLog.open(tiny_disk / "events.jsonl", "a")
    ballast = tiny_disk / "ballast"
    with pytest.raises(OSError, match="No space"), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with pytest.raises(OSError, match="No space"):
        while True:  # fill the rest of the last page
            log.append("before", {})
    log.room_wait_s = 60.0
    waiting = threading.Thread(target=log.append, args=("after", {"text": "x" * 5000}))
    waiting.start()
    assert waiting.is_alive()
    ballast.unlink()
    waiting.join()
    log.close()
    assert event_log.read(tiny_disk / "events.jsonl").events[-1].kind == "after"


def test_a_full_disk_has_room_for_the_lines_of_a_daemon(tiny_disk: Path) -> None:
    """The daemon needs a tenth of a MiB for its lines. This room is released when the run is over."""
    log = EventLog.open(tiny_disk / "events.jsonl", "a", room_wait_s=1.0)
    with pytest.raises(OSError, match="No space"), (tiny_disk / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    for number in range(100):
        log.append("line", {"number": number, "text": "x" * 1000})
    log.give_back_room()
    log.close()
    assert len(event_log.read(tiny_disk / "events.jsonl").events) == 100
    (tiny_disk / "more").write_bytes(bytes(ROOM_KEPT_BYTES // 2))
