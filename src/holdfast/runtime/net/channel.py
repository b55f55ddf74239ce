"""Sockets that carry the messages of :class:`holdfast.wire.Link`: asyncio server and client."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import sys
import termios
from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

from holdfast.errors import ProtocolError
from holdfast.runtime.net.addresses import Address
from holdfast.runtime.net.connection_limits import BACKLOG, BURST, HANDSHAKE_TIMEOUT_S, ConnectionLimits
from holdfast.runtime.net.stream_sockets import dial_protocol, listen, tune
from holdfast.sealing import Secret
from holdfast.wire import NONCE_SIZE_BYTES, Codec, Link

DIAL_AGAIN_S = 0.25
BACKLOG_SIZE_BYTES_MAX = 256 * 1024 * 1024  # unread output of one peer before it is cut off

M = TypeVar("M")


class Hub(Generic[M]):
    """The values that all channels of one asyncio process share: codec, secret, callbacks and counters.

    Callbacks run in the event loop, in the order of the events. ``on_close`` is called once for each channel that was
    opened.
    """

    def __init__(
        self,
        codec: Codec[M],
        secret: Secret,
        *,
        on_open: Callable[[Channel[M]], None],
        on_message: Callable[[Channel[M], M], None],
        on_close: Callable[[Channel[M]], None],
    ) -> None:
        self.codec = codec
        self.secret = secret
        self.on_open = on_open
        self.on_message = on_message
        self.on_close = on_close
        self.refused: Counter[str] = Counter()
        self.channels: set[Channel[M]] = set()
        self.strangers: ConnectionLimits[Channel[M]] = ConnectionLimits()

    async def listen(self, service: str, at: Address) -> tuple[asyncio.Server, Address]:
        """Serve as ``service`` at the address ``at``. Port 0 means any free port.

        Returns:
            The server, and the address at which it listens.

        Raises:
            OSError: the address is not one of this machine, or the port is taken.
            UsageError: the directory of a socket path is not private, or no socket can be made in it.
        """
        listener, at = listen(at)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: Channel(self, service, role=None), sock=listener, backlog=BURST
        )
        with socket.socket(fileno=os.dup(listener.fileno())) as same_listener:
            same_listener.listen(BACKLOG)
        return server, at

    async def close(self, timeout_s: float) -> None:
        """Close all channels after their queued output is sent. Abort those that are still open after ``timeout_s``."""
        closing = {channel.closed for channel in self.channels}
        for channel in list(self.channels):
            channel.close()
        if closing:
            await asyncio.wait(closing, timeout=timeout_s)
        for channel in list(self.channels):
            channel.abort()

    async def connect(self, at: Address, service: str, role: str) -> Channel[M]:
        """Connect to ``service`` at ``at``, wait for the handshake, and return the channel.

        Raises:
            OSError: no process listens there.
            AuthError: the handshake failed.
            ProtocolError: another service listens there.
            TimeoutError: the server did not finish the handshake.
        """
        channel = await dial_protocol(lambda: Channel(self, service, role), at)
        try:
            await asyncio.wait_for(asyncio.shield(channel.ready), HANDSHAKE_TIMEOUT_S)
        except BaseException:
            channel.abort()
            raise
        return channel

    async def connect_soon(self, at: Address, service: str, role: str) -> Channel[M]:
        """Connect as :meth:`connect` does, but with parallel attempts, and return the first channel that is ready.

        A further attempt starts every ``DIAL_AGAIN_S`` seconds until one succeeds or all have failed. TCP itself
        repeats a lost first packet after one second, then after two. That is too slow on a network that loses many
        packets.
        """
        dials: set[asyncio.Task[Channel[M]]] = set()
        try:
            while True:
                dials.add(asyncio.create_task(self.connect(at, service, role)))
                done, dials = await asyncio.wait(
                    dials, timeout=DIAL_AGAIN_S, return_when=asyncio.FIRST_COMPLETED
                )
                good = [dial.result() for dial in done if dial.exception() is None]
                for late in good[1:]:
                    late.abort()
                if good or (done and not dials):
                    return good[0] if good else done.pop().result()
        finally:
            for dial in dials:
                dial.cancel()


class Channel(asyncio.Protocol, Generic[M]):
    """One asyncio connection. ``role`` is the client's role in the handshake; None at the server's end."""

    def __init__(self, hub: Hub[M], service: str, role: str | None) -> None:
        self.hub = hub
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._role = role
        nonce = os.urandom(NONCE_SIZE_BYTES)
        self._link = Link(hub.codec, hub.secret, nonce, service=service, role=role, refused=hub.refused)
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def peer_role(self) -> str:
        """The role that the client at the other end has named in the handshake. Empty at the client's own end."""
        return self._link.peer_role

    @property
    def address(self) -> Address:
        """The address of the peer. Empty if the connection is closed or the peer is an unnamed Unix socket."""
        name = self._transport.get_extra_info("peername") if self._transport is not None else None
        if isinstance(name, tuple):
            return Address(str(name[0]), int(name[1]))
        return Address(name or "")

    @property
    def unread(self) -> bool:
        """True if bytes from the peer have arrived and are not handled yet."""
        if self._transport is None:
            return False
        return self._link.partial or self._transport.is_closing() or self._arrived_bytes(self._transport) > 0

    @staticmethod
    def _arrived_bytes(transport: asyncio.Transport) -> int:
        sock = transport.get_extra_info("socket")
        return int.from_bytes(fcntl.ioctl(sock, termios.FIONREAD, bytes(4)), sys.byteorder)

    def send(self, message: M) -> bool:
        """Queue a message. Return False if the connection is closed or not yet open.

        If the peer leaves more than ``BACKLOG_SIZE_BYTES_MAX`` bytes unread, the connection is aborted.

        Raises:
            ProtocolError: the message is too long.
        """
        transport = self._transport
        if transport is None or transport.is_closing() or not self._link.open:
            return False
        self._link.send(message)
        transport.write(self._link.take_output())
        if transport.get_write_buffer_size() > BACKLOG_SIZE_BYTES_MAX:
            self.hub.refused["backlog"] += 1
            transport.abort()
            return False
        return True

    def close(self) -> None:
        """Close the connection after the queued output is sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection now, without sending the queued output."""
        if self._transport is not None:
            self._transport.abort()

    # Callbacks of asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        sock = transport.get_extra_info("socket")
        if self._role is None:
            for stranger in self.hub.strangers.admit(self, sock.fileno()):
                stranger.cut("crowd")
            if transport.is_closing():
                return
        try:
            tune(sock)
        except OSError:  # the connection is closed already
            self.abort()
            return
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(HANDSHAKE_TIMEOUT_S, self.cut, "slow greeting")
        transport.write(self._link.take_output())

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        was_open = self._link.open
        try:
            messages = self._link.receive(data)
        except ProtocolError as error:
            self._transport.write(self._link.take_output())
            self._transport.close()
            self._fail(error)
            return
        self._transport.write(self._link.take_output())
        if self._link.open and not was_open:
            self._opened()
        for message in messages:
            self.hub.on_message(self, message)

    def connection_lost(self, exc: Exception | None) -> None:
        self.hub.strangers.release(self)
        if self._deadline is not None:
            self._deadline.cancel()
        if isinstance(exc, ConnectionError) and self in self.hub.channels:
            self._read_the_rest()
        self._transport = None
        self.closed.set_result(None)
        self._fail(ConnectionResetError("the connection closed during the handshake"))
        if self in self.hub.channels:
            self.hub.channels.discard(self)
            self.hub.on_close(self)

    def _read_the_rest(self) -> None:
        """Handle the messages that the peer sent before it closed the connection.

        A write to a closed connection fails, and asyncio then closes the connection without reading its input. That
        input may contain the cause of the peer's death.
        """
        assert self._transport is not None
        descriptor = self._transport.get_extra_info("socket").fileno()
        with contextlib.suppress(OSError):
            self.data_received(os.read(descriptor, self._arrived_bytes(self._transport)))

    def _opened(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self.hub.strangers.release(self)
        self.hub.channels.add(self)
        if not self.ready.done():
            self.ready.set_result(None)
        self.hub.on_open(self)

    def cut(self, why: str) -> None:
        """Close the connection now, and count it as refused for the reason ``why``."""
        self.hub.refused[why] += 1
        self.abort()

    def _fail(self, error: Exception) -> None:
        # Only a client's connect() waits for ``ready``. On a server, an exception that no code reads causes a warning.
        if self._role is not None and not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # marks the exception as read, because connect() may have given up
