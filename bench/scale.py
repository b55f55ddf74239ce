"""Cost of the controller at scale: simulated ranks and the real controller machine, CPU time of its calls only.

``python bench/scale.py [--ranks 1024 4096 16384]`` prints a table. The network, the agents and the workers are
simulated and not counted. Encoding, sockets and the log are not part of the figure. Python's collector of cycles is
off, because it would traverse the simulated world. While the job trains, the same machine also gets the messages of
agents whose ranks are healthy: this is its steady state.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from types import FunctionType, MethodType, ModuleType

from holdfast.core.controller import Controller
from holdfast.core.job.membership import node_order
from holdfast.core.protocol.health_messages import StepTime, StepTimes
from holdfast.core.protocol.messages import AgentBeat, Command, LogRecord, Message, Tick
from holdfast.runtime.agent.progress_watcher import PACE_S
from holdfast.sim.faults import SimFault
from holdfast.sim.world import World

STEADY_S = 20
STEADY_AT_S = 0.75  # simulated time at which all ranks train
FAULT_AT_S = 0.8


class Timed(Controller):
    """A controller that counts the CPU time of its calls."""

    spent_s = 0.0
    fault_s = 0.0
    phase = "before"
    last: Timed | None = None
    steady = 0.0  # share of one core
    look_s = 0.0  # CPU time of this measurement

    def handle(self, now: float, event: Message) -> list[Command]:
        """Handle one event, and add the CPU time to the sum."""
        Timed.last = self
        began_s = time.thread_time()
        commands = super().handle(now, event)
        took_s = time.thread_time() - began_s
        Timed.spent_s += took_s
        kinds = {c.kind for c in commands if isinstance(c, LogRecord)}
        if Timed.phase == "before" and "detected" in kinds:
            Timed.phase = "planning"
        if Timed.phase == "planning":
            Timed.fault_s += took_s
            if "planned" in kinds:
                Timed.phase = "after"
        return commands

    @classmethod
    def look(cls, now: float) -> None:
        """Measure the cost of the steady state, while the job trains."""
        began_s = time.process_time()
        assert cls.last is not None
        cls.steady = steady_share(cls.last, now)
        cls.look_s = time.process_time() - began_s


class TimedWorld(World):
    """The simulated job around the timed controller."""

    controller_type = Timed


def size_bytes(root: object) -> int:
    """Return the memory of an object and of all data structures that it refers to."""
    seen: set[int] = set()
    stack, total = [root], 0
    while stack:
        one = stack.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | FunctionType | MethodType):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        stack += gc.get_referents(one)
    return total


def paces(machine: Controller) -> list[StepTimes]:
    """Return the messages of the agents on the step times of their ranks. One rank in 100 is slow."""
    roster = machine.job.roster
    return [
        StepTimes(
            node_id=node_id,
            generation=roster.generation,
            ranks=tuple(
                StepTime(m.rank, 100, 0.3 if m.rank % 100 == 99 else 0.1 + m.rank % 97 * 1e-5)
                for m in roster.on_node(node_id)
            ),
        )
        for node_id in sorted(roster.nodes, key=node_order)
    ]


def steady_share(machine: Controller, now: float) -> float:
    """Return the share of one core that heartbeats (two per second and node), step times and timers take."""
    told = paces(machine)
    spent_s = 0.0
    for half in range(2 * STEADY_S):
        events: list[Message] = [AgentBeat(node_id=paced.node_id) for paced in told]
        events += told if half / 2 % PACE_S == 0 else []
        began_s = time.thread_time()
        for event in (*events, Tick(name="beat")):
            Controller.handle(machine, now + half / 2, event)
        spent_s += time.thread_time() - began_s
    return spent_s / STEADY_S


def row(ranks: int) -> str:
    """Simulate one job with one kill and return its line of the table."""
    Timed.spent_s = Timed.fault_s = 0.0
    Timed.phase, Timed.steady = "before", 0.0
    fault = SimFault(kind="kill", at_s=FAULT_AT_S, rank=ranks // 2)
    world = TimedWorld(ranks, 1, (fault,), 6, 2)
    world.later(STEADY_AT_S, "steady", lambda: Timed.look(world.now))
    gc.collect()
    gc.disable()
    began_s = time.process_time()
    world.run()
    gc.enable()
    took_s = time.process_time() - began_s - Timed.look_s
    machine = Timed.last
    assert machine is not None and Timed.phase == "after"
    nodes = {m.node_id for m in machine.job.roster.members}
    state_bytes = size_bytes(machine)
    return (
        f"| {ranks} | {len(nodes)} | {world.events} | {Timed.fault_s:.3f} | {Timed.spent_s:.2f} | "
        f"{100 * Timed.steady:.2f} | "
        f"{state_bytes / ranks / 1024:.2f} | {took_s:.0f} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="*", default=[1024, 4096, 16384])
    print("| simulated ranks | nodes | events | fault to plan, CPU s | whole run, CPU s | steady state, % of a core | "
          "state, KiB per rank | simulation, CPU s |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for ranks in parser.parse_args().ranks:
        print(row(ranks), flush=True)


if __name__ == "__main__":
    main()
