"""Faults of hosts and of the network between hosts, as data, and the injection of these faults into a simulated run."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Literal, Protocol

import msgspec

from holdfast.core.ids import NodeId
from holdfast.sim.hosts.network import Network
from holdfast.sim.injector import SimInjector

HostFaultKind = Literal[
    "lose_host",  # a host loses power; it returns with its disk after the duration (0: never)
    "reinstall_host",  # as lose_host, but the host returns with an empty disk
    "split",  # one host and all others do not reach each other
    "one_way_out",  # messages from one host are lost, messages to the host arrive
    "one_way_in",  # messages to one host are lost, messages from the host arrive
    "bridge",  # two hosts do not reach each other; both reach the others
    "flap",  # a split that begins and ends repeatedly
    "slow_network",  # messages take seconds
    "pause_host",  # nothing runs on a host for a while; its clock runs
    "jump_clock",  # the clock of a host jumps ahead by the duration, as after a suspension
    "late_timers",  # timers of a host fire late
    "slow_disk",  # a sync takes seconds
    "full_disk",  # no file can be written, except event logs, which have reserved room
    "ask_exit_here",  # a user asks for the exit of the job on this host, which may be cut off
]
KINDS: tuple[HostFaultKind, ...] = (
    *("lose_host", "lose_host", "reinstall_host", "split", "split", "one_way_out", "one_way_in", "bridge"),
    *("flap", "slow_network", "pause_host", "jump_clock", "late_timers", "slow_disk", "full_disk"),
)
DURATIONS_S = (0.3, 1.0, 2.5, 4.0, 6.0, 9.0, 15.0)
SLOW_S = 1.5
FLAPS_S = (0.2, 1.6)
PHASES = ("", "", "idle", "fencing", "replacing", "saving", "leaving", "starting", "resuming", "electing")


class HostFault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault of a host or the network. It strikes as soon as ``at_s`` has passed and the job is in ``phase``.

    Attributes:
        kind: what happens.
        at_s: virtual time in seconds.
        node: number of the host that the fault strikes.
        other: number of the second host in a ``bridge``, the fault in which two hosts do not reach each other.
        duration_s: virtual seconds until the fault ends. 0 in a ``lose_host``: the host never returns.
        phase: a phase of the job. Empty means any phase, ``electing`` that no controller leads.
    """

    kind: HostFaultKind
    at_s: float
    node: int = 0
    other: int = 0
    duration_s: float = 0.0
    phase: str = ""


class HostFaultTarget(Protocol):
    """The interface of the simulated world through which host faults take effect."""

    network: Network

    def later(self, delay_s: float, label: str, action: Callable[[], None]) -> None: ...
    def jitter(self, low_s: float, high_s: float) -> float: ...
    def phase(self) -> str: ...
    @property
    def injector(self) -> SimInjector: ...
    def lose_host(self, node_id: NodeId, back_s: float, *, empty: bool) -> None: ...
    def pause(self, node_id: NodeId, duration_s: float) -> None: ...
    def jump(self, node_id: NodeId, ahead_s: float) -> None: ...
    def ask_exit_on(self, node_id: NodeId) -> None: ...
    def set_lateness(self, node_id: NodeId, late_s: float) -> None: ...
    def set_disk(self, node_id: NodeId, *, slow_s: float, full: bool) -> None: ...


