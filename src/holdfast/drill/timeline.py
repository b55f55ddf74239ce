"""Reports of injected faults, made from the injector's records and the event log (pure).

Times are seconds from the fault itself, by the injector's clock, to the event of each phase. If a second fault comes
during a recovery, an event can occur twice. Then the last event counts for the phases ``restored`` and ``resumed``, and
the first event for all other phases, as in the run's own report (``core.job.fault.reach``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from holdfast.core.job.fault import SEEN, reach
from holdfast.drill.fault_spec import FLIPS
from holdfast.drill.inject import Injected
from holdfast.event_log import Event


class InjectedFaultReport(msgspec.Struct, frozen=True, kw_only=True):
    """One fault and its recovery.

    ``freed_s``: seconds until the last survivor had left its collectives. ``decision``: ``forward`` if the step of the
    in-doubt ranks was kept, ``back`` if it was dropped, ``none`` if no rank was in doubt. ``in_doubt``: number of
    in-doubt ranks.
    """

    kind: str
    rank: int
    ranks: tuple[int, ...]
    phase: str
    step: int
    detected_s: float | None = None
    freed_s: float | None = None
    fenced_s: float | None = None
    quiesced_s: float | None = None
    planned_s: float | None = None
    restored_s: float | None = None
    resumed_s: float | None = None
    action: str = ""
    decision: str = "none"
    in_doubt: int = 0
    steps_lost: int = 0

    @property
    def redone(self) -> bool:
        """True if repeated steps are expected after this fault. Then ``steps_lost`` is not a failure.

        Steps are repeated after a flipped bit. They are also repeated if the lost rank was the only holder of a box,
        and the memory tier had only an earlier state of this box.
        """
        return self.kind in FLIPS or self.action.endswith("_from_memory")

    def seconds(self, phase: str) -> float | None:
        """Return the seconds from the fault to the end of ``phase``; None if the recovery did not reach it."""
        value: float | None = getattr(self, f"{phase}_s")
        return value


def fault_reports(injected: Sequence[Injected], events: Iterable[Event]) -> list[InjectedFaultReport]:
    """Return one report per injected fault, in the order of ``injected``."""
    log = list(events)
    reports = []
    for index, fault in enumerate(injected):
        start_s = fault.moment_ns / 1e9
        end_s = injected[index + 1].moment_ns / 1e9 if index + 1 < len(injected) else float("inf")
        reports.append(_report(fault, start_s, [e for e in log if start_s <= e.t_mono < end_s]))
    return reports


def _report(fault: Injected, start_s: float, events: Sequence[Event]) -> InjectedFaultReport:
    times: dict[str, float] = {}
    decision, action, in_doubt, steps_lost = "none", "", 0, 0
    for event in events:
        if event.kind in SEEN:
            reach(times, event.kind, round(event.t_mono - start_s, 6))
        if event.kind == "planned":
            steps_lost = max(steps_lost, fault.committed_step - int(event.data["step"]))
            in_doubt += int(event.data["in_doubt"])
            if event.data["decision"] != "none":
                decision = str(event.data["decision"])
        elif event.kind == "verdict":
            action = str(event.data["action"])
        elif event.kind == "recovered":
            steps_lost = max(steps_lost, int(event.data["steps_lost"]))
    return InjectedFaultReport(
        kind=fault.kind,
        rank=fault.ranks[0],
        ranks=fault.ranks,
        phase=fault.phase,
        step=fault.step,
        freed_s=round(fault.freed_ns / 1e9 - start_s, 6) if fault.freed_ns else None,
        action=action,
        decision=decision,
        in_doubt=in_doubt,
        steps_lost=steps_lost,
        **{f"{phase}_s": seconds for phase, seconds in times.items()},
    )


def decisions(events: Iterable[Event]) -> dict[str, int]:
    """Return the number of in-doubt decisions by direction: ``forward`` (step kept) and ``back`` (step dropped)."""
    counts = {"forward": 0, "back": 0}
    for event in events:
        if event.kind == "planned" and event.data["decision"] in counts:
            counts[str(event.data["decision"])] += 1
    return counts
