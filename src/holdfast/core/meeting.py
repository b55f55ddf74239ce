"""The jobs that one agent knows of while the agents meet, and the time to found a new one.

Theory. An agent *belongs* to a job when it knows the electorate of the job. An agent is *near* a job while it is
connected to one that belongs to it: the leader of that job will let it join. An agent founds no job while it, or an
agent that it is connected to, is near one. Each agent sends what it belongs to and what it is near. A job that only
other agents are near is not passed on. So the name of a job is forgotten everywhere once no agent belongs to it any
more, and the hosts of a job that has ended can found the next one.

Invariants:
1. The name of a job comes from an agent that belongs to it and is connected.
2. A job is founded only when enough agents are connected and none of them belongs to a job or is near one.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.core.ids import NodeId


class Told(NamedTuple):
    """The job that a connected agent belongs to, and the job that it is near; empty: none."""

    job: str
    near: str


class Meeting:
    """What one agent knows of jobs.

    Args:
        job: name of the job that this agent belongs to; empty: none.
        nodes_min: number of agents that found a job.
        nodes_max: number of agents in the whole job, with spares.
        gather_s: time to wait for spares, or after a job was near, before a job is founded.
    """

    def __init__(self, job: str, nodes_min: int, nodes_max: int, gather_s: float) -> None:
        self.job = job
        self._nodes = (nodes_min, nodes_max)
        self._gather_s = gather_s
        self._told: dict[NodeId, Told] = {}
        self._enough_s: float | None = None  # since when enough agents are connected and no job is near
        self._was_near = False

    @property
    def near(self) -> str:
        """Name of a job that a connected agent belongs to; empty: there is none."""
        return next((told.job for _, told in sorted(self._told.items()) if told.job), "")

    @property
    def elsewhere(self) -> str:
        """Name of a job that a connected agent belongs to or is near; empty: there is none."""
        return self.near or next((told.near for _, told in sorted(self._told.items()) if told.near), "")

    def join(self, job: str) -> None:
        """Record that this agent belongs to a job."""
        self.job = job

    def told(self, node_id: NodeId, job: str, near: str) -> bool:
        """Record what a connected agent has sent. Return True if this agent has something new to tell."""
        before = self.near
        self._told[node_id] = Told(job, near)
        self._was_near = self._was_near or bool(self.elsewhere)
        return self.near != before

    def gone(self, node_id: NodeId) -> bool:
        """Record the loss of the connection to an agent. Return True if this agent has something new to tell."""
        before = self.near
        self._told.pop(node_id, None)
        return self.near != before

    def may_found(self, now: float, here: int) -> bool:
        """Return True if it is time to found a job. Call this again and again.

        Args:
            now: seconds on any clock.
            here: number of connected agents, with this one.
        """
        nodes_min, nodes_max = self._nodes
        if self.job or self.elsewhere or here < nodes_min:
            self._enough_s = None
            return False
        if self._enough_s is None:
            self._enough_s = now
        complete = here >= nodes_max and not self._was_near
        return complete or now - self._enough_s > self._gather_s
