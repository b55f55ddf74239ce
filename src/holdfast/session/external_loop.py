"""Steps of a framework that drives its own loop, and asks for each when it comes to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast.errors import InternalError
from holdfast.session.loops.loop_bounds import ENDLESS
from holdfast.session.session import Session
from holdfast.session.steps.step import Step


def steps_of_framework(session: Session, loader: Any = None) -> Iterator[Step]:
    """All steps of the job.

    Args:
        loader: where the framework takes its batches from, if the session gives them to it.

    What the framework and its callbacks do from here to the first of them (``on_epoch_begin``) they do in each process
    that starts again, and it is in the state already. So it stands between two loops of the session, the first of which
    has no steps: there it counts once (``loop.py``).
    """
    session.takes_loops()
    for step in session.steps(until=0):
        raise InternalError(f"step {step.number} of a loop without steps")
    return session.steps(loader, until=ENDLESS)
