"""The outcome of a simulated run."""

from __future__ import annotations

import msgspec

from holdfast.core.protocol.messages import LogRecord


class SimResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one run.

    ``forward`` and ``back`` count decisions that moved ranks in doubt to the step after, or back to the step before,
    the update. ``coverage`` counts the faults by kind and phase of the job.
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
