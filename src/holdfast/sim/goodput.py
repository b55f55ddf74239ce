"""Expected goodput of a job, and the cost of faults by cause, from a formula.

Theory. Faults of one cause arrive at the rate ``ranks / rank_hours`` (a Poisson process). One fault stops the job for
``stop_s`` and makes it repeat ``redo_s`` of work. A fault during a recovery restarts the recovery. A stop of c seconds
therefore takes ``(e^(r c) - 1) / r`` seconds, with r the rate of all causes. Goodput is useful time / total time.

Invariants:
1. Without faults goodput is 1; more ranks, higher rates or longer stops never raise it.
2. The shares of all causes and the goodput add up to 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


class Cause(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One cause of faults.

    Attributes:
        name: name of the cause.
        rank_hours: mean hours between two faults of this cause on one rank.
        stop_s: seconds from a fault until the job trains again.
        redo_s: seconds of work that the job repeats after a fault.
    """

    name: str
    rank_hours: float
    stop_s: float
    redo_s: float


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of one cause of faults.

    Attributes:
        name: name of the cause.
        per_day: expected faults of the whole job per day.
        each_s: seconds that one fault costs.
        share: lost time as a fraction of the total time, from 0 to 1.
    """

    name: str
    per_day: float
    each_s: float
    share: float


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """The expected goodput (0 to 1) of a job of ``ranks`` ranks, and the cost of each cause of faults."""

    ranks: int
    goodput: float
    losses: tuple[Loss, ...]


def default_causes(mean_hours: float, step_s: float, stop_s: float) -> tuple[Cause, ...]:
    """Return four causes of faults with assumed frequencies: worker lost, node lost, hang, controller lost.

    Most faults are the loss of a worker or of its device. The detection of a lost node takes additional time. A hang is
    detected after the time of twelve steps. After each of these three, the job repeats half a step of work. The loss of
    a controller costs nothing.

    Args:
        mean_hours: mean hours between two faults of one rank, of any cause.
        step_s: seconds of one step.
        stop_s: seconds from the loss of a worker until the job trains again.
    """
    redo_s = step_s / 2
    return (
        Cause(name="worker lost", rank_hours=mean_hours / 0.65, stop_s=stop_s, redo_s=redo_s),
        Cause(name="node lost", rank_hours=mean_hours / 0.20, stop_s=stop_s + 4.5, redo_s=redo_s),
        Cause(name="hang", rank_hours=mean_hours / 0.10, stop_s=stop_s + 12 * step_s, redo_s=redo_s),
        Cause(name="controller lost", rank_hours=mean_hours / 0.05, stop_s=0.0, redo_s=0.0),
    )


def forecast(ranks: int, causes: Sequence[Cause]) -> Forecast:
    """Compute the expected goodput of a job of ``ranks`` ranks, if replacements are always available."""
    rates = {cause.name: ranks / (cause.rank_hours * 3600.0) for cause in causes}
    total = sum(rates.values())

    def whole_s(cause: Cause) -> float:
        stop_s = cause.stop_s if total == 0 else math.expm1(min(total * cause.stop_s, 700.0)) / total
        return stop_s + cause.redo_s

    lost = {cause.name: rates[cause.name] * whole_s(cause) for cause in causes}
    goodput = 1.0 / (1.0 + sum(lost.values()))
    losses = tuple(
        Loss(
            name=cause.name,
            per_day=rates[cause.name] * 86_400.0 * goodput,
            each_s=whole_s(cause),
            share=lost[cause.name] * goodput,
        )
        for cause in causes
    )
    return Forecast(ranks=ranks, goodput=goodput, losses=losses)
