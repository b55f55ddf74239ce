"""Two folds read the event log: of a successor of the controller, and of all other readers. Their facts are equal."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from holdfast.core.job.log_replay import ReplayedState
from holdfast.event_log import SCHEMA_VERSION, Event
from holdfast.history.run_history import RunHistory
from holdfast.sim.faults import SimFault, random_faults
from holdfast.sim.world import run_sim

RANKS = 4


def both(seed: int) -> Iterator[tuple[ReplayedState, RunHistory, Event]]:
    """Yield the results of both folds after each record of a simulated run."""
    rng = random.Random(seed)
    memory = seed % 3  # 0: all states are lost with their last holder, so the job falls back to a checkpoint
    faults = random_faults(rng, RANKS, 1.5, rng.randint(1, 4))
    if seed % 2:
        faults += (SimFault(kind="ask_exit", at_s=1.5),)
    found = run_sim(RANKS, seed, faults, shards=RANKS if memory else 2, memory=memory)
    past, history = ReplayedState(), RunHistory()
    for number, record in enumerate(found.records):
        event = Event(
            SCHEMA_VERSION, number, float(number), float(number), "", record.kind, dict(record.data)
        )
        past = past.after(record)
        history.take(event)
        yield past, history, event


@pytest.mark.parametrize("seed", range(20))
def test_both_folds_know_the_same(seed: int) -> None:
    for past, history, event in both(seed):
        newest = {rank: member for member, rank in sorted(history.members.items())}
        assert past.seated_members == newest, event
        assert past.attempts - 1 == history.attempt, event
        assert not past.seats or str(past.seated) == history.generation, event
        assert (past.session, past.root) == (history.session, history.root), event
        assert past.sealed_step == history.sealed_step, event
        assert past.exit_source == history.exiting, event
        assert (-1 if past.agreed_step is None else past.agreed_step) == history.agreed_step, event
    assert history.ended is not None
