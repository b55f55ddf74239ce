"""A session inside a training loop that another library drives.

Theory. ``with step:`` normally owns the body of the loop, so that it can run an aborted step again. A framework owns
its loop and calls back. So the calls that make up one step are recorded as they come (``recorded_calls.py``). When the
step is aborted, its block is opened again and the recorded calls run again in order. This happens inside that call of
the framework during which the abort is found. For the framework this call only takes longer.

Rules for the caller:
1. A recorded call may run several times: it takes its inputs from copies and has no other effect than gradients.
2. Nothing communicates between the optimizer's update and :meth:`Replay.commit`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import holdfast
from holdfast.frameworks.common.random_streams import Streams
from holdfast.integrations.drawn_batches import DrawnBatches
from holdfast.integrations.recorded_calls import RecordedCalls
from holdfast.session.session import Session


class Replay:
    """A session and its steps, driven from inside a framework's loop.

    Attributes:
        position: the position of the framework's loop at the step from which the session was resumed; empty without a
            resume.
        own: plain values of this rank alone that were committed with ``position``; None if they are not known.
        drawn: the batches of this rank, compared with those that the earlier process with this rank drew.
        may_differ: True if the position may differ between ranks (metrics of their own data, times), so the session
            does not warn.
        shows_committed_steps: the result of ``state_dict`` changes only when a step commits, so no step copies it.
    """

    may_differ = True
    shows_committed_steps = True

    def __init__(self, **arguments: Any) -> None:
        """Open the session with the ``arguments`` of :func:`holdfast.session`. Raises: the errors of that function."""
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
    def streams(self) -> Streams | None:
        """The streams of random numbers of all copies of the model; None if each copy has its own."""
        return None if self._session is None else self._session.streams

    @property
    def is_open(self) -> bool:
        """True while the block of a step is open."""
        return self._calls.is_open

    # ------------------------------------------------------------------ called by the session

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loop at the session's step. Callable from any thread, also during a commit."""
        step, value = self._committed
        return value if self._session is not None and self._session.step == step else self.position

    def load_state_dict(self, value: dict[str, Any]) -> None:
        """Take over the position ``value`` from a checkpoint."""
        self.position = value

    # ------------------------------------------------------------------ called by the framework's integration

    def begin(self, own: Any = None) -> None:
        """Open the block of the next step. If a block is open, do nothing.

        Args:
            own: plain values of this rank alone at the start of the step; None means the values of the last commit.
        """
        if not self._calls.is_open:
            self.own = self.own if own is None else own
            self._keep()
        self._calls.begin()

    def do(self, call: Callable[[], Any]) -> Any:
        """Run ``call`` as a part of the step and return its result. After an abort, all calls of the step run again."""
        return self._calls.do(call)

    def remembering(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of ``call``. Each use of the wrapper is a recorded part of the step."""
        return wraps(call)(lambda *args, **kwargs: self.do(partial(call, *args, **kwargs)))

    def commit(self, position: dict[str, Any], own: Any = None) -> None:
        """End the block, and return when the step is committed.

        Args:
            position: the position of the loop after the step (plain values or tensors).
            own: plain values of this rank alone.

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
            self._session.keep_own({"own": self.own, "drawn": self.drawn.record})

    def amend(self, position: dict[str, Any]) -> None:
        """Replace the position, because all ranks have done further work since the step ended.

        A newcomer begins after that work.
        """
        self._committed = (self._committed[0], position)
        self.position = position
        if self._session is not None:
            self._session.framework_stands()

    def close(self, error: BaseException | None) -> None:
        """Close the session at the end of training, or with the ``error`` that ends it. If it is closed, do nothing.

        Raises:
            SystemExit: all ranks have agreed to leave, and the checkpoint is written.
        """
        session, self._session = self._session, None
        if session is not None:
            session.__exit__(None if error is None else type(error), error, None)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Announce long work between two steps to the session. Without a name or a session, do nothing."""
        with self._session.section(name) if self._session is not None and name else nullcontext():
            yield


@contextmanager
def closing(replay: Callable[[], Replay | None]) -> Iterator[None]:
    """When an exception leaves the ``with`` body, close the session of ``replay()``, if there is one."""
    try:
        yield
    except BaseException as error:
        opened = replay()
        if opened is not None:
            opened.close(error)
        raise
