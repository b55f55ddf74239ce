"""A session inside a training loop that is not ours.

Theory. ``with step:`` wants to own the body of the loop, so that an aborted step can be run again. A framework owns
its loop and calls back. So the calls that make up one step are remembered as they come (``recorded_calls.py``); when
the step is aborted, wherever that shows, the block is opened again and they are run again, in order, before the
framework goes on. From the framework's side its call has only taken longer.

Rules for the caller:
1. A remembered call may run several times: it takes its inputs from copies and leaves nothing behind but gradients.
2. Nothing communicates between the optimizer's update and :meth:`Replay.commit`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import holdfast
from holdfast.integrations.drawn_batches import DrawnBatches
from holdfast.integrations.recorded_calls import RecordedCalls
from holdfast.session.session import Session


class Replay:
    """A session and its steps, driven from inside a framework's loop.

    Attributes:
        position: where the framework's loop was at the step that the session was resumed from; empty when it was not.
        own: plain values of this rank alone that were committed with that position; None where nobody knows them.
        drawn: the batches of this rank, compared with those that the process before it drew.
        may_differ: between ranks, in metrics of each one's own data and in times; no user can do anything about it.
        shows_committed_steps: what ``state_dict`` returns changes with a step's commit alone, so no step copies it.
    """

    may_differ = True
    shows_committed_steps = True

    def __init__(self, **arguments: Any) -> None:
        """``arguments`` are those of :func:`holdfast.session`, which is entered here; its errors are raised here."""
        self.position: dict[str, Any] = {}
        self._committed: tuple[int, dict[str, Any]] = (-1, {})
        self._session: Session | None = None
        session = holdfast.session(**{**arguments, "state": {**arguments.get("state", {}), "loop": self}})
        session.__enter__()
        self._session = session
        kept = session.own
        known: dict[str, Any] = kept if isinstance(kept, dict) else {}
        self.own = known.get("own")
        self.drawn = DrawnBatches(known.get("drawn"), verify=arguments.get("verify_data", True))
        self._calls = RecordedCalls(session.steps(until=sys.maxsize))
        session.framework_stands()

    @property
    def is_open(self) -> bool:
        """A step is under way."""
        return self._calls.is_open

    # ------------------------------------------------------------------ what the session saves

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is at the session's step; asked from any thread, also while a commit is under way."""
        step, value = self._committed
        return value if self._session is not None and self._session.step == step else self.position

    def load_state_dict(self, value: dict[str, Any]) -> None:
        """From a checkpoint."""
        self.position = value

    # ------------------------------------------------------------------ what the framework calls

    def begin(self) -> None:
        """Open the block of the next step; nothing when it is open."""
        if not self._calls.is_open:
            self._keep()
        self._calls.begin()

    def do(self, call: Callable[[], Any]) -> Any:
        """Run ``call`` as a part of the step and return its result; again, with all before it, after an abort."""
        return self._calls.do(call)

    def remembering(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, as a part of the step whenever it is called."""
        return wraps(call)(lambda *args, **kwargs: self.do(partial(call, *args, **kwargs)))

    def commit(self, position: dict[str, Any], own: Any = None) -> None:
        """End the block: the step counts, and the loop is at ``position`` (plain values or tensors) after it.

        ``own``: plain values of this rank alone.

        Raises:
            SystemExit: all ranks have agreed to leave, and the checkpoint is written.
        """
        self._committed = (self._calls.step.number + 1, position)
        self.own = own
        self._keep()
        self._calls.commit()
        self.position = position
        if not self._calls.follow():
            self.close(None)

    def _keep(self) -> None:
        if self._session is not None:
            self._session.own = {"own": self.own, "drawn": self.drawn.record}

    def amend(self, position: dict[str, Any]) -> None:
        """What all ranks did since the step ended is a part of its position, too: a newcomer begins after it."""
        self._committed = (self._committed[0], position)
        self.position = position
        if self._session is not None:
            self._session.framework_stands()

    def close(self, error: BaseException | None) -> None:
        """Close the session, by the end of training or by the ``error`` that ends it; nothing when it is closed.

        Raises:
            SystemExit: as :meth:`commit`.
        """
        session, self._session = self._session, None
        if session is not None:
            session.__exit__(None if error is None else type(error), error, None)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Announce work between two steps that may take long; nothing without a name, or when the session is closed."""
        with self._session.section(name) if self._session is not None and name else nullcontext():
            yield


@contextmanager
def closing(replay: Callable[[], Replay | None]) -> Iterator[None]:
    """Whatever ends the body closes the session, when there is one by then."""
    try:
        yield
    except BaseException as error:
        opened = replay()
        if opened is not None:
            opened.close(error)
        raise
