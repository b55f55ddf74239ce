"""Exhaustive search of one step with deaths: it is bounded, complete, and finds planted errors."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import holdfast.sim.model_checker as search_module
from holdfast.core.decide.decision import Decision, RankReport, decide
from holdfast.core.ids import Generation
from holdfast.core.worker.step import StepEvent
from holdfast.sim.invariants import Violation
from holdfast.sim.model_checker import search


@pytest.mark.parametrize(("ranks", "deaths"), [(2, 1), (3, 1), (3, 2), (3, 3)])
def test_every_interleaving_keeps_the_invariants(ranks: int, deaths: int) -> None:
    result = search(ranks, deaths)
    assert result.states > 300 and result.ends > 0
    assert result.forward > 0 and result.back > 0


def test_search_finds_a_stale_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(message: Generation, current: Generation) -> bool:
        return False

    monkeypatch.setattr(search_module, "is_stale", never)
    with pytest.raises(Violation):
        search(3, 2)


def test_search_finds_a_timid_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    def timid(reports: Sequence[RankReport], sealed_step: int = -1) -> Decision:
        undecided = [r for r in reports if r.state in ("in_doubt", "aborted")]
        return decide(undecided or reports, sealed_step)

    monkeypatch.setattr(search_module, "decide", timid)
    with pytest.raises(Violation, match=r"one_fate_per_step|decision_is_true"):
        search(3, 1)


def test_search_finds_a_rank_that_acts_though_fenced(monkeypatch: pytest.MonkeyPatch) -> None:
    table = dict(search_module._TABLE)
    table["voting", StepEvent.PASSED, True] = "updating"
    table["voting", StepEvent.BROKEN, False] = "aborted"
    monkeypatch.setattr(search_module, "_TABLE", table)
    with pytest.raises(Violation):
        search(3, 1)
