"""Nodes whose launcher was asked to leave, or is lost, while other nodes of the job stay.

Theory. A scheduler that ends a job of several nodes signals all launchers at nearly the same time; one that takes a
single node away (a drain, a spot instance) signals one. Only what the others do tells the two apart. So a first request
of a node waits ``depart_s`` for those of the others. As soon as the nodes that have not asked cannot hold the job, or
are no majority, or have no copy of a part of the state, the whole job leaves gracefully: it saves first. Where the
others can still hold it at the end of that time, the node is given up as one that is lost, without the wait for its
silence: its ranks move to a spare node, or the job shrinks.

Invariants:
1. A request of a node ends in its departure, or in the graceful exit of the whole job, unless it is taken back.
2. A node departs only while the others hold the job and its state, and are a majority.
"""

from __future__ import annotations

from holdfast.core.ids import NodeId
from holdfast.core.job.job_state import Job
from holdfast.core.job.node_tracker import NodeTracker
from holdfast.core.job.shutdown import Shutdown
from holdfast.core.protocol.messages import EndRun, ExitRun
from holdfast.exit_codes import Exit

TIMER = "depart"
AGAIN_S = 0.5


class Departures:
    """Sub-machine of the controller. ``job`` is shared with it."""

    def __init__(self, job: Job, fleet: NodeTracker, ending: Shutdown) -> None:
        self.job = job
        self.fleet = fleet
        self.ending = ending
        self._asked: dict[NodeId, ExitRun] = {}
        self._departed: NodeId | None = None  # the electorate may not have followed yet

    def asked(self, request: ExitRun) -> None:
        """The whole job, or one node of it, is to leave."""
        job, node_id = self.job, NodeId(request.node_id)
        if not node_id or job.exit_source or self.ending.stopping is not None or not job.roster.members:
            self._leave_all(request)
            return
        if node_id in self._asked:
            return
        if not self._asked:
            job.timer(TIMER, min(job.config.depart_s, request.grace_s / 4))
        self._asked[node_id] = request
        job.leaving.add(node_id)
        job.record("node_leaves", node=str(node_id), source=request.source)
        if not self.fleet.adopting and not self._others_suffice():
            self._leave_all(request)

    def cancel(self) -> None:
        """All stay."""
        self._asked.clear()
        self.job.leaving.clear()
        self.job.cancel(TIMER)

    def tick(self, now: float, name: str) -> bool:
        """Its timer; False when ``name`` is another one."""
        if name != TIMER:
            return False
        if not self._asked or self.job.exit_source or self.ending.stopping is not None:
            self.cancel()
        elif self.fleet.adopting or self._departed in self.fleet.voters:
            self.job.timer(TIMER, AGAIN_S)  # one after the other: each loses its vote before the next
        elif self._others_suffice():
            self._depart(now, min(self._asked))
        else:
            self._leave_all(self._asked[min(self._asked)])
        return True

    def _others_suffice(self) -> bool:
        job, voters = self.job, self.fleet.voters
        staying = sum(job.liveness.is_up(voter) and voter not in job.leaving for voter in voters)
        return job.fits and (not voters or staying * 2 > len(voters)) and self._state_stays()

    def _state_stays(self) -> bool:
        """The ranks that stay hold the whole state, or other nodes have the states of those that leave in memory."""
        job = self.job
        leaving = {m.rank for m in job.roster.members if m.node_id in job.leaving}
        if not job.session or not leaving:
            return True
        elsewhere = {rank for node, ranks in job.held.items() if node not in job.leaving for rank in ranks}
        staying = tuple(m.rank for m in job.roster.members if m.alive and m.rank not in leaving)
        return leaving <= elsewhere or not job.uncovered(job.roster.all_layouts(), staying)

    def _depart(self, now: float, node_id: NodeId) -> None:
        job, request = self.job, self._asked.pop(node_id)
        reason = f"it was asked to leave ({request.source}), the job goes on without it"
        job.record("node_left", node=str(node_id), reason=reason)
        job.liveness.leave(node_id)
        self.fleet.node_lost(now, node_id, reason)
        job.leaving.discard(node_id)
        self._departed = node_id
        job.send_node(node_id, EndRun(code=int(Exit.REQUEUE), reason=reason, node_only=True))
        if self._asked:
            job.timer(TIMER, AGAIN_S)

    def _leave_all(self, request: ExitRun) -> None:
        self.cancel()
        self.ending.request(request.source, request.grace_s)
