"""Steps for a framework that drives its own loop and asks for each step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast.errors import InternalError
from holdfast.session.loops.loop_bounds import ENDLESS
from holdfast.session.session import Session
from holdfast.session.steps.step import Step


def steps_of_framework(session: Session, loader: Any = None) -> Iterator[Step]:
    """Return an iterator over all steps of the job.

    The framework and its callbacks run code between this call and the first step (``on_epoch_begin``). Every process
    that starts again runs this code, although the restored state already contains its effect. So the code is placed
    between two loops of the session, after which the saved state is restored (``loop.py``). The first of these two
    loops has no steps.

    Args:
        loader: the source of the framework's batches, if the session gives them.
    """
    session.takes_loops()
    for step in session.steps(until=0):
        raise InternalError(f"step {step.number} of a loop without steps")
    return session.steps(loader, until=ENDLESS)
