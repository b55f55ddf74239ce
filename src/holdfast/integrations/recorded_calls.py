"""The recorded calls of one step in another library's loop. They run again, in order, when the step is aborted.

Invariant: the seed of a call depends on its index in the step. Random numbers that a framework draws between two calls
therefore do not change the random numbers of the second call.
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
    """Return True if this process replaces a lost process, and has not yet joined the other ranks."""
    client = WorkerClient.current()
    return client is not None and client.joining


class RecordedCalls:
    """The steps of a session, one after the other, with the recorded calls of each step.

    Attributes:
        step: the current step.
        is_open: True while the block of the step is open.
    """

    def __init__(self, steps: Iterator[Step]) -> None:
        """Take the first step from ``steps``, the iterator of the session's steps."""
        self._steps = steps
        self._remembered: list[Callable[[], Any]] = []
        self._seed = 0
        self.step = next(steps)
        self.is_open = False

    def begin(self) -> None:
        """Open the block of the current step. If the block is open, do nothing."""
        if not self.is_open:
            self._enter()
            self.is_open = True

    def do(self, call: Callable[[], Any]) -> Any:
        """Record and run ``call``, and return its result. After an abort, run all calls of the step again in order."""
        seeded = partial(self._seeded, len(self._remembered), call)
        self._remembered.append(seeded)
        return self._run([seeded])

    def commit(self) -> None:
        """End the block, and return when the step is committed."""
        while True:
            self.step.__exit__(None, None, None)
            if self.step.committed:
                break
            self._again()
            self._run(self._remembered)
        self._remembered.clear()
        self.is_open = False

    def follow(self) -> bool:
        """Move to the next step of the session. Return False if there is none."""
        following = next(self._steps, None)
        if following is not None:
            self.step = following
        return following is not None

    def _run(self, calls: list[Callable[[], Any]]) -> Any:
        """Run ``calls`` in the open block. After each abort run all calls of the step. Return the last result."""
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
        """Open the block of the aborted step again."""
        self.step = next(self._steps)
        self._enter()

    def _enter(self) -> None:
        self.step.__enter__()
        self._seed = torch.initial_seed()  # the seed that the session set for this rank and step

    def _seeded(self, place: int, call: Callable[[], Any]) -> Any:
        seed_all(mix(self._seed, place))
        return call()
