"""Injection of faults into a simulated run: at a given time, or when a rank enters a given state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from holdfast.core.ids import Generation, NodeId
from holdfast.core.protocol.health_messages import Active
from holdfast.core.protocol.messages import Message, RankState
from holdfast.core.watch.activity import SAY_S
from holdfast.sim.collectives import COLLECTIVE_TIMEOUT_S, Collectives
from holdfast.sim.faults import SimFault
from holdfast.sim.spares import SimSpares
from holdfast.sim.worker import SimWorker

STOPPED_S = 1.5  # time until the agent reports a stopped process
NO_PHASE = "electing"
"""Name of the phase of a job that has no controller now."""


class FaultTarget(Protocol):
    """The parts of a simulated job that a fault can change."""

    collectives: Collectives
    spares: SimSpares
    save_errors: int
    flips: int

    def phase(self) -> str: ...
    @property
    def seated(self) -> Mapping[int, SimWorker]: ...
    def later(self, delay_s: float, label: str, action: Callable[[], None]) -> None: ...
    def jitter(self, low_s: float, high_s: float) -> float: ...
    def died(self, worker: SimWorker, code: int | None, killed_by: int | None) -> None: ...
    def kill_controller(self) -> None: ...
    def kill_agent(self, node_id: NodeId) -> None: ...
    def ask_exit(self) -> None: ...
    def tell_agent(self, node_id: NodeId, event: Message) -> None: ...


class SimInjector:
    """The injector of one run. ``coverage`` counts the faults that struck, by (kind, phase of the job)."""

    def __init__(self, world: FaultTarget, faults: tuple[SimFault, ...]) -> None:
        self.world = world
        self._faults = faults
        self._armed: list[SimFault] = []
        self.coverage: Counter[tuple[str, str]] = Counter()

    def struck(self, kind: str) -> None:
        """Count in ``coverage`` that a fault of this kind strikes in the present phase of the job."""
        self.coverage[kind, self.world.phase()] += 1

    def start(self) -> None:
        """Schedule each fault of the run at its time."""
        for fault in self._faults:
            self.world.later(fault.at_s, f"fault {fault.kind}", self._arm_of(fault))

    def moved(self, worker: SimWorker, new: RankState) -> None:
        """Schedule the faults that waited until ``worker`` enters the state ``new`` of the step protocol."""
        for fault in list(self._armed):
            if fault.rank == worker.rank and fault.state == new:
                self._armed.remove(fault)
                self.world.later(fault.delay_s, f"now {fault.kind}", partial(self._strike, fault))

    def _time_out(self, stopped: SimWorker, generation: Generation) -> None:
        """Break the votes that wait for a stopped process, because the time limit of a collective has passed.

        When this time limit passes a second time, the process is killed, as the hang detector would kill it.
        """
        self.world.later(COLLECTIVE_TIMEOUT_S, "hang", partial(self.world.died, stopped, None, 9))
        for _, worker in sorted(self.world.seated.items()):
            if stopped.alive and worker.machine.generation == generation and worker.machine.state == "voting":
                self.world.later(self.world.jitter(0.0, 0.01), f"timeout:{worker.rank}", worker.vote_broken)

    def _say_stopped(self, worker: SimWorker) -> None:
        """Report all stopped processes on the node of ``worker`` to the agent there, as long as ``worker`` is alive."""
        if worker.alive:
            here = [w for _, w in sorted(self.world.seated.items()) if w.node_id == worker.node_id]
            stopped = tuple(w.member_id for w in here if w.alive and w.stopped)
            self.world.tell_agent(worker.node_id, Active(worker.node_id, stopped=stopped))
            self.world.later(SAY_S, "stopped", partial(self._say_stopped, worker))

    def _arm_of(self, fault: SimFault) -> Callable[[], None]:
        def arm() -> None:
            if fault.state:
                self._armed.append(fault)
            else:
                self._strike(fault)

        return arm

    def _strike(self, fault: SimFault) -> None:
        worker = self.world.seated.get(fault.rank)
        self.struck(fault.kind)
        match fault.kind:
            case "controller":
                self.world.kill_controller()
            case "ask_exit":
                self.world.ask_exit()
            case _ if worker is None or not worker.alive:
                return
            case "agent":
                self.world.kill_agent(worker.node_id)
            case "kill":
                self.world.died(worker, None, 9)
            case "spare":
                self.world.spares.kill_one(worker.node_id)
            case "exit":
                self.world.died(worker, 1, None)
            case "raise":
                worker.fail("bad batch")
            case "stop":
                worker.stopped = True
                self.world.later(STOPPED_S, "stopped", partial(self._say_stopped, worker))
                generation = worker.machine.generation
                self.world.later(COLLECTIVE_TIMEOUT_S, "timeout", partial(self._time_out, worker, generation))
            case "flip":
                worker.flip()
                self.world.flips += 1
            case "save_error":
                worker.save_error = True
                self.world.save_errors += 1
            case "groups":
                self.world.collectives.own_groups.add(worker.member_id)
            case "glitch":
                self.world.collectives.break_off(worker.machine.generation)
                worker.glitch()
