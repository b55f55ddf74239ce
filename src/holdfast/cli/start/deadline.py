"""A point in time on a command line: a duration from now, a time of day, or a date with a time."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from holdfast.errors import UsageError

UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_SPAN = re.compile(rf"\+?(?:{_PART.pattern})+")
HINT = "a span (90s, 10m, 1h30m), a time of day (14:30) or a date with a time (2026-11-24T14:30, with Z or +01:00)"


def seconds_until(text: str, now: datetime) -> float:
    """Return the seconds from ``now`` to the point in time that ``text`` names; 0 if it has passed.

    ``now`` has a time zone. A time of day means its next occurrence, in that zone. A date with a time but without a
    zone is also in that zone.

    Raises:
        UsageError: ``text`` has no known form.

    Example:
        ``seconds_until("1h30m", now)`` is 5400.0.
    """
    text = text.strip()
    if _SPAN.fullmatch(text):
        return sum(float(count) * UNITS_S[unit] for count, unit in _PART.findall(text))
    try:
        if "-" not in text:
            clock = datetime.strptime(text, "%H:%M:%S" if text.count(":") == 2 else "%H:%M")
            then = now.replace(hour=clock.hour, minute=clock.minute, second=clock.second, microsecond=0)
            then += timedelta(days=then < now)
        else:
            then = datetime.fromisoformat(text)
            then = then if then.tzinfo else then.replace(tzinfo=now.tzinfo)
    except ValueError:
        raise UsageError(f"{text!r} is no point in time", hint=HINT) from None
    return max(0.0, (then - now).total_seconds())
