"""The connection of an agent to the controller: a model of ``runtime/agent/controller_link.py``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from holdfast.core.ids import NodeId
from holdfast.core.protocol.messages import (
    AgentBeat,
    AgentHello,
    ControllerBeat,
    ControllerGone,
    ControllerHere,
    Message,
)
from holdfast.core.protocol.peer_messages import Lead
from holdfast.sim.hosts.controller_process import ControllerProcess
from holdfast.sim.hosts.network import End, Network
from holdfast.sim.hosts.sim_driver import DriverScene

SILENT_S = 2.0
FOLLOW_S = 3.0
DIAL_S = 0.2
SPAWN_S = (0.1, 0.5)
WATCH_S = 0.05


class LinkScene(DriverScene, Protocol):
    """The interface of the simulated world that the connection of an agent to the controller uses."""

    network: Network

    def jitter(self, low_s: float, high_s: float) -> float: ...
    def controller_on(self, node_id: NodeId) -> ControllerProcess | None: ...
    def run_controller(self, node_id: NodeId, term: int, alone: bool) -> ControllerProcess | None: ...


class SimLink:
    """The link of one agent to the controller. It has at most one connection at a time.

    ``post`` is called with every message from the controller except heartbeats. It is also called with
    ``ControllerHere`` after a new connection and with ``ControllerGone`` after its loss.
    """

    def __init__(self, scene: LinkScene, host: NodeId, post: Callable[[Message], None]) -> None:
        self._scene = scene
        self._host = host
        self._post = post
        self._end: End | None = None
        self._attempt = 0
        self._heard_s = 0.0
        self._ending = False

    def join_local(self) -> ControllerProcess | None:
        """Connect to the controller that runs on this host, and return its process. Return None if none runs."""
        process = self._scene.controller_on(self._host)
        if process is not None:
            self._join(process)
        return process

    def start(self, term: int, up: Callable[[int], None], *, alone: bool = False) -> None:
        """Start a controller on this host and connect to it.

        Args:
            term: the term of the new controller.
            up: called with ``term`` when the agent is connected to the new controller.
            alone: True if the new controller decides only for this host.
        """
        attempt = self._replace()
        self.kill_local()

        def spawned() -> None:
            if attempt != self._attempt or self._ending:
                return
            process = self._scene.run_controller(self._host, term, alone)
            if process is None or not process.lives:
                self._lost()
                return
            self._join(process)
            up(term)
            self._post(ControllerHere())

        self._later(self._scene.jitter(*SPAWN_S), "controller started", spawned)

    def follow(self, lead: Lead) -> None:
        """Connect to the controller of another host.

        ``post`` then receives ``ControllerHere``, or ``ControllerGone`` if no connection succeeds in ``FOLLOW_S``.
        """
        self.kill_local()
        self._dial(lead, self._replace(), self._scene.clock(self._host) + FOLLOW_S)

    def send(self, message: Message) -> bool:
        """Send a message to the controller. Return False if there is no connection."""
        if isinstance(message, AgentHello | AgentBeat):
            message = msgspec.structs.replace(message, clock_ns=int(self._scene.clock(self._host) * 1e9))
        return self._end is not None and self._end.send(message)

    def kill_local(self) -> None:
        """Kill the controller of this host, if one runs."""
        process = self._scene.controller_on(self._host)
        if process is not None:
            process.die()

    def end(self) -> None:
        """Close the connection and open no other, because the agent has ended."""
        self._ending = True
        self._replace()

    # ---------------------------------------------------------------- inside

    def _replace(self) -> int:
        old, self._end = self._end, None
        if old is not None:
            old.close()
        self._attempt += 1
        return self._attempt

    def _dial(self, lead: Lead, attempt: int, until_s: float) -> None:
        if attempt != self._attempt or self._ending:
            return
        process = self._scene.controller_on(lead.leader)
        there = process is not None and process.term == lead.term and not process.alone
        if process is not None and there and self._scene.network.connects(self._host, lead.leader):
            self._join(process)
            self._post(ControllerHere())
        elif self._scene.clock(self._host) > until_s:
            self._lost()
        else:
            self._later(DIAL_S, "dial the controller", partial(self._dial, lead, attempt, until_s))

    def _join(self, process: ControllerProcess) -> None:
        mine, its = self._scene.network.connect(self._host, process.host)
        mine.on_message = partial(self._heard, mine)
        mine.on_closed = partial(self._closed, mine)
        process.accept(its)
        self._end = mine
        self._heard_s = self._scene.clock(self._host)
        self._watch(mine)

    def _watch(self, end: End) -> None:
        if end is not self._end or self._ending:
            return
        silence_s = self._scene.clock(self._host) - self._heard_s
        if silence_s >= SILENT_S:
            end.close()
            self._closed(end)
        else:
            self._later(SILENT_S - silence_s + WATCH_S, "is the controller silent", partial(self._watch, end))

    def _heard(self, end: End, message: Message) -> None:
        self._heard_s = self._scene.clock(self._host)
        if end is self._end and not isinstance(message, ControllerBeat):
            self._post(message)

    def _closed(self, end: End) -> None:
        if end is self._end:
            self._end = None
            self._lost()

    def _lost(self) -> None:
        if not self._ending:
            self._post(ControllerGone())

    def _later(self, delay_s: float, label: str, action: Callable[[], None]) -> None:
        self._scene.later_on(self._host, delay_s, f"{self._host} {label}", action)
