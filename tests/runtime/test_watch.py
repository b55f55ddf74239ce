"""What the agent's eyes look at."""

from __future__ import annotations

from pathlib import Path

from holdfast.core.ids import MemberId, NodeId
from holdfast.core.messages import Message
from holdfast.core.page import Phase, Word
from holdfast.core.progress import Limits
from holdfast.runtime.page import Page
from holdfast.runtime.procs import Life
from holdfast.runtime.rundir import RunDir
from holdfast.runtime.watch import Watcher

LIMITS = Limits(factor=10.0, floor_s=1.0, start_s=2.0, idle_s=2.0, section_s=2.0, look_s=0.1)


def test_a_spare_that_waits_for_ever_is_no_hang(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    heard: list[Message] = []
    living: dict[MemberId, Life] = {}
    watcher = Watcher(run, NodeId("node0"), LIMITS, living, heard.append)
    try:
        for number in (-7, 3):
            page = Page.create(run.page_path(MemberId(number)), member=number, rank=max(number - 3, -1))
            page[Word.PID] = 1
            page.place(0, Phase.SPARE if number < 0 else Phase.FORWARD)
            living[MemberId(number)] = Life(MemberId(number), 1, -1, None)
            page.close()
            for now in range(100, 120):
                watcher.look(float(now))
            assert bool(heard) == (number == 3), "a worker that stands still is one"
    finally:
        for open_page in watcher._pages.values():
            open_page.close()
        run.remove_pages()
