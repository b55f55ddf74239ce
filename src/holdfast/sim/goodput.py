"""Goodput of a fleet: what faults cost in the long run, by cause. Arithmetic, nothing is simulated here.

Theory. Faults of cause i come at rate ``ranks / hours`` (Poisson); one costs ``stop_s`` until the job trains again and
``redo_s`` of work done twice. A recovery that another fault hits begins anew, so a stop of c seconds under the total
rate r takes ``(e^(r c) - 1) / r`` seconds. Goodput is useful time over all time.

Invariants:
1. Without faults goodput is 1; more ranks, higher rates or longer stops never raise it.
2. The shares of all causes and the goodput add up to 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


class Cause(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of fault. ``rank_hours``: hours of one rank between two of them."""

    name: str
    rank_hours: float
    stop_s: float
    redo_s: float


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """What one cause costs. ``share``: of all time."""

    name: str
    per_day: float
    each_s: float
    share: float


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet's goodput and where the rest goes."""

    ranks: int
    goodput: float
    losses: tuple[Loss, ...]


def default_causes(mean_hours: float, step_s: float, stop_s: float) -> tuple[Cause, ...]:
    """Assumed causes: shares of ``mean_hours`` (rank-hours between faults) and multiples of one stop.

    A worker or its device fails most often; a whole node takes its detection on top; a hang is seen after twelve steps;
    a controller costs nothing. Half a step is done twice.
    """
    redo_s = step_s / 2
    return (
        Cause(name="worker lost", rank_hours=mean_hours / 0.65, stop_s=stop_s, redo_s=redo_s),
        Cause(name="node lost", rank_hours=mean_hours / 0.20, stop_s=stop_s + 4.5, redo_s=redo_s),
        Cause(name="hang", rank_hours=mean_hours / 0.10, stop_s=stop_s + 12 * step_s, redo_s=redo_s),
        Cause(name="controller lost", rank_hours=mean_hours / 0.05, stop_s=0.0, redo_s=0.0),
    )


def forecast(ranks: int, causes: Sequence[Cause]) -> Forecast:
    """Expected goodput of a job of ``ranks`` ranks that always has a replacement at hand."""
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
