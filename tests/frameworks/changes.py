"""Changes that jobs make outside of their blocks, and one fault of the job.

The fault comes at ``mid`` of a block, ``term`` there (SIGTERM), ``behind`` (after) it, or ``changed``, which is when
the change has been made.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.core.worker import decision_orders

EPOCHS, EPOCH_STEPS = 3, 3
LONG_S = 1.5
"""A script that is struck between two loops stays there for longer than it is waited for."""


class Counted:
    """An object of the user with its own state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as torch's objects do."""
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state back."""
        self.count = state["count"]


class Changes:
    """The changes of ``python JOB.py WAY [RANK:STEP:WHERE]``. WAY is the place of the change.

    WAY is ``behind`` (after a block), ``before`` a block, in the ``block``, or ``between`` two loops.

    Attributes:
        state: for the session.
        fields: an array that the script also refers to.
    """

    def __init__(self, rank: int, holder: Any) -> None:
        self.way, self._kill = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
        self.rank = rank
        self.history: list[float] = []
        self.fields = np.zeros(3)
        self.counted = Counted()
        self.state = {
            "history": self.history, "fields": self.fields, "counted": self.counted, "holder": holder,
        }  # fmt: skip
        decision_orders.SCRIPT_TIMEOUT_S = (
            0.3 if self.way == "between" and self._kill else decision_orders.SCRIPT_TIMEOUT_S
        )

    def made(self, step: int) -> None:
        """Change the plain values."""
        self.history.append(float(step))
        self.fields += step
        self.counted.count += 1

    def struck(self, step: int, where: str) -> None:
        """Kill this rank at this place, once in the job."""
        rank, _, place = self._kill.partition(":")
        if place != f"{step}:{where}" or Path("struck").exists():
            return
        if rank != str(self.rank):
            time.sleep(LONG_S if self.way == "between" else 0)
            return
        time.sleep(0.4)  # the others have also made their change
        Path("struck").touch()
        os.kill(os.getpid(), signal.SIGTERM if where == "term" else signal.SIGKILL)
        time.sleep(0.1)

    def learn(self, step: Any, train: Callable[[Any], None], change: Callable[[int], None]) -> None:
        """Run the block of a step and the code after it."""
        number, last = step.number, (step.number + 1) % EPOCH_STEPS == 0
        with step as batch:
            if self.way == "block" and last:
                change(number)
            self.struck(number, "mid")
            self.struck(number, "term")
            train(batch)
        if self.way == "behind" and step.committed and last:
            self.struck(number, "behind")
            change(number)
            self.struck(number, "changed")

    def loops(
        self,
        session: Any,
        steps: Callable[[int], Iterable[Any]],
        learn: Callable[[Any], None],
        change: Callable[[int], None],
    ) -> None:
        """Run the whole training, in one loop or in one loop per epoch.

        ``steps`` returns the loop up to its argument.
        """
        for epoch in session.epochs(EPOCHS if self.way == "between" else 1):
            until = (epoch + 1) * EPOCH_STEPS if self.way == "between" else EPOCHS * EPOCH_STEPS
            for step in steps(until):
                number = step.number
                if self.way == "before" and number and number % EPOCH_STEPS == 0 and not step.again:
                    change(number)
                    self.struck(number, "changed")
                learn(step)
            if self.way != "between":
                break
            change(session.step)
            self.struck(session.step, "changed")

    def told(self, digest: str, holder: float, rate: float) -> None:
        """Print the final values of this rank."""
        end = (self.history, self.fields.tolist(), self.counted.count, round(holder, 9), round(rate, 9))
        print("end", digest, end, flush=True)
