"""The machine of one rank in a stop of all ranks: orders, reports, and stops that are over before they begin."""

from __future__ import annotations

from holdfast.core.ids import NO_GENERATION, Generation, MemberId
from holdfast.core.protocol.notices import HoldOrder, HoldOver, HoldReached
from holdfast.core.worker.pause import PauseMachine

ME = MemberId(1)
HERE, LATER = Generation(1, 2), Generation(1, 3)


def test_an_order_counts_for_votes_of_its_generation_and_for_one_stop() -> None:
    machine = PauseMachine()
    machine.handle(HoldOrder(member_id=ME, generation=HERE))
    assert machine.asks(HERE) and not machine.asks(LATER) and not machine.asks(NO_GENERATION)
    assert machine.reach(ME, HERE, 7) == HoldReached(member_id=ME, generation=HERE, step=7)
    assert not machine.asks(HERE) and machine.reach(ME, HERE, 8) is None


def test_only_the_rank_that_has_asked_reports_the_stop() -> None:
    assert PauseMachine().reach(ME, HERE, 7) is None


def test_a_stop_may_be_over_before_this_rank_has_reached_it() -> None:
    machine = PauseMachine()
    machine.handle(HoldOver(member_id=ME, generation=HERE, step=7))
    assert machine.is_over(HERE, 7)
    assert not machine.is_over(HERE, 8) and not machine.is_over(LATER, 7)
