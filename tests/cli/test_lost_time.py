"""The time of a run that was not training, by cause."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.cli.screen.run_summary import facts
from holdfast.cli.screen.run_view import Watch
from holdfast.core.protocol.messages import Field
from tests.cli.test_status import FAULT, TIMES, Made, later, made

__all__ = ["made"]


def test_goodput_counts_the_union(made: Made) -> None:
    made.settings = msgspec.structs.replace(made.settings, created_at=1000.0)
    second: dict[str, Field] = {**FAULT, "rank": 0, "member_id": 1}
    later(made, "session_opened", {"step": 0, "root": "", "generation": "1.1"}, 1.0)
    for fault in (FAULT, second):
        later(made, "detected", fault, 2.01)
    for fault in (FAULT, second):
        later(made, "recovered", {**fault, "steps_lost": 0, **TIMES}, 4.25)
    later(made, "run_ended", {"code": 0, "cause": "", "reason": "", "step": 40}, 11.0)
    watch = Watch(made.directory, made.settings)
    view = watch.poll()
    assert [f.recovered_s for f in view.faults] == [2.25, 2.25]
    assert view.losses == {"start": 1.0, "recovery": 2.25}
    assert view.goodput == pytest.approx(1 - 3.25 / 11, abs=1e-4)
    assert not watch.story.unanswered
    assert "goodput 70.5 % (recovery 2.2 s)" in " ".join(facts(view))


def test_each_loss_is_counted_once_under_its_cause(made: Made) -> None:
    made.settings = msgspec.structs.replace(made.settings, created_at=1000.0)
    hang = {**FAULT, "kind": "hang", "detected_s": 0.0}
    later(made, "session_opened", {"step": 100, "root": "", "generation": "1.1"}, 10.0)
    for rank, stall_s in ((0, 0.5), (1, 2.0)):
        saved = {
            "rank": rank,
            "step": 120,
            "save_kind": "periodic",
            "error": "",
            "duration_s": 9.0,
            "stall_s": stall_s,
        }
        later(made, "saved", saved, 20.0 + rank)
    later(made, "straggler", {"rank": 1, "busy_s": 0.4, "others_s": 0.1, "ratio": 4.0}, 22.0)
    later(made, "straggler_gone", {"rank": 1}, 30.0)
    later(made, "stalled", {"idle_s": 3.0, "bound_s": 3.0, "step_s": 0.1}, 43.0)
    later(made, "detected", hang, 44.0)
    later(made, "restored", {"step": 130, "steps_lost": 20, "generation": "1.2"}, 45.0)
    later(made, "recovered", {**hang, "steps_lost": 20, **TIMES}, 46.25)
    later(made, "finished", {"step": 180, "reason": "done"}, 97.0)
    later(
        made, "saved", {**saved, "save_kind": "final", "step": 180, "duration_s": 1.5, "stall_s": 0.0}, 96.0
    )
    later(made, "run_ended", {"code": 0, "cause": "", "reason": "", "step": 180}, 100.0)
    view = Watch(made.directory, made.settings).poll()
    others = {
        "start": 10.0,
        "standing still": 4.0,
        "recovery": 2.25,
        "saving": 3.5,
        "slow ranks": 6.0,
        "end": 3.0,
    }
    redone = (100.0 - sum(others.values())) * 20 / (80 + 20)
    assert view.losses == pytest.approx({**others, "steps redone": redone})
    assert view.goodput == pytest.approx(1 - (sum(others.values()) + redone) / 100, abs=1e-4)
    said = " ".join(facts(view))
    assert "20 steps lost" in said and f"(steps redone {redone:.0f} s)" in said


def test_a_slow_rank_that_a_new_controller_finds_again(made: Made) -> None:
    """A new controller knows of no straggler, so it reports a known one again, with its ratio of now."""
    made.settings = msgspec.structs.replace(made.settings, created_at=1000.0)
    later(made, "session_opened", {"step": 0, "root": "", "generation": "1.1"}, 0.0)
    slow: dict[str, Field] = {"rank": 1, "busy_s": 0.4, "others_s": 0.1}
    later(made, "straggler", {**slow, "ratio": 4.0}, 10.0)
    later(made, "straggler", {**slow, "ratio": 2.0}, 18.0)
    later(made, "straggler_gone", {"rank": 1}, 22.0)
    later(made, "run_ended", {"code": 0, "cause": "", "reason": "", "step": 40}, 30.0)
    assert Watch(made.directory, made.settings).poll().losses == {"slow ranks": 8 * 0.75 + 4 * 0.5}
