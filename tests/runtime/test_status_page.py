"""The status page: words, pitfalls, rank-local values that are never torn."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from holdfast.core.ids import Generation
from holdfast.core.protocol.messages import OutsideCollective, OutsideCollectives
from holdfast.core.protocol.status_page import OUTSIDE_AT, PAGE_SIZE_BYTES, Phase, TrapAction, Word, pack_trap
from holdfast.errors import ProtocolError, StateError
from holdfast.runtime.node.status_page import LOCAL_SIZE_BYTES_MAX, Page


def newest(page: Page) -> tuple[int, bytes]:
    """Return step and payload of the newest local values; ``(0, b"")`` if there are none, or all are being written."""
    return max(page.read_locals().items(), default=(0, b""))


def test_create_open_and_words(tmp_path: Path) -> None:
    path = tmp_path / "page-1"
    page = Page.create(path, generation=5, member=7, rank=2)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    other = Page.open(path)
    assert (other[Word.GENERATION], other[Word.MEMBER], other[Word.RANK]) == (5, 7, 2)
    page.enter(Phase.VOTE, 12)
    assert other.state() == (12, Phase.VOTE)
    assert 0 < other[Word.ENTERED_NS] <= time.monotonic_ns()
    with pytest.raises(FileExistsError):
        Page.create(path)
    page.close()
    other.close()


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "page"
    path.write_bytes(b"x" * 100)
    with pytest.raises(ProtocolError, match="100 bytes"):
        Page.open(path)
    page = Page.create(tmp_path / "other")
    page[Word.VERSION] = 99
    page.close()
    with pytest.raises(ProtocolError, match="version 99"):
        Page.open(tmp_path / "other")


def test_raise_trap_fires_once_at_its_place(tmp_path: Path) -> None:
    page = Page.create(tmp_path / "page")
    page[Word.TRAP] = pack_trap(TrapAction.RAISE, Phase.BACKWARD, 3)
    page.enter(Phase.FORWARD, 3)
    page.enter(Phase.BACKWARD, 2)
    with pytest.raises(RuntimeError, match="drill: injected exception"):
        page.enter(Phase.BACKWARD, 3)
    assert page[Word.TRAP] == 0
    sprung_ns, entered_ns = page[Word.SPRUNG_NS], page[Word.ENTERED_NS]
    page.enter(Phase.BACKWARD, 3)
    # Regression: a slow injector took the time at which it looked, and the fault seemed to come after its detection.
    assert entered_ns <= sprung_ns == page[Word.SPRUNG_NS] <= page[Word.ENTERED_NS]
    page.close()


VICTIM = """
import sys
from holdfast.core.protocol.status_page import Phase
from holdfast.runtime.node.status_page import Page
page = Page.open(sys.argv[1])
page.write_local(4, b"kept")
for step in range(1_000_000):
    page.enter(Phase.FORWARD, step)
    page.enter(Phase.UPDATE, step)
"""


@pytest.mark.processes
@pytest.mark.parametrize("action", [TrapAction.HOLD, TrapAction.EXIT])
def test_traps_end_in_death_and_the_page_tells_where(tmp_path: Path, action: TrapAction) -> None:
    path = tmp_path / "page"
    page = Page.create(path)
    page[Word.TRAP] = pack_trap(action, Phase.UPDATE, 100)
    with subprocess.Popen([sys.executable, "-c", VICTIM, str(path)]) as process:
        deadline = time.monotonic() + 20
        while page[Word.TRAP] and time.monotonic() < deadline:
            time.sleep(0.01)
        if action is TrapAction.HOLD:
            assert process.poll() is None
            os.kill(process.pid, signal.SIGKILL)
        code = process.wait(20)
    assert code == (-signal.SIGKILL if action is TrapAction.HOLD else 1)
    assert page.state() == (100, Phase.UPDATE)
    assert newest(page) == (4, b"kept")
    page.close()


def test_a_torn_local_slot_falls_back_to_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "page"
    page = Page.create(path)
    assert newest(page) == (0, b"")
    page.write_local(1, b"one")
    page.write_local(2, b"two" * 1000)
    assert newest(page) == (2, b"two" * 1000)
    assert page.read_locals() == {1: b"one", 2: b"two" * 1000}
    data = bytearray(path.read_bytes())
    data[data.index(b"twotwo", PAGE_SIZE_BYTES)] ^= 1
    path.write_bytes(data)
    torn = Page.open(path)
    assert newest(torn) == (1, b"one")
    assert torn.read_locals() == {1: b"one"}
    torn.write_local(3, b"three")
    assert newest(torn) == (3, b"three")
    with pytest.raises(StateError, match="status page holds"):
        page.write_local(3, b"x" * (LOCAL_SIZE_BYTES_MAX + 1))
    page.close()
    torn.close()


WRITER = """
import sys
from holdfast.runtime.node.status_page import Page
page = Page.open(sys.argv[1])
step = 0
while True:
    step += 1
    page.write_local(step, step.to_bytes(8, "little") * 4000)
"""


@pytest.mark.processes
def test_a_reader_beside_a_writer_never_sees_a_mix(tmp_path: Path) -> None:
    path = tmp_path / "page"
    page = Page.create(path)
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)]) as process:
        seen: set[int] = set()
        deadline = time.monotonic() + 20
        while len(seen) < 200 and time.monotonic() < deadline:
            step, payload = newest(page)
            assert payload in (b"", step.to_bytes(8, "little") * 4000)
            seen.add(step)
        os.kill(process.pid, signal.SIGKILL)
    assert len(seen) >= 200
    page.close()


def test_collectives_outside_of_blocks_are_read_as_written(tmp_path: Path) -> None:
    page = Page.create(tmp_path / "page")
    assert page.outside() is None
    first = (OutsideCollective("all_reduce at train.py:9", ("tick", "self.größe")),)
    made = OutsideCollectives(generation=Generation(1, 2), step=7, made=1, first=first)
    page.write_outside(made)
    page.count_outside(9)
    with closing(Page.open(tmp_path / "page")) as other:
        assert other.outside() == msgspec.structs.replace(made, made=9)
    page.write_outside(msgspec.structs.replace(made, first=first * 100))  # too long: the old record stays
    found = page.outside()
    assert found is not None and found.first == first
    page[OUTSIDE_AT // 8] = 5  # a write that ended in the middle
    assert page.outside() is None
    page.close()
