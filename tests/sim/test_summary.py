"""``holdfast sim`` and the summary that it prints."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.cli.main import answer
from holdfast.exit_codes import Exit
from holdfast.sim.summary import Summary, summarize


def test_summary_counts_and_finds_nothing_wrong() -> None:
    summary = summarize(4, range(40))
    assert summary.violations == ()
    assert summary.runs == 40 and summary.recoveries > 20 and summary.events > 10_000
    assert summary.in_doubt_back > 0 and summary.searched_states > 10_000


def test_command_prints_the_same_as_data(capfd: pytest.CaptureFixture[str]) -> None:
    assert answer(["sim", "--ranks", "4", "--seeds", "5", "--json"]) == Exit.OK
    summary = msgspec.json.decode(capfd.readouterr().out, type=Summary)
    assert summary == summarize(4, range(5))


def test_command_says_it_in_words(capfd: pytest.CaptureFixture[str]) -> None:
    assert answer(["sim", "--ranks", "4", "--seeds", "5"]) == Exit.OK
    assert "no invariant was broken" in capfd.readouterr().out
