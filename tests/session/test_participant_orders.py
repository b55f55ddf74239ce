"""Orders of the control plane at one rank: which of them count, and when."""

from __future__ import annotations

import threading

from holdfast.core.ids import Generation
from holdfast.core.worker.position import ScriptEvent
from holdfast.core.worker.vote import Tally
from holdfast.session.steps.participant import StepParticipant
from tests.session.participants import fence, generation, participant, resume, settle

BOUND_S = 30.0


def at_block(rank: StepParticipant, step: int) -> None:
    """Open the session at ``step``, in a loop that can go back to step 0, and begin the block."""
    rank.open(step)
    with rank.changed:
        rank.script.handle(ScriptEvent.LOOP_OPENED)
        rank.script.allow_rewind(0)
    take_block(rank)


def take_block(rank: StepParticipant) -> None:
    """Begin the block of the next step."""
    assert rank.take_step()
    rank.moved(ScriptEvent.STEP_GIVEN)
    assert rank.begin()


def commit(rank: StepParticipant) -> None:
    """Commit the open block."""
    assert rank.enter_vote() and rank.voted(Tally(passed=True)) == "updating"
    rank.commit(None)
    rank.moved(ScriptEvent.RETURNED)


def recover(rank: StepParticipant, number: int, step: int) -> None:
    """Fence a rank in its block, and let it continue at the same step."""
    rank.on_fence(fence(number))
    rank.moved(ScriptEvent.BLOCK_LEFT)
    rank.on_settle(settle(number, step, then="retry"))
    rank.on_resume(resume(number, step))
    rank.await_resume()


def in_thread(rank: StepParticipant) -> threading.Thread:
    """Wait for the order to continue in a thread, as the main thread of a rank does."""
    thread = threading.Thread(target=rank.await_resume, daemon=True)
    thread.start()
    return thread


def test_an_order_that_a_successor_repeats_while_groups_are_built_counts_once() -> None:
    """Regression: the repeated order stayed, and the next fault was answered with it before its fence came."""
    rank, _, groups = participant()
    at_block(rank, 4)

    def repeated(in_generation: Generation) -> None:
        rank.on_resume(resume(2, 4))

    groups.during = repeated
    recover(rank, 2, 4)
    groups.during = lambda in_generation: None
    take_block(rank)
    commit(rank)
    take_block(rank)
    rank.fail()  # a collective breaks, and the fence has not come yet
    rank.moved(ScriptEvent.BLOCK_LEFT)
    waiting = in_thread(rank)
    waiting.join(2.0)
    assert waiting.is_alive(), f"it continues without an order: {groups.rebuilt}, step {rank.step}"
    rank.on_fence(fence(3))
    rank.on_settle(settle(3, 5, then="retry"))
    rank.on_resume(resume(3, 5))
    waiting.join(BOUND_S)
    assert not waiting.is_alive() and groups.rebuilt == [generation(2), generation(3)]
