"""What the controller costs at scale: simulated ranks, the real controller machine, CPU time of its own calls only.

``python bench/scale.py [--ranks 1024 4096 16384]`` prints a table. The network, the agents and the workers are
simulated and not counted; encoding, sockets and the log are not part of it either.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from types import FunctionType, ModuleType

from holdfast.core.controller import Controller
from holdfast.core.ids import NodeId
from holdfast.core.messages import AgentBeat, Command, Message, Record, Tick
from holdfast.sim.faults import SimFault
from holdfast.sim.world import World

STEADY_S = 20


class Timed(Controller):
    """A controller that counts the CPU time of its calls."""

    spent_s = 0.0
    fault_s = 0.0
    phase = "before"
    last: Timed | None = None

    def handle(self, now: float, event: Message) -> list[Command]:
        """Answer one event, and count."""
        Timed.last = self
        began_s = time.thread_time()
        commands = super().handle(now, event)
        took_s = time.thread_time() - began_s
        Timed.spent_s += took_s
        kinds = {c.kind for c in commands if isinstance(c, Record)}
        if Timed.phase == "before" and "detected" in kinds:
            Timed.phase = "planning"
        if Timed.phase == "planning":
            Timed.fault_s += took_s
            if "planned" in kinds:
                Timed.phase = "after"
        return commands


class TimedWorld(World):
    """The simulated job around it."""

    controller_type = Timed


def size_bytes(root: object) -> int:
    """Memory of an object and all that only data structures lead to."""
    seen: set[int] = set()
    stack, total = [root], 0
    while stack:
        one = stack.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | FunctionType):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        stack += gc.get_referents(one)
    return total


def steady_share(machine: Controller, nodes: Sequence[NodeId], now: float) -> float:
    """Share of one core that heartbeats (two per second and node) and timers take."""
    began_s = time.thread_time()
    for half in range(2 * STEADY_S):
        for node_id in nodes:
            machine.handle(now + half / 2, AgentBeat(node_id=node_id))
        machine.handle(now + half / 2, Tick(name="beat"))
    return (time.thread_time() - began_s) / STEADY_S


def row(ranks: int) -> str:
    """One simulated job with one kill."""
    Timed.spent_s = Timed.fault_s = 0.0
    Timed.phase = "before"
    fault = SimFault(kind="kill", at_s=0.8, rank=ranks // 2)
    world = TimedWorld(ranks, 1, (fault,), 6, 2)
    began_s = time.monotonic()
    world.run()
    took_s = time.monotonic() - began_s
    machine = Timed.last
    assert machine is not None and Timed.phase == "after"
    nodes = sorted(world._agents)
    state_bytes = size_bytes(machine.job)
    machine.job.ended = False
    share = steady_share(machine, nodes, world.now)
    return (
        f"| {ranks} | {len(nodes)} | {world.events} | {Timed.fault_s:.3f} | {Timed.spent_s:.2f} | {100 * share:.2f} | "
        f"{state_bytes / ranks / 1024:.2f} | {took_s:.0f} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="*", default=[1024, 4096, 16384])
    print("| simulated ranks | nodes | events | fault to plan, CPU s | whole run, CPU s | steady state, % of a core | "
          "state, KiB per rank | simulation, s |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for ranks in parser.parse_args().ranks:
        print(row(ranks), flush=True)


if __name__ == "__main__":
    main()
