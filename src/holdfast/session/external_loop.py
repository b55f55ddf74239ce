"""The steps of a session for a framework that drives its own training loop and requests one step at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast.errors import InternalError
from holdfast.session.loops.loop_bounds import ENDLESS
from holdfast.session.session import Session
from holdfast.session.steps.step import Step


def steps_of_framework(session: Session, loader: Any = None) -> Iterator[Step]:
    """Return an iterator over all steps of the job.

    The framework and its callbacks (``on_epoch_begin``) run code between this call and the first step. A restarted
    process runs this code again, although the restored state already contains its effect. Between two loops, a
    session undoes the second effect of such code (``loops/loop.py``). So this function first runs a loop without
    steps. The code of the framework then lies between this empty loop and the loop over the steps.

    Args:
        loader: the loader from which the framework gets its batches; None if the framework draws batches itself.
    """
    session.takes_loops()
    for step in session.steps(until=0):
        raise InternalError(f"step {step.number} of a loop without steps")
    return session.steps(loader, until=ENDLESS)
