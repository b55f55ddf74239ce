"""Cost of hang detection: the worker's stores per step, and the agent's read of all status pages of a node.

    python bench/watching.py

A step of the table draws a batch, starts four collectives and votes. Prints markdown, microseconds.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from holdfast.core.ids import Generation
from holdfast.core.protocol.status_page import Phase, Word
from holdfast.core.watch.stall_detector import Limits, Progress
from holdfast.frameworks.torch.comm.comm_state import CommState
from holdfast.runtime.agent.progress_watcher import read
from holdfast.runtime.node.status_page import Page
from holdfast.session.steps.participant import StepParticipant

ROUNDS = 5000
COLLECTIVES = 4
WORKERS = 8


def row(name: str, call: Callable[[], object]) -> str:
    """Return median and 99th percentile of many calls, as one line of the table."""
    times = []
    for _ in range(ROUNDS):
        began_ns = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - began_ns) / 1e3)
    times.sort()
    return f"| {name} | {ROUNDS} | {times[ROUNDS // 2]:.1f} | {times[ROUNDS * 99 // 100]:.1f} |"


def main() -> None:
    """Entry point."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        pages = [Page.create(Path(directory) / f"page-{n}", member=n + 1, rank=n) for n in range(WORKERS)]
        page = pages[0]
        client: Any = SimpleNamespace(
            page=page, generation=Generation(1, 1), member_id=1, joining=False, stand_in=None
        )
        rank = StepParticipant(cast(Any, None), client)
        fabric = CommState()
        fabric.on_collective(lambda count, _what, _joint: rank.count_collective(count), rank.timer.waited)
        works = [cast(Any, SimpleNamespace(settled=lambda: True)) for _ in range(COLLECTIVES)]

        def step() -> None:
            rank.enter(Phase.LOADING)
            rank.enter(Phase.READY)
            page[Word.SEQUENCE] = 0
            for work in works:
                fabric.begin("all_reduce")
                fabric.track(work)
                fabric.forget(work)
            computed_ns = time.monotonic_ns()
            fabric.note_wait()
            rank.computed(computed_ns)

        progress = Progress(Limits())

        def look() -> None:
            progress.look(time.monotonic(), [read(each) for each in pages])

        print("| microseconds | n | median | p99 |\n|---|---|---|---|")
        print(row(f"one step of a worker: all stores, {COLLECTIVES} collectives", step))
        print(row("of that one phase", lambda: rank.enter(Phase.READY)))
        print(row(f"one look of the agent at {WORKERS} workers (10 per second)", look))
        for each in pages:
            each.close()


if __name__ == "__main__":
    main()
