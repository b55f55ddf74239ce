"""Orders of the control plane at one rank: which of them count, and when."""

from __future__ import annotations

import threading

from holdfast.core.ids import Generation
from holdfast.core.protocol.messages import Settled
from holdfast.core.worker.position import ScriptEvent
from holdfast.core.worker.vote import Tally
from holdfast.session.steps.participant import StepParticipant
from holdfast.session.steps.participant_calls import ParticipantCalls
from tests.session.participants import Connection, fence, generation, participant, resume, settle

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


def run_tasks(connection: Connection) -> None:
    """Run the tasks as the task thread of the client does."""
    while connection.tasks:
        connection.tasks.pop(0)()


def test_an_order_of_a_decision_that_a_newer_fence_overtakes_is_not_carried_out() -> None:
    """Regression: a rank at the same step carried it out before the order of the newer decision."""
    rank, connection, _ = participant()
    done: list[Generation] = []
    rank.connect(ParticipantCalls(carry_out=lambda command: done.append(command.order.settle.generation)))
    at_block(rank, 4)
    rank.on_fence(fence(2))
    rank.moved(ScriptEvent.BLOCK_LEFT)
    rank.on_settle(settle(2, 4, then="replace"))
    rank.on_fence(fence(3))
    rank.on_settle(settle(3, 4, then="replace"))
    run_tasks(connection)
    assert done == [generation(3)]


def test_the_state_is_no_longer_served_before_the_script_continues() -> None:
    rank, connection, _ = participant()
    seen: list[str] = []
    rank.connect(
        ParticipantCalls(
            carry_out=lambda command: seen.append(command.order.kind.value),
            end_serving=lambda: seen.append(f"ends, step {rank.state}"),
        )
    )
    at_block(rank, 4)
    rank.on_fence(fence(2))
    rank.moved(ScriptEvent.BLOCK_LEFT)
    waiting = in_thread(rank)
    rank.on_settle(settle(2, 4, then="replace"))
    run_tasks(connection)
    rank.on_resume(resume(2, 4))
    waiting.join(BOUND_S)
    assert not waiting.is_alive() and seen == ["give", "ends, step aborted"]
    assert rank.state == "ready"


def test_an_order_waits_in_the_task_thread_until_the_script_is_back() -> None:
    rank, connection, _ = participant()
    at_block(rank, 4)
    assert rank.enter_vote() and rank.voted(Tally(passed=True)) == "updating"
    rank.commit(None)
    positions: list[str] = []
    rank.connect(ParticipantCalls(carry_out=lambda command: positions.append(rank.script.position.value)))
    rank.on_fence(fence(2))
    rank.on_settle(settle(2, 5, then="replace"))
    task = threading.Thread(target=run_tasks, args=(connection,), daemon=True)
    task.start()
    task.join(0.2)
    assert task.is_alive() and not positions
    rank.moved(ScriptEvent.RETURNED)
    task.join(BOUND_S)
    assert not task.is_alive() and positions == ["boundary"]
    answers = connection.of(Settled)
    assert [(answer.state, answer.step) for answer in answers] == [("ready", 5)]
