"""The hosts of a run on several hosts, from its event log: which are connected, will leave, or are left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from holdfast.core.ids import NodeId
from holdfast.core.job.membership import node_order
from holdfast.event_log import Event
from holdfast.text import plural, span


class HostView(msgspec.Struct):
    """One of several hosts of a run.

    ``gone``: how the host left; empty while the host is connected to this one. ``leaves``: sources of the notices that
    the host will leave. ``leaves_at``: the earliest deadline of these notices (Unix time); None without a deadline.
    ``left_out``: the reason why the host gets no ranks although it is connected; empty if it may get ranks.
    """

    name: str
    ranks: list[int]
    gone: str
    leaves: list[str]
    leaves_at: float | None
    left_out: str


class HostHistory:
    """The history of all hosts, from the events of a log.

    New lines for the console are added to the list ``warnings``.
    """

    def __init__(self, warnings: list[str]) -> None:
        self._warnings = warnings
        self._gone: dict[str, str] = {}  # by node: how it left; empty: it is connected
        self._notices: dict[str, dict[str, float | None]] = {}  # deadline by node and source
        self._left_out: dict[str, str] = {}  # by node: the reason

    def take(self, event: Event) -> None:
        """Apply one event of the log, of any kind."""
        data = event.data
        node = str(data.get("node", ""))
        match event.kind:
            case "agent_joined":
                self._gone[node] = ""
            case "node_lost":
                self._gone[node] = "lost"
            case "node_left":
                self._gone[node] = "has left"
                self._notices.pop(node, None)
            case "node_leaves":
                left_s = data.get("left_s")
                due_at = None if left_s is None else event.t_wall + float(left_s)
                self._notices.setdefault(node, {})[str(data["source"])] = due_at
            case "node_stays":
                self._notices.get(node, {}).pop(str(data["source"]), None)
            case "node_left_out":
                faults = self._left_out[node] = faults_text(data)
                self._warnings.append(
                    f"{node} is left out after {faults}: its ranks run on other hosts; "
                    f"holdfast drain --cancel {node} takes it back"
                )
            case "node_kept":
                self._left_out.pop(node, None)
                self._warnings.append(
                    f"{node} has had {faults_text(data)}: no other host has room for its ranks, so it is kept"
                )
            case "node_used_again":
                self._left_out.pop(node, None)
                self._warnings.append(f"{node} may have ranks again: {data['reason']}")

    def views(self, ranks_on: Callable[[str], list[int]]) -> list[HostView]:
        """Return all hosts in the order of their node numbers. ``ranks_on`` returns the ranks on a host."""
        names = sorted(self._gone, key=lambda name: node_order(NodeId(name)))
        return [self._view(name, [] if self._gone[name] else ranks_on(name)) for name in names]

    def _view(self, name: str, ranks: list[int]) -> HostView:
        notices = self._notices.get(name, {})
        return HostView(
            name=name,
            ranks=ranks,
            gone=self._gone[name],
            leaves=sorted(notices),
            leaves_at=min((at for at in notices.values() if at is not None), default=None),
            left_out=self._left_out.get(name, ""),
        )


def faults_text(data: dict[str, Any]) -> str:
    """Return the faults of a node in words, such as ``3 faults within 1 h (2 signal, 1 lost)``."""
    causes = Counter(str(cause) for cause in data["causes"])
    named = ", ".join(f"{count} {cause}" for cause, count in sorted(causes.items()))
    return f"{plural(causes.total(), 'fault')} within {span(float(data['window_s']))} ({named})"
