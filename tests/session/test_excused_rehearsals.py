"""An exception that leaves a rehearsal is excused: it comes again in the run with peers if it has another cause."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.errors import UsageError
from holdfast.session.steps.nonfinite import NonfiniteCheck
from holdfast.session.steps.step import Step, StepRunner
from holdfast.session.steps.voting import VoteCaster
from tests.session.participants import Connection
from tests.session.test_redo import GateAdapter, Newcomer


class SumsAdapter(GateAdapter):
    """An adapter that rehearses until the rehearsal is given up."""

    def __init__(self, *, gives_up: bool) -> None:
        super().__init__()
        self._gives_up, self.given_up, self.agreed = gives_up, 0, 0

    def rehearse(self) -> bool:
        return not self.given_up

    def excuse(self) -> bool:
        self.given_up += self._gives_up
        return self._gives_up

    def agree(self) -> None:
        self.agreed += 1


def opened(*, gives_up: bool = True) -> tuple[SumsAdapter, Newcomer, StepRunner]:
    """Return the parts of a session of a newcomer at step 10."""
    adapter = SumsAdapter(gives_up=gives_up)
    typed: Any = adapter
    client: Any = Connection(joining=True)
    rank = Newcomer(typed, client)
    rank.open(10)
    owner: Any = GateAdapter()
    votes = VoteCaster(rank, typed)
    return adapter, rank, StepRunner(rank, typed, votes, owner, NonfiniteCheck(typed, "ignore"))


@pytest.mark.parametrize("error", [AssertionError("a sample is missing"), SystemExit(1)])
def test_a_rehearsal_that_raises_is_given_up_and_the_newcomer_joins(error: BaseException) -> None:
    adapter, rank, blocks = opened()
    step = Step(blocks, 10)
    blocks.begin(step)
    assert step.rehearsal and blocks.end(step, error)
    assert (adapter.given_up, rank.joins) == (1, 0)
    again = Step(blocks, 10)
    blocks.begin(again)
    assert (again.rehearsal, rank.joins, adapter.agreed) == (False, 1, 1)
    assert not blocks.end(again, error)


@pytest.mark.parametrize("error", [UsageError("wrong argument"), KeyboardInterrupt()])
def test_an_error_that_peers_cannot_explain_is_not_excused(error: BaseException) -> None:
    adapter, _, blocks = opened()
    step = Step(blocks, 10)
    blocks.begin(step)
    assert not blocks.end(step, error) and not adapter.given_up


def test_a_process_that_needs_its_rehearsal_ends_with_the_error_and_a_note() -> None:
    _, _, blocks = opened(gives_up=False)
    step = Step(blocks, 10)
    blocks.begin(step)
    error = AssertionError("a sample is missing")
    assert not blocks.end(step, error)
    assert "this run of the block had no peers" in error.__notes__[0]


def test_a_spare_gives_its_rehearsal_up_until_it_is_called() -> None:
    """Regression: the spare died, and three of them ended the building of spares."""
    adapter, _, blocks = opened(gives_up=False)
    step = Step(blocks, 10, rehearsal=True, scrap=True)
    blocks.begin(step)
    assert blocks.end(step, AssertionError("a sample is missing"))
    assert step.idle and not adapter.given_up
