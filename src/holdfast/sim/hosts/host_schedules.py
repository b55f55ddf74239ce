"""Random fault schedules for runs on several hosts, and the search for a smaller schedule with the same violation."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import msgspec

from holdfast.sim.faults import FaultKind, SimFault
from holdfast.sim.hosts.host_faults import KINDS as HOST_KINDS
from holdfast.sim.hosts.host_faults import HostFault, HostFaultKind, random_host_faults
from holdfast.sim.hosts.hosts_world import HostsCase, run_hosts
from holdfast.sim.invariants import Violation

PROCESS_KINDS: tuple[FaultKind, ...] = (
    *("kill", "kill", "controller", "controller", "agent", "raise", "exit", "glitch", "stop"),
    *("save_error", "ask_exit"),
)
SIZES = ((3, 0, 1), (3, 0, 2), (3, 1, 1), (2, 1, 1), (2, 1, 2), (4, 0, 1), (3, 2, 1), (2, 0, 2))
"""Job sizes: (hosts with ranks, spare hosts, ranks per host)."""
TIMES_S = (0.05, 0.5, 2.0)
ASKED_CHANCE = 0.15


def hosts_case(seed: int, kinds: tuple[HostFaultKind, ...] = HOST_KINDS) -> HostsCase:
    """Return the random schedule of a seed: the size of a job, one to three host faults and up to two process faults.

    Most faults strike shortly after another fault. In some schedules a user also asks for the exit of the job on a
    host, shortly after a fault that may have disconnected this host.

    Args:
        seed: seed of the random numbers.
        kinds: the kinds of host faults to choose from.
    """
    rng = random.Random(seed)
    nodes, spares, per_node = rng.choice(SIZES)
    host_faults = random_host_faults(rng, nodes + spares, rng.randint(1, 3), kinds)
    faults, at_s = list[SimFault](), rng.uniform(0.4, 2.0)
    for _ in range(rng.randint(0, 2)):
        kind, rank = rng.choice(PROCESS_KINDS), rng.randrange(nodes * per_node)
        faults.append(SimFault(kind=kind, at_s=round(at_s, 4), rank=rank))
        at_s += rng.expovariate(1 / rng.choice(TIMES_S))
    shrinks = rng.random() < 0.25
    case = HostsCase(
        nodes=nodes,
        spares=spares,
        per_node=per_node,
        shards=1 if shrinks else rng.choice((1, 1, 2, nodes * per_node)),
        nodes_min=int(shrinks),
        witness=rng.random() < 0.5,
        faults=tuple(faults),
        host_faults=host_faults,
    )
    if rng.random() >= ASKED_CHANCE:
        return case
    after = rng.choice(host_faults)
    asked = HostFault(
        kind="ask_exit_here",
        at_s=round(after.at_s + rng.expovariate(1 / rng.choice(TIMES_S)), 4),
        node=rng.choice((after.node, rng.randrange(nodes + spares))),
    )
    return msgspec.structs.replace(case, host_faults=(*host_faults, asked))


def hosts_breach(seed: int, case: HostsCase) -> str:
    """Simulate a schedule. Return the broken invariant as "name: description", or an empty text if none is broken."""
    try:
        run_hosts(seed, case)
    except Violation as violation:
        return str(violation)
    return ""


def _smaller(case: HostsCase) -> Iterator[HostsCase]:
    """Yield each copy of ``case`` without one of its faults. Then yield copies of ``case`` with a simpler job.

    Each simpler job has one setting at its simplest value, for example no spare hosts.
    """
    for fault in case.faults:
        yield msgspec.structs.replace(case, faults=tuple(f for f in case.faults if f is not fault))
    for each in case.host_faults:
        rest = tuple(f for f in case.host_faults if f is not each)
        yield msgspec.structs.replace(case, host_faults=rest)
    for name, simplest in (
        ("spares", 0),
        ("nodes_min", 0),
        ("per_node", 1),
        ("shards", 1),
        ("witness", False),
    ):
        if getattr(case, name) != simplest:
            yield msgspec.structs.replace(case, **{name: simplest})


def shrunk_hosts_case(
    seed: int, case: HostsCase, breach: Callable[[int, HostsCase], str] = hosts_breach
) -> HostsCase:
    """Remove faults and simplify the job while the schedule still breaks the same invariant. Return the result.

    ``breach`` simulates a schedule and returns the broken invariant, as :func:`hosts_breach` does.
    """
    name = breach(seed, case).partition(":")[0]
    for smaller in _smaller(case):
        if breach(seed, smaller).partition(":")[0] == name:
            return shrunk_hosts_case(seed, smaller, breach)
    return case


class FoundSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule that once broke an invariant (``broke``). The tests store such schedules as JSON and rerun them."""

    seed: int
    broke: str
    case: HostsCase
