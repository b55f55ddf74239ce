"""The blocking client of the connections that carry the messages of :class:`holdfast.wire.Link`."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from holdfast.errors import ProtocolError
from holdfast.runtime.net.addresses import Address
from holdfast.runtime.net.stream_sockets import dial, is_local, tune
from holdfast.sealing import TAG_SIZE_BYTES, Secret
from holdfast.wire import NONCE_SIZE_BYTES, PREFIX_SIZE_BYTES, Codec, Link

SEND_TIMEOUT_S = 10.0
RECEIVE_SIZE_BYTES = 256 * 1024

M = TypeVar("M")


def _pass(data: memoryview) -> None:
    """Do nothing with the bytes of a message, which the link itself checks."""


class BlockingChannel(Generic[M]):
    """A blocking client connection, for use by one thread. It is made with :meth:`connect`."""

    def __init__(self, sock: socket.socket, link: Link[M]) -> None:
        self._sock = sock
        self._link = link
        self._inbox: list[M] = []

    @staticmethod
    def connect(
        codec: Codec[M],
        at: Address,
        secret: Secret,
        service: str,
        role: str,
        *,
        timeout_s: float = 5.0,
    ) -> BlockingChannel[M]:
        """Connect, complete the handshake, and return the channel.

        Raises:
            OSError: no process listens at the address, or the peer is too slow (``TimeoutError``).
            AuthError, ProtocolError: the handshake failed.
        """
        sock = dial(at, timeout_s)
        try:
            tune(sock)
            nonce = os.urandom(NONCE_SIZE_BYTES)
            link = Link(codec, secret, nonce, service=service, role=role, refused=Counter())
            channel = BlockingChannel(sock, link)
            deadline_s = time.monotonic() + timeout_s
            while not link.open:
                channel._pump(deadline_s)
            return channel
        except BaseException:
            sock.close()
            raise

    def fileno(self) -> int:
        """Return the file descriptor of the socket, for ``select``."""
        return self._sock.fileno()

    def send(self, message: M) -> None:
        """Send a message, and block until the kernel has taken it.

        Raises:
            OSError: the connection is closed, or the peer has not read for ``SEND_TIMEOUT_S``.
        """
        self._link.send(message)
        self._sock.settimeout(SEND_TIMEOUT_S)
        self._sock.sendall(self._link.take_output())

    def drain(self) -> list[M]:
        """Read once, and return the messages that are complete. Call this after ``select`` reports the descriptor.

        Raises:
            ConnectionError: the peer closed the connection.
            ProtocolError: the peer sent bytes that are not a valid message.
        """
        self._pump(time.monotonic() + SEND_TIMEOUT_S)
        messages, self._inbox = self._inbox, []
        return messages

    def receive(self, timeout_s: float | None = None) -> M:
        """Wait for the next message and return it. ``timeout_s`` None waits without a limit.

        Raises:
            TimeoutError: no message arrived in time.
            ConnectionError: the peer closed the connection.
            ProtocolError: the peer sent bytes that are not a valid message.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._inbox:
            self._pump(deadline_s)
        return self._inbox.pop(0)

    def receive_answer(self, timeout_s: float) -> M:
        """Read exactly one message and return it. Raw bytes for :meth:`receive_batch` may follow on the connection.

        Use this only if the peer sends nothing but answers to requests. The exceptions are those of :meth:`receive`:
        TimeoutError, ConnectionError, ProtocolError.
        """
        head = bytearray(PREFIX_SIZE_BYTES)
        self._fill(memoryview(head), timeout_s)
        # Refuses a message that is too long before memory is allocated for it
        self._link.receive(bytes(head))
        body = bytearray(int.from_bytes(head, "big"))
        self._fill(memoryview(body), timeout_s)
        (message,) = self._link.receive(bytes(body))
        return message

    def receive_batch(self, goals: Sequence[memoryview], timeout_s: float) -> None:
        """Fill the buffers ``goals``, in order, with the next raw bytes of the connection. Verify the tag after them.

        Raises:
            TimeoutError: no bytes arrived for ``timeout_s`` seconds.
            ConnectionError: the peer closed the connection.
            ProtocolError: the bytes are not those that the peer has sent.
        """
        batch, tag = self._link.open_batch(local=is_local(self._sock)), bytearray(TAG_SIZE_BYTES)
        for goal in goals:
            self._fill(goal, timeout_s, batch.open)
        self._fill(memoryview(tag), timeout_s)
        if not batch.fits(bytes(tag)):
            raise ProtocolError("bytes have come that the other end has not sent in this place")

    def _fill(self, goal: memoryview, timeout_s: float, take: Callable[[memoryview], None] = _pass) -> None:
        self._sock.settimeout(timeout_s)
        while goal:
            size_bytes = self._sock.recv_into(goal)
            if not size_bytes:
                raise ConnectionResetError("the peer closed the connection")
            take(goal[:size_bytes])  # the next bytes arrive in the meantime
            goal = goal[size_bytes:]

    def close(self) -> None:
        """Close the connection now."""
        self._sock.close()

    def _pump(self, deadline_s: float | None) -> None:
        left_s = None if deadline_s is None else deadline_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise TimeoutError("no answer in time")
        self._sock.settimeout(left_s)
        data = self._sock.recv(RECEIVE_SIZE_BYTES)
        if not data:
            raise ConnectionResetError("the peer closed the connection")
        self._inbox += self._link.receive(data)
        if output := self._link.take_output():
            self._sock.sendall(output)
