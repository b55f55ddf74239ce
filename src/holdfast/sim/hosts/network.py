"""Connections between the processes of hosts, over a network that loses directions.

Theory. A connection carries messages in order. While a direction is blocked the kernel keeps what was sent: it arrives
after the direction is back, or the sender closes the connection when nothing was acknowledged for
``USER_TIMEOUT_S`` (``TCP_USER_TIMEOUT`` of every socket). A host that is gone sends nothing, not even that it is gone.

Invariants:
1. Messages of one direction arrive in the order in which they were sent, each at most once.
2. An end that is closed gets nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from holdfast.core.ids import NodeId
from holdfast.core.protocol.messages import Message

USER_TIMEOUT_S = 5.0
LATENCY_S = (0.0002, 0.003)
RETRANSMIT_S = 0.2  # a direction that is back is noticed within this


class NetworkScene(Protocol):
    """What the network needs of the world."""

    @property
    def now(self) -> float: ...
    def later(self, delay_s: float, label: str, action: Callable[[], None]) -> None: ...
    def later_on(self, node_id: NodeId, delay_s: float, label: str, action: Callable[[], None]) -> None: ...
    def jitter(self, low_s: float, high_s: float) -> float: ...
    def is_up(self, node_id: NodeId) -> bool: ...


class End:
    """One end of a connection, in the hands of a process on ``host``.

    Attributes:
        on_message: takes what arrives.
        on_closed: called once when the other side, or the kernel, closes the connection.
    """

    def __init__(self, connection: Connection, host: NodeId, side: int) -> None:
        self.host = host
        self.open = True
        self.on_message: Callable[[Message], None] = lambda message: None
        self.on_closed: Callable[[], None] = lambda: None
        self._connection = connection
        self._side = side

    def send(self, message: Message) -> bool:
        """False when this end is closed."""
        if self.open:
            self._connection.send(self._side, message)
        return self.open

    def close(self) -> None:
        """The process closes its end, or has died: the other side hears of it."""
        if self.open:
            self.open = False
            self._connection.send(self._side, None)

    def vanish(self) -> None:
        """The host is gone: the other side hears nothing."""
        self.open = False

    def drop(self) -> None:
        """The kernel closes this end."""
        if self.open:
            self.open = False
            self.on_closed()


class Connection:
    """Two ends, and what is on its way. None in place of a message: the sender has closed its end."""

    def __init__(self, network: Network, hosts: tuple[NodeId, NodeId]) -> None:
        self.ends = (End(self, hosts[0], 0), End(self, hosts[1], 1))
        self._network = network
        self._held: tuple[list[Message | None], list[Message | None]] = ([], [])
        self._last_s = [0.0, 0.0]  # per direction: the newest arrival
        self._watched = [False, False]  # per sender: an acknowledgement is awaited

    def send(self, side: int, message: Message | None) -> None:
        """From this side."""
        if self._held[side]:
            self._held[side].append(message)
            return
        self._travel(side, message, self._network.delay_s())

    def retry(self) -> None:
        """Directions may be back: send what was held, in order."""
        for side in (0, 1):
            if self._held[side] and self._network.carries(self.ends[side].host, self.ends[1 - side].host):
                waiting = list(self._held[side])
                self._held[side].clear()
                wait_s = self._network.scene.jitter(0.0, RETRANSMIT_S)
                for message in waiting:
                    self._travel(side, message, wait_s)

    @property
    def is_over(self) -> bool:
        """Return True if the connection is over in both directions."""
        return not (self.ends[0].open or self.ends[1].open)

    def _travel(self, side: int, message: Message | None, delay_s: float) -> None:
        scene = self._network.scene
        at_s = self._last_s[side] = max(scene.now + delay_s, self._last_s[side] + 1e-6)
        target = self.ends[1 - side].host
        label = "closed" if message is None else type(message).__name__
        arrive = partial(self._arrive, side, message)
        scene.later(at_s - scene.now, f"{self.ends[side].host}>{target} {label}", arrive)

    def _arrive(self, side: int, message: Message | None) -> None:
        sender, receiver = self.ends[side], self.ends[1 - side]
        network = self._network
        if self._held[side] or not network.carries(sender.host, receiver.host):
            self._held[side].append(message)
            self._watch(side)
            return
        if not network.carries(receiver.host, sender.host):
            self._watch(side)  # it arrives, but no acknowledgement does
        if not network.scene.is_up(receiver.host):
            self._watch(side)
        elif receiver.open:
            # A host that is paused takes it afterwards.
            network.scene.later_on(receiver.host, 0.0, "read", partial(self._read, receiver, message))
        elif network.carries(receiver.host, sender.host):
            network.scene.later(network.delay_s(), "reset", sender.drop)

    @staticmethod
    def _read(receiver: End, message: Message | None) -> None:
        if not receiver.open:
            return
        if message is None:
            receiver.drop()
        else:
            receiver.on_message(message)

    def _watch(self, side: int) -> None:
        if not self._watched[side]:
            self._watched[side] = True
            self._network.scene.later(USER_TIMEOUT_S, "no acknowledgement", partial(self._unheard, side))

    def _unheard(self, side: int) -> None:
        self._watched[side] = False
        network = self._network
        here, there = self.ends[side].host, self.ends[1 - side].host
        if self._held[side] or not network.carries(there, here) or not network.scene.is_up(there):
            self.ends[side].drop()


class Network:
    """Which host reaches which, and every connection."""

    def __init__(self, scene: NetworkScene) -> None:
        self.scene = scene
        self.slow_s = 0.0  # added to each message
        self._blocked: dict[tuple[NodeId, NodeId], int] = {}
        self._connections: list[Connection] = []

    def delay_s(self) -> float:
        """For one message."""
        return self.scene.jitter(*LATENCY_S) + (self.scene.jitter(0.0, self.slow_s) if self.slow_s else 0.0)

    def carries(self, source: NodeId, target: NodeId) -> bool:
        """What ``source`` sends comes to the host ``target``."""
        return source == target or (source, target) not in self._blocked

    def connects(self, one: NodeId, other: NodeId) -> bool:
        """A connection can be made: both directions carry, both hosts are up."""
        both = self.carries(one, other) and self.carries(other, one)
        return both and self.scene.is_up(one) and self.scene.is_up(other)

    def connect(self, one: NodeId, other: NodeId) -> tuple[End, End]:
        """The two ends of a new connection."""
        connection = Connection(self, (one, other))
        self._connections = [c for c in self._connections if not c.is_over]
        self._connections.append(connection)
        return connection.ends

    def block(self, directions: tuple[tuple[NodeId, NodeId], ...]) -> None:
        """These directions carry nothing; several partitions may overlap."""
        for direction in directions:
            self._blocked[direction] = self._blocked.get(direction, 0) + 1

    def unblock(self, directions: tuple[tuple[NodeId, NodeId], ...]) -> None:
        """End what :meth:`block` began."""
        for direction in directions:
            self._blocked[direction] -= 1
            if not self._blocked[direction]:
                del self._blocked[direction]
        for connection in list(self._connections):
            connection.retry()

    def vanished(self, host: NodeId) -> None:
        """A host lost power: its ends are gone without a word."""
        for connection in self._connections:
            for end in connection.ends:
                if end.host == host:
                    end.vanish()
