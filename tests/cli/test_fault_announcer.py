"""Faults as a terminal shows them: each fault once, and their common facts once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast.cli.screen.console import Screen
from holdfast.cli.screen.fault_announcer import FaultAnnouncer
from holdfast.cli.screen.run_view import Watch
from holdfast.core.job.fault import LEFT_FOR_RESTART
from holdfast.core.protocol.messages import Field
from holdfast.text import ranges
from tests.cli.test_status import FAULT, TIMES, Made, swept

__all__ = ["swept"]

pytestmark = pytest.mark.usefixtures("swept")
RANKS = 4
NAN = "ValueError: loss is nan at sample {}"


class Terminal(NamedTuple):
    """A run of four ranks, as a terminal shows it to a user who sees rank 0."""

    made: Made
    telling: FaultAnnouncer
    watch: Watch
    screen: Screen
    capsys: pytest.CaptureFixture[str]

    def fault(self, rank: int, what: str, kind: str = "exception", attempt: int = 0) -> dict[str, Field]:
        """Append one more fault to the event log. Return its fields."""
        fields: dict[str, Field] = {
            **FAULT,
            "kind": kind,
            "rank": rank,
            "member_id": attempt * RANKS + rank + 1,
            "what": what,
        }
        self.made.journal.append("detected", fields)
        return fields

    def look(self) -> tuple[list[str], list[str]]:
        """Return the new lines of ranks, and the new lines of Holdfast."""
        self.watch.read()
        self.telling.faults(self.screen)
        self.telling.recoveries(self.screen, lambda: None)
        out, err = self.capsys.readouterr()
        return out.splitlines(), [
            re.sub(r"^holdfast: \d\d:\d\d:\d\d ", "", line) for line in err.splitlines()
        ]


@pytest.fixture
def terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Terminal:
    made = Made(tmp_path, "it", RANKS)
    made.start(0, 1)
    watch = Watch(made.directory, made.settings)
    return Terminal(
        made, FaultAnnouncer(watch, lambda _, rank: rank == 0), watch, Screen(marked=False), capsys
    )


def test_a_mistake_of_all_ranks_is_told_once(terminal: Terminal) -> None:
    for rank in (2, 1, 3):
        terminal.fault(rank, NAN.format(rank))
    logs, said = terminal.look()
    assert said == ["F001 to F003: ranks 1-3: ValueError: loss is nan at sample 2, in backward of step 20"]
    assert logs == ["[rank 2] attempt 0 rank 2"]
    terminal.made.start(1, 1 + RANKS, 2)
    terminal.fault(1, NAN.format(77), attempt=1)
    assert terminal.look() == (
        [],
        ["F004: rank 1: ValueError: loss is nan at sample 77, in backward of step 20"],
    )


def test_where_a_rank_on_the_screen_raises_it_no_other_log_is_shown(terminal: Terminal) -> None:
    terminal.fault(3, NAN.format(3))
    terminal.fault(0, NAN.format(0))
    logs, (said,) = terminal.look()
    assert said.startswith("F001 to F002: ranks 0, 3: ") and logs == []


def test_different_faults_are_told_apart_with_their_logs(terminal: Terminal) -> None:
    terminal.fault(1, NAN.format(1))
    terminal.fault(2, "KeyError: 'lr'")
    terminal.fault(3, "was killed by signal 9", "signal")
    logs, said = terminal.look()
    assert [line[:15] for line in said] == ["F001: rank 1: V", "F002: rank 2: K", "F003: rank 3: w"]
    assert logs == [f"[rank {rank}] attempt 0 rank {rank}" for rank in (1, 2, 3)]


def test_whoever_is_killed_shows_its_last_lines_each_time(terminal: Terminal) -> None:
    """The last lines show what the rank was about to do. The kill itself leaves no message."""
    for rank in (1, 2):
        terminal.fault(rank, "was killed by signal 9", "signal")
    logs, said = terminal.look()
    assert len(said) == 1 and said[0].startswith("F001 to F002: ranks 1-2: was killed by signal 9 (SIGKILL)")
    assert logs == [f"[rank {rank}] attempt 0 rank {rank}" for rank in (1, 2)]


def test_who_left_for_another_ones_fault_shows_no_log(terminal: Terminal) -> None:
    terminal.fault(2, LEFT_FOR_RESTART, "exit")
    assert terminal.look() == ([], ["F001: rank 2: left for a restart, in backward of step 20"])


def test_what_one_recovery_has_answered_is_one_line(terminal: Terminal) -> None:
    terminal.made.journal.append("session_opened", {"step": 0, "root": "", "generation": "1.1"})
    faults = [terminal.fault(rank, "was killed by signal 9", "signal") for rank in (1, 2)]
    other = terminal.fault(3, "KeyError: 'lr'")
    terminal.made.journal.append("verdict", {"action": "restart_last_gasp", "reason": "they are gone"})
    terminal.look()
    for fields in faults:
        terminal.made.journal.append("recovered", {**fields, **TIMES, "steps_lost": 0})
    assert terminal.look()[1] == ["F001 to F002: restart last gasp, training continues after 2.25 s"]
    terminal.made.journal.append("recovered", {**other, **TIMES, "steps_lost": 2})
    assert terminal.look()[1] == ["F003: restart last gasp, 2 steps lost, training continues after 2.25 s"]


def test_rank_ranges() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8" and ranges([]) == ""
