"""Simulated jobs with large states: the work of a recovery takes long, and agents report that bytes move."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from holdfast.core.protocol.health_messages import Active
from holdfast.core.protocol.messages import KillMember, Send
from holdfast.core.watch.activity import SAY_S
from holdfast.sim.invariants import Violation
from holdfast.sim.sim_agent import SimAgent
from holdfast.sim.worker import SimWorker
from holdfast.sim.world import World


class LargeWorker(SimWorker):
    """A worker whose actions take ``seconds`` longer, by label. If ``silent``, no progress is reported for them."""

    seconds: Mapping[str, float] = {}
    silent = False
    busy_until_s = 0.0

    @property
    def _scene(self) -> World:
        assert isinstance(self.world, World)
        return self.world

    def later(self, delay_s: float, label: str, action: Callable[[], None]) -> None:
        more_s = self.seconds.get(label, 0.0)
        super().later(delay_s + more_s, label, action)
        if more_s and not self.silent:
            self.busy_until_s = max(self.busy_until_s, self._scene.now + delay_s + more_s)
            self._say()

    def _say(self) -> None:
        if self.alive and not self.stopped and self._scene.now < self.busy_until_s:
            self._scene.tell_agent(self.node_id, Active(self.node_id, moving=(self.member_id,)))
            self.world.later_on(self.node_id, SAY_S, f"moves:{self.rank}", self._say)


class LargeWorld(World):
    """A simulated run that checks that no worker with progress is killed for a time-out."""

    worker_type = LargeWorker

    def _send_for_agent(self, agent: SimAgent, command: Send) -> None:
        order = command.message
        if isinstance(order, KillMember) and order.silent:
            worker = self.workers[order.member_id]
            assert isinstance(worker, LargeWorker)
            if self.now < worker.busy_until_s and not worker.stopped:
                raise Violation("progress_is_waited_for", f"rank {worker.rank}: {order.reason}")
        super()._send_for_agent(agent, command)


def world_of(seconds: Mapping[str, float], *, silent: bool = False) -> type[World]:
    """Return a simulated run whose workers take ``seconds`` longer, by the label of the action."""
    worker = type("Worker", (LargeWorker,), {"seconds": dict(seconds), "silent": silent})
    return type("Large", (LargeWorld,), {"worker_type": worker})