class HostInjector:
    """The injector of host faults. It applies each fault when its time has passed and the job is in its phase."""

    def __init__(self, world: HostFaultTarget, nodes: Sequence[NodeId]) -> None:
        self._world = world
        self._nodes = tuple(nodes)
        self._armed: list[HostFault] = []

    def start(self, faults: Sequence[HostFault]) -> None:
        """Schedule each of ``faults`` at its time."""
        for fault in faults:
            self._world.later(fault.at_s, f"fault {fault.kind}", partial(self._arm, fault))

    def moved(self) -> None:
        """Apply the faults that wait for the present phase of the job. To be called when the phase may have changed."""
        if self._armed:
            phase = self._world.phase()
            for fault in [f for f in self._armed if f.phase == phase]:
                self._armed.remove(fault)
                self._world.later(0.0, f"now {fault.kind}", partial(self._strike, fault))

    def _arm(self, fault: HostFault) -> None:
        if fault.phase and fault.phase != self._world.phase():
            self._armed.append(fault)
        else:
            self._strike(fault)

    def _strike(self, fault: HostFault) -> None:
        world, count = self._world, len(self._nodes)
        node = self._nodes[fault.node % count]
        other = self._nodes[fault.other % count]
        rest = [name for name in self._nodes if name != node]
        world.injector.struck(fault.kind)
        match fault.kind:
            case "lose_host" | "reinstall_host":
                world.lose_host(node, fault.duration_s, empty=fault.kind == "reinstall_host")
            case "split":
                self._block(_both(node, rest), fault.duration_s)
            case "one_way_out":
                self._block(tuple((node, name) for name in rest), fault.duration_s)
            case "one_way_in":
                self._block(tuple((name, node) for name in rest), fault.duration_s)
            case "bridge":
                self._block(_both(node, [other] if other != node else rest[:1]), fault.duration_s)
            case "flap":
                self._flap(_both(node, rest), fault.duration_s)
            case "slow_network":
                world.network.slow_s = SLOW_S
                world.later(fault.duration_s, "fast again", self._fast)
            case "pause_host":
                world.pause(node, fault.duration_s)
            case "jump_clock":
                world.jump(node, fault.duration_s)
            case "ask_exit_here":
                world.ask_exit_on(node)
            case "late_timers":
                world.set_lateness(node, 0.5)
                world.later(fault.duration_s, "in time again", partial(world.set_lateness, node, 0.0))
            case "slow_disk":
                world.set_disk(node, slow_s=3.0, full=False)
                self._mend(node, fault.duration_s)
            case "full_disk":
                world.set_disk(node, slow_s=0.0, full=True)
                self._mend(node, fault.duration_s)

    def _fast(self) -> None:
        self._world.network.slow_s = 0.0

    def _mend(self, node: NodeId, after_s: float) -> None:
        self._world.later(after_s, "disk mended", partial(self._world.set_disk, node, slow_s=0.0, full=False))

    def _block(self, directions: tuple[tuple[NodeId, NodeId], ...], duration_s: float) -> None:
        self._world.network.block(directions)
        self._world.later(duration_s, "healed", partial(self._world.network.unblock, directions))

    def _flap(self, directions: tuple[tuple[NodeId, NodeId], ...], duration_s: float) -> None:
        turns_s = [0.0]
        while turns_s[-1] < duration_s:
            turns_s.append(turns_s[-1] + self._world.jitter(*FLAPS_S))
        for begin_s, end_s in list(pairwise(turns_s))[::2]:
            self._world.later(begin_s, "flap", partial(self._block, directions, end_s - begin_s))


def _both(node: NodeId, others: Sequence[NodeId]) -> tuple[tuple[NodeId, NodeId], ...]:
    return tuple(pair for name in others for pair in ((node, name), (name, node)))


def random_host_faults(
    rng: random.Random, nodes: int, count: int, kinds: Sequence[HostFaultKind] = KINDS
) -> tuple[HostFault, ...]:
    """Return ``count`` random faults of ``nodes`` hosts. Most of them strike shortly after the previous fault."""
    faults: list[HostFault] = []
    at_s = rng.uniform(0.4, 1.6)
    for _ in range(count):
        kind = rng.choice(kinds)
        back_s = rng.choice((0.0, *DURATIONS_S)) if "host" in kind and "pause" not in kind else 1.0
        faults.append(
            HostFault(
                kind=kind,
                at_s=round(at_s, 4),
                node=rng.randrange(nodes),
                other=rng.randrange(nodes),
                duration_s=0.0 if not back_s else rng.choice(DURATIONS_S),
                phase=rng.choice(PHASES) if faults else "",
            )
        )
        at_s += rng.expovariate(1 / rng.choice((0.05, 0.5, 2.0)))
    return tuple(faults)
