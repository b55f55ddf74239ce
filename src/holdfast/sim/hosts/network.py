"""Simulated connections between processes on hosts. Each direction between two hosts may fail on its own.

Theory. A connection delivers messages in order. While a direction is blocked, the kernel keeps the sent messages. They
arrive when the direction works again. If a message is not acknowledged for ``USER_TIMEOUT_S`` (``TCP_USER_TIMEOUT`` of
every socket), the kernel of the sender closes the connection. A host that loses power sends nothing more, not even the
close of its connections.

Invariants:
1. The messages of one direction of a connection arrive in the order in which they were sent, each at most once.
2. A closed end receives nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

from holdfast.core.ids import NodeId
from holdfast.core.protocol.messages import Message

USER_TIMEOUT_S = 5.0
LATENCY_S = (0.0002, 0.003)
RETRANSMIT_S = 0.2  # the longest time until a sender notices that a direction works again


class NetworkScene(Protocol):
    """The interface of the simulated world that the network uses."""

    @property
    def now(self) -> float: ...
    def later(self, delay_s: float, label: str, action: Callable[[], None]) -> None: ...
    def later_on(self, node_id: NodeId, delay_s: float, label: str, action: Callable[[], None]) -> None: ...
    def jitter(self, low_s: float, high_s: float) -> float: ...
    def is_up(self, node_id: NodeId) -> bool: ...


class End:
    """One end of a connection, used by a process on ``host``.

    Attributes:
        open: False after this end was closed.
        on_message: called with each message that arrives.
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
        """Send a message. Return False if this end is closed."""
        if self.open:
            self._connection.send(self._side, message)
        return self.open

    def close(self) -> None:
        """Close this end and notify the other side. A process does so, or the kernel when the process dies."""
        if self.open:
            self.open = False
            self._connection.send(self._side, None)

    def vanish(self) -> None:
        """Close this end without notifying the other side, because the host has lost power.

        What the kernel of the host has kept is lost.
        """
        self.open = False
        self._connection.forget(self._side)

    def drop(self) -> None:
        """Close this end because the kernel or the other side has closed the connection, and call ``on_closed``."""
        if self.open:
            self.open = False
            self.on_closed()


class _InTransit(NamedTuple):
    """A message with its number in the order of sending. The message None closes the end that receives it."""

    number: int
    message: Message | None


