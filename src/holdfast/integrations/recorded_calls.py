"""The recorded calls of one step in another library's loop: run again, in order, when the step is aborted.

Invariant: the seed of a call depends on its index in the step. What a framework draws between two calls therefore does
not change the random numbers of the second one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from holdfast.frameworks.torch.state.rng import mix, seed_all
from holdfast.runtime.worker.worker_client import WorkerClient
from holdfast.session.steps.step import Step


def is_newcomer() -> bool:
    """Return True if this process replaces a lost one and does not communicate yet. The other ranks are ahead of it."""
    client = WorkerClient.current()
    return client is not None and client.joining


class RecordedCalls:
    """The steps of a session, one after the other, with the calls of each.

    Attributes:
        step: the current step.
        is_open: its block is open.
    """

    def __init__(self, steps: Iterator[Step]) -> None:
        """Take the first step of ``steps``, the steps of the session."""
        self._steps = steps
        self._remembered: list[Callable[[], Any]] = []
        self._seed = 0
        self.step = next(steps)
        self.is_open = False

    def begin(self) -> None:
        """Open the block; do nothing if it is open."""
        if not self.is_open:
            self._enter()
            self.is_open = True

    def do(self, call: Callable[[], Any]) -> Any:
        """Run ``call`` and return its result. After an abort, run it again with all calls before it."""
        seeded = partial(self._seeded, len(self._remembered), call)
        self._remembered.append(seeded)
        return self._run([seeded])

    def commit(self) -> None:
        """End the block, and return when the step counts."""
        while True:
            self.step.__exit__(None, None, None)
            if self.step.committed:
                break
            self._again()
            self._run(self._remembered)
        self._remembered.clear()
        self.is_open = False

    def follow(self) -> bool:
        """Move to the next step. Return False if none follows."""
        following = next(self._steps, None)
        if following is not None:
            self.step = following
        return following is not None

    def _run(self, calls: list[Callable[[], Any]]) -> Any:
        """Run ``calls`` in the open block, and after each abort all calls of the step. Return the last result."""
        while True:
            try:
                for call in calls:
                    result = call()
            except BaseException as error:
                if not self.step.__exit__(type(error), error, None):
                    self.is_open = False
                    raise
                self._again()
                calls = self._remembered
            else:
                return result

    def _again(self) -> None:
        """Enter the aborted step again."""
        self.step = next(self._steps)
        self._enter()

    def _enter(self) -> None:
        self.step.__enter__()
        self._seed = torch.initial_seed()  # the seed that the session set for this rank and step

    def _seeded(self, place: int, call: Callable[[], Any]) -> Any:
        seed_all(mix(self._seed, place))
        return call()
