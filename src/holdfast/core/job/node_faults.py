"""The faults of nodes as events of the job: they are counted and recorded, and left-out nodes are announced.

Theory. ``core/job/failed_nodes.py`` has the rule by which a node with too many faults is *failing*: it is then left
out (has no ranks), or kept. A fault is recorded when it is counted, so that the next controller also counts it. The
answer about a failing node is announced at a heartbeat and not at once: right after the start of a controller a node
with free slots may not have connected yet. The placement of ranks does not wait for the announcement.

Invariants:
1. One record is written for each fault that counts, and one for each change of the answer about a node.
2. Faults are counted only where more than one node is connected, and never where another launcher places the ranks.
"""

from __future__ import annotations

from holdfast.core.decide.recovery_phases import NO_PAGE
from holdfast.core.ids import NodeId
from holdfast.core.job.failed_nodes import LOST, NodeAnswer, NodeFault, cause_of
from holdfast.core.job.fault import Fault
from holdfast.core.job.job_state import Job
from holdfast.core.job.membership import Member, node_order

BY_HAND = "a user takes it back"


def count_fault(now: float, job: Job, member: Member, fault: Fault) -> None:
    """Count a fault of a member against the member's node, if the host may be the cause of the fault."""
    exited, failure = member.exited, fault.failure
    signal = exited.signal if exited is not None else None
    without_page = exited is not None and exited.detail == NO_PAGE
    generation = job.generation if member.joining else job.roster.generation
    if cause := cause_of(fault, signal, without_page=without_page):
        _count(
            now,
            job,
            NodeFault(
                node_id=member.node_id,
                at_s=now,
                cause=cause,
                occurrence=generation.pack(),
                digest=failure.digest if failure is not None else "",
                step=failure.step if failure is not None else 0,
            ),
        )


def count_loss(now: float, job: Job, node_id: NodeId) -> None:
    """Count the loss of a node as a fault of this node, unless the node was asked to leave."""
    occurrence = job.failed.nodes.next_loss()
    _count(now, job, NodeFault(node_id=node_id, at_s=now, cause=LOST, occurrence=occurrence))


def _count(now: float, job: Job, fault: NodeFault) -> None:
    nodes = job.failed.nodes
    if len(job.slots) < 2 or job.config.library or not nodes.note(now, fault):
        return
    job.record(
        "node_failed",
        node=str(fault.node_id),
        cause=fault.cause,
        step=fault.step,
        digest=fault.digest,
        occurrence=fault.occurrence,
        at_s=fault.at_s,
        faults=len(nodes.faults_of(now, fault.node_id)),
    )


def announce(now: float, job: Job) -> None:
    """Record each failing node that is now left out or kept, and each node that is used again.

    A node is used again when its last fault is older than the window.
    """
    nodes = job.failed.nodes
    nodes.look(now)
    for node_id in sorted(nodes.announced.keys() - set(nodes.failing), key=node_order):
        _use_again(job, node_id, f"its last fault is more than {nodes.window_s:g} s ago")
    used = job.without_left_out(job.slots)
    for node_id in nodes.failing:
        answer: NodeAnswer = "kept" if node_id in used else "left_out"
        if node_id in job.slots and nodes.announced.get(node_id) != answer:
            nodes.announced[node_id] = answer
            causes = [fault.cause for fault in nodes.faults_of(now, node_id)]
            if answer == "kept":
                job.record("node_kept", node=str(node_id), causes=causes, window_s=nodes.window_s)
            else:
                job.record("node_left_out", node=str(node_id), causes=causes, window_s=nodes.window_s)


def take_back(job: Job, node_id: NodeId) -> None:
    """Forget the faults of a failing node, because a user wants the node to be used again."""
    if node_id in job.failed.nodes.failing:
        _use_again(job, node_id, BY_HAND)


def _use_again(job: Job, node_id: NodeId, reason: str) -> None:
    job.failed.nodes.forget(node_id)
    job.record("node_used_again", node=str(node_id), reason=reason)
