"""A session inside a training loop that is not ours.

Theory. ``with step:`` wants to own the body of the loop, so that an aborted step can be run again. A framework owns its
loop and calls back. So the calls that make up one step are remembered as they come (:meth:`Replay.do`); when the step
is aborted, wherever that shows, the block is opened again and they are run again, in order, before the framework goes
on. From the framework's side its call has only taken longer.

Rules for the caller:
1. A remembered call may run several times: it takes its inputs from copies and leaves nothing behind but gradients.
   Each is seeded by its place in the step: what a framework draws between two calls is not drawn again.
2. Nothing communicates between the optimizer's update and :meth:`Replay.commit`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch

import holdfast
from holdfast.adapters.torch.rng import mix, seed_all
from holdfast.session.session import Session


class Replay:
    """A session and its steps, driven from inside a framework's loop.

    Attributes:
        is_open: a step is under way.
        position: where the framework's loop was at the step that the session was resumed from; empty when it was not.
        own: plain values of this rank alone that were committed with that position; None where nobody knows them.
    """

    def __init__(self, **arguments: Any) -> None:
        """``arguments`` are those of :func:`holdfast.session`, which is entered here; its errors are raised here."""
        self.is_open = False
        self.position: dict[str, Any] = {}
        self._committed: tuple[int, dict[str, Any]] = (-1, {})
        self._calls: list[Callable[[], Any]] = []
        self._seed = 0
        self._session: Session | None = None
        session = holdfast.session(**{**arguments, "state": {**arguments.get("state", {}), "loop": self}})
        session.__enter__()
        self._session = session
        self.own = session.own
        self._steps = session.steps(until=sys.maxsize)
        self._step = next(self._steps)

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
        if not self.is_open:
            self._enter()
            self.is_open = True

    def do(self, call: Callable[[], Any]) -> Any:
        """Run ``call`` as a part of the step and return its result; again, with all before it, after an abort."""
        seeded = partial(self._seeded, len(self._calls), call)
        self._calls.append(seeded)
        return self._run([seeded])

    def remembering(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, as a part of the step whenever it is called."""
        return wraps(call)(lambda *args, **kwargs: self.do(partial(call, *args, **kwargs)))

    def commit(self, position: dict[str, Any], own: Any = None) -> None:
        """End the block: the step counts, and the loop is at ``position`` (plain values or tensors) after it.

        ``own``: plain values of this rank alone.

        Raises:
            SystemExit: all ranks have agreed to leave, and the checkpoint is written.
        """
        self._committed = (self._step.number + 1, position)
        if self._session is not None:
            self._session.own = own
        while True:
            self._step.__exit__(None, None, None)
            if self._step.committed:
                break
            self._again()
            self._run(self._calls)
        self.position = position
        self._calls.clear()
        self.is_open = False
        following = next(self._steps, None)
        if following is None:
            self.close(None)
        else:
            self._step = following

    def amend(self, position: dict[str, Any]) -> None:
        """What all ranks did since the step ended is a part of its position, too: a newcomer begins after it."""
        self._committed = (self._committed[0], position)
        self.position = position

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

    # ------------------------------------------------------------------ inside

    def _run(self, calls: list[Callable[[], Any]]) -> Any:
        """Run ``calls`` in the open block; everything since its start after each abort. The last call's result."""
        while True:
            try:
                for call in calls:
                    result = call()
            except BaseException as error:
                if not self._step.__exit__(type(error), error, None):
                    self.is_open = False
                    raise
                self._again()
                calls = self._calls
            else:
                return result

    def _again(self) -> None:
        """The aborted step once more."""
        self._step = next(self._steps)
        self._enter()

    def _enter(self) -> None:
        self._step.__enter__()
        self._seed = torch.initial_seed()  # the session's, of this rank and step

    def _seeded(self, place: int, call: Callable[[], Any]) -> Any:
        seed_all(mix(self._seed, place))
        return call()


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
