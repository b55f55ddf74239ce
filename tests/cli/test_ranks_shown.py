"""``holdfast status`` of many ranks, and in 80 columns."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cli.screen.run_view import Watch
from holdfast.core.protocol.status_page import Phase, Word
from tests.cli.command import Run, on_terminal
from tests.cli.test_status import Made, swept
from tests.runtime.runs import until

__all__ = ["swept"]

pytestmark = pytest.mark.usefixtures("swept")


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    run = Made(tmp_path, "alpha-1")
    yield run
    run.close()


def test_of_many_ranks_those_that_differ_are_shown(holdfast: Run, tmp_path: Path) -> None:
    run = Made(tmp_path, "many", workers=1024)
    try:
        run.start(0, 1)
        run.serve()
        run.pages[7].place(21, Phase.LOADING)
        run.pages[9][Word.PID] = 0
        run.journal.append("straggler", {"rank": 600, "busy_s": 0.25, "others_s": 0.1, "ratio": 2.5})
        text = holdfast("status").stdout
        assert "ranks 1,022 training, 1 loading, 1 not started" in text
        ranks = [line.split()[0] for line in text.splitlines() if line.strip()[:1].isdigit()]
        assert ranks == ["7", "9", "600"]
        whole = holdfast("status", "--all").stdout
        assert sum("forward" in line for line in whole.splitlines()) == 1022
    finally:
        run.close()


def test_a_stopped_rank_is_said_to_be(holdfast: Run, made: Made) -> None:
    made.start(0, 1)
    made.serve()
    assert made.agent is not None
    made.pages[1][Word.PID] = made.agent.pid
    os.kill(made.agent.pid, signal.SIGSTOP)
    try:
        looker = Watch(made.directory, made.settings)
        until("it is stopped", lambda: looker.poll().ranks[1].stopped)
        assert "forward, stopped by a signal" in holdfast("status").stdout
    finally:
        os.kill(made.agent.pid, signal.SIGCONT)


def test_eighty_columns_break_no_word(made: Made, tmp_path: Path) -> None:
    name = "20261122-215645-a-longer-name-of-a-run-2058"
    run = Made(tmp_path, name)
    run.start(0, 1)
    run.fault()
    run.recover()
    run.end(1, "rank 1 failed: " + "the reason of it has many words and " * 6)
    code, shown = on_terminal("status", name, cwd=tmp_path, env={"COLUMNS": "80", "NO_COLOR": "1"})
    shown = re.sub(r"\x1b\[[\d;]*m", "", shown)
    lines = shown.replace("\r", "").splitlines()
    assert code == 0 and max(map(len, lines)) <= 80
    wide = on_terminal("status", name, cwd=tmp_path, env={"COLUMNS": "400", "NO_COLOR": "1"})[1]
    assert shown.split() == re.sub(r"\x1b\[[\d;]*m", "", wide).split(), "no word is in two parts"
    why = next(number for number, line in enumerate(lines) if line.startswith("why  "))
    assert re.match(r"     ?\w", lines[why + 1]), "the second line is indented"
    assert f"logs runs/{name}/attempt-000" in shown
