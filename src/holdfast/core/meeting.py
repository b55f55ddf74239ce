"""The jobs that one agent knows of while the agents meet, and the time to found a new job.

Theory. The agents of a run connect to each other at its start (they *meet*). One of them then *founds* the job: all
agents that are connected at that time become the first voters. An agent *belongs* to a job if it knows the electorate
of the job. An agent is *near* a job while it is connected to an agent that belongs to the job. The leader of that job
will let the near agent join. An agent founds no job in two cases: while it is near a job itself, and while a connected
agent is near a job. For this rule each agent sends two names to all connected agents: of the job that it belongs to,
and of the job that it is near. An agent that is not near a job does not send the name of a job that only other agents
are near. So the name of a job is forgotten everywhere once no agent belongs to the job. The hosts of a job that has
ended can then found the next job.

Invariants:
1. The name of a job comes from an agent that belongs to the job and is connected.
2. A job is founded only when enough agents are connected and none of them belongs to a job or is near one.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.core.ids import NodeId


class Told(NamedTuple):
    """A message of a connected agent: the job that the agent belongs to, and the job that it is near.

    An agent is near a job while it is connected to an agent of the job. An empty name means no job.
    """

    job: str
    near: str


class Meeting:
    """The jobs that one agent knows from the messages of connected agents, before it belongs to a job itself.

    Args:
        job: name of the job that this agent belongs to; empty if it belongs to none.
        nodes_min: number of connected agents that is enough to begin a job.
        nodes_max: number of agents in the whole job, spare nodes included.
        gather_s: seconds to wait before a job is founded: for spare nodes, or because a job was near.
    """

    def __init__(self, job: str, nodes_min: int, nodes_max: int, gather_s: float) -> None:
        self.job = job
        self._nodes = (nodes_min, nodes_max)
        self._gather_s = gather_s
        self._told: dict[NodeId, Told] = {}
        self._enough_s: float | None = None  # time since which enough agents are connected and no job is near
        self._was_near = False

    @property
    def near(self) -> str:
        """Name of the job that a connected agent belongs to; empty if no connected agent belongs to a job."""
        return next((told.job for _, told in sorted(self._told.items()) if told.job), "")

    @property
    def elsewhere(self) -> str:
        """Name of a job that a connected agent belongs to or is near; empty if there is no such job."""
        return self.near or next((told.near for _, told in sorted(self._told.items()) if told.near), "")

    def join(self, job: str) -> None:
        """Record that this agent belongs to ``job``."""
        self.job = job

    def told(self, node_id: NodeId, job: str, near: str) -> bool:
        """Record the jobs that a connected agent has sent. Return True if :attr:`near` has changed and must be sent."""
        before = self.near
        self._told[node_id] = Told(job, near)
        self._was_near = self._was_near or bool(self.elsewhere)
        return self.near != before

    def gone(self, node_id: NodeId) -> bool:
        """Record the loss of the connection to an agent. Return True if :attr:`near` has changed and must be sent."""
        before = self.near
        self._told.pop(node_id, None)
        return self.near != before

    def may_found(self, now: float, here: int) -> bool:
        """Return True if it is time to found a job. The caller repeats this call regularly.

        Args:
            now: seconds on any clock.
            here: number of connected agents, this agent included.
        """
        nodes_min, nodes_max = self._nodes
        if self.job or self.elsewhere or here < nodes_min:
            self._enough_s = None
            return False
        if self._enough_s is None:
            self._enough_s = now
        complete = here >= nodes_max and not self._was_near
        return complete or now - self._enough_s > self._gather_s