class Connection:
    """A connection: two ends and the messages in flight. The message None closes the end that receives it."""

    def __init__(self, network: Network, hosts: tuple[NodeId, NodeId]) -> None:
        self.ends = (End(self, hosts[0], 0), End(self, hosts[1], 1))
        self._network = network
        self._held: tuple[list[_InTransit], list[_InTransit]] = ([], [])
        self._number = 0  # of the newest message, in both directions
        self._last_s = [0.0, 0.0]  # by number of the sending end: the latest planned arrival
        self._watched = [False, False]  # by number of the sending end: it waits for an acknowledgement

    def send(self, side: int, message: Message | None) -> None:
        """Send a message from the end with the number ``side`` (0 or 1). The message None closes the other end."""
        self._number += 1
        sent = _InTransit(self._number, message)
        if self._held[side]:
            self._held[side].append(sent)
            return
        self._travel(side, sent, self._network.delay_s())

    def forget(self, side: int) -> None:
        """Drop the messages that are held back in the direction from the end with the number ``side``."""
        self._held[side].clear()

    def retry(self) -> None:
        """If a blocked direction works again, send the messages that were held back in that direction, in order."""
        for side in (0, 1):
            if self._held[side] and self._network.carries(self.ends[side].host, self.ends[1 - side].host):
                # A message that was on its way when the direction was blocked is held after newer ones.
                waiting = sorted(self._held[side], key=lambda sent: sent.number)
                self._held[side].clear()
                wait_s = self._network.scene.jitter(0.0, RETRANSMIT_S)
                for sent in waiting:
                    self._travel(side, sent, wait_s)

    @property
    def is_over(self) -> bool:
        """True if both ends are closed."""
        return not (self.ends[0].open or self.ends[1].open)

    def _travel(self, side: int, sent: _InTransit, delay_s: float) -> None:
        scene = self._network.scene
        at_s = self._last_s[side] = max(scene.now + delay_s, self._last_s[side] + 1e-6)
        target = self.ends[1 - side].host
        label = "closed" if sent.message is None else type(sent.message).__name__
        arrive = partial(self._arrive, side, sent)
        scene.later(at_s - scene.now, f"{self.ends[side].host}>{target} {label}", arrive)

    def _arrive(self, side: int, sent: _InTransit) -> None:
        sender, receiver = self.ends[side], self.ends[1 - side]
        network = self._network
        if self._held[side] or not network.carries(sender.host, receiver.host):
            self._held[side].append(sent)
            self._watch(side)
            return
        if not network.carries(receiver.host, sender.host):
            self._watch(side)  # the message arrives, but its acknowledgement does not
        if not network.scene.is_up(receiver.host):
            self._watch(side)
        elif receiver.open:
            # A paused host reads the message after the pause.
            network.scene.later_on(receiver.host, 0.0, "read", partial(self._read, receiver, sent.message))
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
    """The network between the hosts: its blocked directions and all connections."""

    def __init__(self, scene: NetworkScene) -> None:
        self.scene = scene
        self.slow_s = 0.0  # the largest delay that is added to a message
        self._blocked: dict[tuple[NodeId, NodeId], int] = {}
        self._since_s: dict[tuple[NodeId, NodeId], float] = {}  # blocked direction -> start of the block
        self._vanished_s: dict[NodeId, float] = {}
        self._connections: list[Connection] = []

    def delay_s(self) -> float:
        """Draw the delay of one message, in seconds."""
        return self.scene.jitter(*LATENCY_S) + (self.scene.jitter(0.0, self.slow_s) if self.slow_s else 0.0)

    def carries(self, source: NodeId, target: NodeId) -> bool:
        """Return True if messages from ``source`` reach ``target``."""
        return source == target or (source, target) not in self._blocked

    def silence_s(self, source: NodeId, target: NodeId) -> float:
        """Return for how many virtual seconds no message from ``source`` can have reached ``target``.

        0 means that messages reach ``target`` now.
        """
        if source == target:
            return 0.0
        since_s = self._since_s.get((source, target), self.scene.now)
        if not self.scene.is_up(source):
            since_s = min(since_s, self._vanished_s[source])
        return self.scene.now - since_s

    def connects(self, one: NodeId, other: NodeId) -> bool:
        """Return True if two hosts can connect: both have power and both directions between them work."""
        both = self.carries(one, other) and self.carries(other, one)
        return both and self.scene.is_up(one) and self.scene.is_up(other)

    def connect(self, one: NodeId, other: NodeId) -> tuple[End, End]:
        """Open a connection between the hosts ``one`` and ``other``. Return its ends, that of ``one`` first."""
        connection = Connection(self, (one, other))
        self._connections = [c for c in self._connections if not c.is_over]
        self._connections.append(connection)
        return connection.ends

    def block(self, directions: tuple[tuple[NodeId, NodeId], ...]) -> None:
        """Block directions, each as (sending host, receiving host).

        Blocks may overlap. A direction works again when all of its blocks have ended.
        """
        for direction in directions:
            self._blocked[direction] = self._blocked.get(direction, 0) + 1
            self._since_s.setdefault(direction, self.scene.now)

    def unblock(self, directions: tuple[tuple[NodeId, NodeId], ...]) -> None:
        """Undo one earlier call of :meth:`block` for the given directions."""
        for direction in directions:
            self._blocked[direction] -= 1
            if not self._blocked[direction]:
                del self._blocked[direction], self._since_s[direction]
        for connection in list(self._connections):
            connection.retry()

    def vanished(self, host: NodeId) -> None:
        """Close all ends of a host that lost power, without notifying the other sides."""
        self._vanished_s[host] = self.scene.now
        for connection in self._connections:
            for end in connection.ends:
                if end.host == host:
                    end.vanish()
