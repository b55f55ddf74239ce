"""The phases of a recovery and the events that lead from one to the next."""

from __future__ import annotations

from typing import Literal

Phase = Literal[
    "idle",
    "grace",
    "fencing",
    "retrying",
    "replacing",
    "saving",
    "leaving",
    "waiting",
    "starting",
    "resuming",
]

PHASES: dict[tuple[Phase, str], Phase] = {
    ("idle", "launch"): "starting",
    ("idle", "suspect"): "grace",
    ("starting", "suspect"): "grace",
    ("resuming", "suspect"): "grace",
    ("idle", "fault"): "fencing",
    ("grace", "fault"): "fencing",
    ("starting", "fault"): "fencing",
    ("resuming", "fault"): "fencing",
    ("retrying", "fault"): "fencing",
    ("replacing", "fault"): "fencing",
    ("saving", "fault"): "fencing",
    ("fencing", "retry"): "retrying",
    ("fencing", "replace"): "replacing",
    ("fencing", "save"): "saving",
    ("fencing", "leave"): "leaving",
    ("saving", "sealed"): "leaving",
    ("retrying", "agreed"): "resuming",
    ("replacing", "agreed"): "resuming",
    ("leaving", "gone"): "starting",
    ("starting", "no nodes"): "waiting",
    ("waiting", "launch"): "starting",
    ("starting", "opened"): "resuming",
    ("resuming", "reached"): "idle",
}
"""(phase, event) -> next phase. A pair that is missing cannot happen."""


NO_PAGE = "no page"
"""Value of ``MemberExited.detail`` when the place of the process in its script is not known."""
