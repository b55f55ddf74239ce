"""The outcome of a simulated run."""

from __future__ import annotations

import msgspec

from holdfast.core.protocol.messages import LogRecord


class SimResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one simulated run.

    Attributes:
        step: the step at which the run ended; -1 if the event log does not name it.
        digest: digest of all events, equal for equal runs.
        time_s: virtual seconds of the run.
        forward: number of decisions after which ranks in doubt apply the update.
        back: number of decisions after which ranks in doubt discard the update.
        recovered: number of recoveries.
        spares_called: number of spares that became workers.
        coverage: number of faults by (kind, phase of the job).
    """

    code: int
    reason: str
    step: int
    digest: str
    events: int
    time_s: float
    forward: int
    back: int
    recovered: int
    spares_called: int
    records: tuple[LogRecord, ...]
    coverage: dict[tuple[str, str], int]
