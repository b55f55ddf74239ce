"""A simulated agent process: the real state machine of an agent, and the timers that it has set."""

from __future__ import annotations

from holdfast.core.agent import Agent
from holdfast.core.config import AgentConfig
from holdfast.core.ids import MemberId, NodeId


class SimAgent:
    """A simulated agent process. ``alive`` becomes False when the process dies."""

    def __init__(self, node_id: NodeId, slots: int, spares: int, world_size: int, pid: int = 1) -> None:
        self.node_id = node_id
        config = AgentConfig(
            node_id=node_id,
            slots=slots,
            grace_s=30.0,
            spares=spares,
            world_size=world_size,
            pid=pid,
            spare_delay_s=0.1,
        )
        self.machine = Agent(config)
        self.alive = True
        self.timers: dict[str, int] = {}
        self.reported: set[MemberId] = set()  # the members whose exit it has reported
