"""A framework whose gradients pass a gate inside its graph starts the same step again: ``Session.redo``."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core.ids import Generation
from holdfast.errors import StepError
from holdfast.frameworks.common.adapter import Adapter
from holdfast.session.steps.nonfinite import NonfiniteCheck
from holdfast.session.steps.participant import StepParticipant
from holdfast.session.steps.step import Step, StepAborted, StepRunner
from holdfast.session.steps.voting import VoteCaster
from tests.session.participants import Connection


class GateAdapter:
    """An adapter that rehearses once in a newcomer, as MindSpore's does. Its other methods do nothing."""

    def __init__(self) -> None:
        self.rehearsed = self.begun = 0
        self.poisoned = self.scaled = False
        self.reason = ""

    def rehearse(self) -> bool:
        self.rehearsed += 1
        return self.rehearsed == 1

    def begin(self, step: int) -> None:
        self.begun += 1

    def __getattr__(self, name: str) -> Any:
        if name in ("gradients", "tentative"):
            raise AttributeError(
                name
            )  # the framework keeps gradients in its graph, and no update communicates
        return lambda *arguments, **options: None


class Newcomer(StepParticipant):
    """The participant of a newcomer that joins without a control plane."""

    joins = 0

    def join(self) -> None:
        self.script.join()
        self.joins += 1

    def retry_now(self) -> bool:
        with self.changed:
            return self.machine.retry(Generation(1, 1))


def test_a_newcomer_rehearses_once_and_then_joins() -> None:
    adapter: Any = GateAdapter()
    typed: Adapter = adapter
    client: Any = Connection(joining=True)
    rank = Newcomer(typed, client)
    rank.open(10)
    owner: Any = GateAdapter()
    blocks = StepRunner(rank, typed, VoteCaster(rank, typed), owner, NonfiniteCheck(typed, "ignore"))
    step = Step(blocks, 10)
    blocks.begin(step)
    assert step.rehearsal and not rank.joins
    with pytest.raises(StepAborted, match="rehearsal"):
        blocks.hooks().update("optimizer")
    blocks.redo()
    assert (rank.joins, adapter.begun, rank.state) == (1, 2, "compute")
    assert blocks.current is step and not step.rehearsal


def test_nothing_is_open_that_could_begin_again() -> None:
    adapter: Any = GateAdapter()
    rank = Newcomer(adapter, None)
    with pytest.raises(StepError, match="no step is open"):
        StepRunner(
            rank, adapter, VoteCaster(rank, adapter), adapter, NonfiniteCheck(adapter, "ignore")
        ).redo()
