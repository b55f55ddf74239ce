"""Failed nodes: the faults that count against a node, and the nodes that are left out because of them.

Theory. A host can be broken in ways that no single device shows: bad memory, a power supply, a driver, a cable. Its
processes die again and again, and each time a replacement starts on the same host, because the host has free slots. So
faults of the host are counted by node. A node with too many of them within a window is *failing*. A failing node that
the job does not need is *left out*: no rank is placed on it, and its ranks move to other nodes. Its agent stays in the
job and keeps its vote.

Invariants:
1. A fault of the script counts against no node: an exception, an exit code, a hang in the script's own code, or the
   same death at the same step on another node.
2. All deaths on one node in one generation are one fault: they have one cause.
3. A failing node is left out only if the job then still has as many ranks as it would have with this node.
4. A node stays failing for a whole window after the fault that made it failing, or until a user takes it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from holdfast.core.ids import NodeId
from holdfast.core.job.failed_devices import FailedDevices
from holdfast.core.job.fault import Fault

# SIGHUP, SIGINT, SIGABRT, SIGTERM: the process was asked to end, or has ended itself.
NOT_OF_MACHINE = frozenset({1, 2, 6, 15})
LOST = "lost"

NodeAnswer = Literal["left_out", "kept"]
"""The answer to a failing node: it is left out, or kept because no other node has room for its ranks."""


class NodeFault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault of a node. ``at_s`` is in seconds on the controller's clock.

    Attributes:
        cause: kind of the fault of a rank, or ``LOST`` if the node itself was lost.
        occurrence: the packed generation of the fault; for a lost node a negative number that no other fault has.
        digest, step: the identity of a death. If deaths on two nodes have the same identity, the script is their cause.
            Empty digest: the death has no identity.
    """

    node_id: NodeId
    at_s: float
    cause: str
    occurrence: int
    digest: str = ""
    step: int = 0


def cause_of(fault: Fault, signal: int | None, *, without_page: bool) -> str:
    """Return the cause under which a fault of a rank counts against its node; empty if the fault does not count.

    Args:
        fault: the fault.
        signal: number of the signal that ended the process; None if no signal did.
        without_page: the status page of the process is gone, because its whole node was lost. The loss of a node counts
            separately.
    """
    if fault.follows or without_page or not fault.sure:
        return ""
    if fault.kind == "signal":
        return "" if signal in NOT_OF_MACHINE else "signal"
    if fault.kind == "hang":
        return "" if fault.failure is not None else "hang"
    return fault.kind if fault.kind in ("device", "silent", "corruption") else ""


def failing_until(times_s: Sequence[float], faults_max: int, window_s: float) -> float:
    """Return the time until which a node with faults at ``times_s`` is failing; 0 if it never was failing.

    All times are in seconds; ``times_s`` is in ascending order.

    Example:
        >>> failing_until([10.0, 20.0, 30.0], faults_max=3, window_s=60.0)
        90.0
    """
    if faults_max == 0:
        return 0.0
    pairs = zip(times_s, times_s[faults_max - 1 :], strict=False)
    return max((last_s + window_s for first_s, last_s in pairs if last_s - first_s <= window_s), default=0.0)


def leave_out(
    up: Sequence[tuple[NodeId, int]],
    failing: Sequence[NodeId],
    room: Callable[[Sequence[tuple[NodeId, int]]], int],
) -> list[tuple[NodeId, int]]:
    """Return the nodes that may have ranks: ``up`` without the failing nodes that the job does not need.

    Args:
        up: all nodes that are in contact with the controller, with the number of their usable slots.
        failing: failing nodes, the worst one first. Each is removed if the remaining nodes have room for as many ranks
            as all nodes of ``up``.
        room: returns the number of ranks that a job on the given nodes has.
    """
    left = list(up)
    if not failing:
        return left
    goal = room(up)
    for node_id in failing:
        rest = [(node, slots) for node, slots in left if node != node_id]
        if sum(slots for _, slots in rest) >= goal and room(rest) == goal:
            left = rest
    return left


