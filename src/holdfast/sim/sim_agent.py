"""A simulated agent process: the real state machine of an agent and its timers."""

from __future__ import annotations

from holdfast.core.agent import Agent
from holdfast.core.config import AgentConfig
from holdfast.core.ids import NodeId


class SimAgent:
    """The state machine of an agent with its timers. ``alive`` is False after the death of the process."""

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
