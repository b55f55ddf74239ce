"""The calls that make up one step of somebody else's loop: run again, in order, when the step is aborted.

Invariant: a call is seeded by its place in the step, so what a framework draws between two of them is not drawn again.
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
    """This process takes the place of a lost one: the others are ahead of it, and it communicates with nobody yet."""
    client = WorkerClient.current()
    return client is not None and client.joining


class RecordedCalls:
    """One step after the other.

    Attributes:
        step: the step at hand.
        is_open: its block is.
    """

    def __init__(self, steps: Iterator[Step]) -> None:
        """``steps``: of the session."""
        self._steps = steps
        self._remembered: list[Callable[[], Any]] = []
        self._seed = 0
        self.step = next(steps)
        self.is_open = False

    def begin(self) -> None:
        """Open the block; nothing when it is open."""
        if not self.is_open:
            self._enter()
            self.is_open = True

    def do(self, call: Callable[[], Any]) -> Any:
        """Run ``call`` and return its result; again, with all before it, after an abort."""
        seeded = partial(self._seeded, len(self._remembered), call)
        self._remembered.append(seeded)
        return self._run([seeded])

    def commit(self) -> None:
        """End the block: when this returns, the step counts."""
        while True:
            self.step.__exit__(None, None, None)
            if self.step.committed:
                break
            self._again()
            self._run(self._remembered)
        self._remembered.clear()
        self.is_open = False

    def follow(self) -> bool:
        """Go on to the next step; False when none follows."""
        following = next(self._steps, None)
        if following is not None:
            self.step = following
        return following is not None

    def _run(self, calls: list[Callable[[], Any]]) -> Any:
        """Run ``calls`` in the open block; everything since its start after each abort. The last call's result."""
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
        """The aborted step once more."""
        self.step = next(self._steps)
        self._enter()

    def _enter(self) -> None:
        self.step.__enter__()
        self._seed = torch.initial_seed()  # the session's, of this rank and step

    def _seeded(self, place: int, call: Callable[[], Any]) -> Any:
        seed_all(mix(self._seed, place))
        return call()