class FailedNodes:
    """The counted faults of all nodes of a run, and the announced answer for each failing node: left out or kept.

    The work for one fault does not grow with the faults of other nodes, because a large job may lose many at once.

    Args:
        faults: the faults that earlier controllers have recorded.
        announced: the last announced answer for each failing node.
        faults_max: faults within the window that make a node failing; 0 if no node is ever failing.
        window_s: length of the window in seconds.
    """

    def __init__(
        self,
        faults: Iterable[NodeFault],
        announced: Iterable[tuple[NodeId, NodeAnswer]],
        faults_max: int,
        window_s: float,
    ) -> None:
        self._faults: dict[NodeId, dict[int, NodeFault]] = {}  # by node and occurrence
        self._nodes: dict[tuple[str, int], set[NodeId]] = {}  # the nodes of each death, by digest and step
        self._losses = 0
        self.announced = dict(announced)
        self.faults_max = faults_max
        self.window_s = window_s
        self._counts: dict[NodeId, int] = {}  # number of faults of each failing node
        newest_s = 0.0
        for fault in faults:
            self._add(fault)
            newest_s = max(newest_s, fault.at_s)
        self.look(newest_s)  # a new controller compares with its own clock at its first heartbeat

    @property
    def failing(self) -> tuple[NodeId, ...]:
        """The failing nodes, the node with the most faults first."""
        return tuple(sorted(self._counts, key=lambda node_id: (-self._counts[node_id], node_id)))

    def note(self, now: float, fault: NodeFault) -> bool:
        """Add a fault. Return False if the fault is known already, or ``faults_max`` is 0 (no fault counts)."""
        if fault.occurrence in self._faults.get(fault.node_id, {}) or not self.faults_max:
            return False
        shared = self._add(fault)
        for node_id in shared | {fault.node_id}:
            self._judge(now, node_id)
        return True

    def next_loss(self) -> int:
        """Return the negative number for the ``occurrence`` of the next lost node."""
        return -1 - self._losses

    def faults_of(self, now: float, node_id: NodeId) -> list[NodeFault]:
        """Return the faults of a node within the window, oldest first, without faults that the script caused."""
        return [f for f in self._counted(node_id) if now - f.at_s <= self.window_s]

    def look(self, now: float) -> None:
        """Compute again which nodes are failing at ``now``."""
        for node_id, faults in self._faults.items():
            # A fault keeps a node failing for one window, together with the faults of the window before it.
            for occurrence in [f.occurrence for f in faults.values() if now - f.at_s > 2 * self.window_s]:
                del faults[occurrence]
            self._judge(now, node_id)

    def forget(self, node_id: NodeId) -> None:
        """Forget all faults of a node, so that the count for this node starts at zero."""
        self._faults.pop(node_id, None)
        for nodes in self._nodes.values():
            nodes.discard(node_id)
        self._counts.pop(node_id, None)
        self.announced.pop(node_id, None)

    def _add(self, fault: NodeFault) -> set[NodeId]:
        """Add a fault. Return the nodes on which the same death has occurred."""
        self._faults.setdefault(fault.node_id, {})[fault.occurrence] = fault
        self._losses = max(self._losses, -fault.occurrence)
        if not fault.digest:
            return set()
        nodes = self._nodes.setdefault((fault.digest, fault.step), set())
        nodes.add(fault.node_id)
        return nodes

    def _judge(self, now: float, node_id: NodeId) -> None:
        """Compute again whether one node is failing at ``now``."""
        found = self._counted(node_id)
        if now < failing_until([f.at_s for f in found], self.faults_max, self.window_s):
            self._counts[node_id] = len(found)
        else:
            self._counts.pop(node_id, None)

    def _counted(self, node_id: NodeId) -> list[NodeFault]:
        found = self._faults.get(node_id, {}).values()
        own = [f for f in found if not f.digest or self._nodes[f.digest, f.step] == {node_id}]
        return sorted(own, key=lambda fault: fault.at_s)


class FailedParts(msgspec.Struct, frozen=True):
    """The devices and the nodes that have failed in this run."""

    devices: FailedDevices
    nodes: FailedNodes
