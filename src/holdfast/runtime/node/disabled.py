"""The variable ``HOLDFAST_DISABLE=1``: scripts run as if Holdfast were not installed, and sessions are refused."""

from __future__ import annotations

import os

from holdfast.errors import UnsupportedError, UsageError

DISABLE_VARIABLE = "HOLDFAST_DISABLE"
_YES, _NO = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def is_disabled() -> bool:
    """Return True if ``HOLDFAST_DISABLE`` is 1, true, yes or on; False if it is unset, empty, 0, false, no or off.

    Raises:
        UsageError: the variable has another value.
    """
    said = os.environ.get(DISABLE_VARIABLE, "").strip().lower()
    if said not in _YES + _NO:
        raise UsageError(f"{DISABLE_VARIABLE}={said} is neither 1 nor 0", hint=f"unset {DISABLE_VARIABLE}")
    return said in _YES


def refuse_session() -> None:
    """Raise an error if Holdfast is disabled, because a session without Holdfast would neither save nor resume.

    Raises:
        UnsupportedError: Holdfast is disabled.
    """
    if is_disabled():
        raise UnsupportedError(
            f"{DISABLE_VARIABLE} is set, and this script opens a session: without Holdfast its steps would be neither "
            "saved nor resumed",
            hint=f"unset {DISABLE_VARIABLE}, or run a script without a session",
        )
