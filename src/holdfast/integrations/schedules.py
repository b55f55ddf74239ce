"""Learning rates that follow from the score of an evaluation, as plain values.

Theory. Such a schedule goes on between two steps, after the evaluation. Whoever restarts at the end of the step
evaluates again and lets it go on again, so it is first taken back to where it was when the step ended.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any


def schedule_of(schedulers: Iterable[Any], optimizer: Any) -> dict[str, Any]:
    """Where they are, and the learning rates that they set."""
    rates = [group["lr"] for group in optimizer.param_groups]
    return copy.deepcopy({"states": [each.state_dict() for each in schedulers], "rates": rates})


def take_back(schedule: dict[str, Any], schedulers: Iterable[Any], optimizer: Any) -> None:
    """To ``schedule``."""
    schedule = copy.deepcopy(schedule)
    for each, state in zip(schedulers, schedule["states"], strict=True):
        each.load_state_dict(state)
    for group, rate in zip(optimizer.param_groups, schedule["rates"], strict=True):
        group["lr"] = rate
