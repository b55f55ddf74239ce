"""A small request server for processes of the same run: one thread per connection, one answer per request.

Large data follows an answer as raw bytes, sent from memory without frames and without a copy. One authentication tag
follows these bytes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Generic, TypeVar

from holdfast.errors import ProtocolError
from holdfast.runtime.net.addresses import Address
from holdfast.runtime.net.blocking_channel import RECEIVE_SIZE_BYTES
from holdfast.runtime.net.connection_limits import ACCEPT_AGAIN_S, HANDSHAKE_TIMEOUT_S, ConnectionLimits
from holdfast.runtime.net.stream_sockets import is_local, listen, tune
from holdfast.sealing import Secret
from holdfast.wire import NONCE_SIZE_BYTES, Codec, Link

TIMEOUT_S = 30.0
PART_SIZE_BYTES = 512 * 1024
STRANGERS_MAX = 256  # each has a thread
M = TypeVar("M")


class AnswerServer(ABC, Generic[M]):
    """A server that listens, authenticates its clients, and answers their requests.

    Args:
        codec: codec of requests and answers.
        secret: secret of the run.
        service: service name, from which both ends of a connection derive its keys.
    """

    def __init__(self, codec: Codec[M], secret: Secret, service: str) -> None:
        self.refused: Counter[str] = Counter()
        self._codec = codec
        self._secret = secret
        self._service = service
        self._listener: socket.socket | None = None
        self._closing = threading.Event()
        self._lines_lock = threading.Lock()
        self._lines: set[socket.socket] = set()
        self._strangers: ConnectionLimits[socket.socket] = ConnectionLimits(STRANGERS_MAX)

    @abstractmethod
    def _answer(self, message: M) -> tuple[M, Sequence[memoryview]]:
        """Return the answer to a request, and the raw bytes to send after it.

        This runs in the thread of the connection.
        """

    def start(self, at: Address) -> Address:
        """Listen at ``at`` and return the address. Port 0 means any free port.

        Raises: OSError and UsageError, as in ``stream_sockets.listen``.
        """
        self._listener, at = listen(at)
        threading.Thread(
            target=self._accept, args=(self._listener,), name="holdfast-serve", daemon=True
        ).start()
        return at

    def close(self) -> None:
        """Stop listening and close all open connections."""
        self._closing.set()
        with self._lines_lock:
            lines = list(self._lines)
        for sock in (self._listener, *lines):
            if sock is not None:
                _shut(sock)

    def _accept(self, listener: socket.socket) -> None:
        while not self._closing.is_set():
            try:
                self._admit(listener.accept()[0])
                self._strangers.accepted()
            except (OSError, RuntimeError) as error:  # no descriptor or thread is left, or the client is gone
                if not self._closing.is_set():
                    for stranger in self._strangers.refused(error):
                        self._drop(stranger)
                self._closing.wait(ACCEPT_AGAIN_S)

    def _admit(self, sock: socket.socket) -> None:
        with self._lines_lock:
            self._lines.add(sock)
        for stranger in self._strangers.admit(sock, sock.fileno()):
            self._drop(stranger)
            if stranger is sock:
                return
        try:
            threading.Thread(target=self._serve, args=(sock,), name="holdfast-serve", daemon=True).start()
        except RuntimeError:
            self._drop(sock)
            raise
        if self._closing.is_set():  # close() may have copied ``_lines`` before this connection was added
            _shut(sock)

    def _drop(self, sock: socket.socket) -> None:
        with self._lines_lock:
            self._lines.discard(sock)
        self._strangers.release(sock)
        _shut(sock)

    def _serve(self, sock: socket.socket) -> None:
        nonce = os.urandom(NONCE_SIZE_BYTES)
        link = Link(self._codec, self._secret, nonce, service=self._service, role=None, refused=self.refused)
        try:
            tune(sock)
            stranger, deadline_s = True, time.monotonic() + HANDSHAKE_TIMEOUT_S
            sock.settimeout(HANDSHAKE_TIMEOUT_S)
            sock.sendall(link.take_output())
            while data := sock.recv(RECEIVE_SIZE_BYTES):
                messages = link.receive(data)
                if stranger:
                    stranger = not link.open
                    sock.settimeout(self._patience_s(sock, link, deadline_s))
                for message in messages:
                    answer, raw = self._answer(message)
                    link.send(answer)
                    sock.sendall(link.take_output())
                    if raw:
                        _send(sock, raw, link)
                sock.sendall(link.take_output())
        except ProtocolError:
            with contextlib.suppress(OSError):
                sock.sendall(link.take_output())  # the reason why a stranger is refused
        except OSError:
            pass  # the client is gone
        finally:
            self._drop(sock)

    def _patience_s(self, sock: socket.socket, link: Link[M], deadline_s: float) -> float:
        """Return the seconds within which the next bytes of a connection must arrive.

        The whole handshake has one deadline, so a stranger that sends byte by byte gains no time.
        """
        if link.open:
            self._strangers.release(sock)
            return TIMEOUT_S
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no handshake in time")
        return left_s


def _send(sock: socket.socket, batch: Sequence[memoryview], link: Link[M]) -> None:
    """Send raw bytes and then their authentication tag, in parts of ``PART_SIZE_BYTES``."""
    sealed = link.seal_batch(local=is_local(sock))
    for view in batch:
        for start in range(0, len(view), PART_SIZE_BYTES):
            sock.sendall(sealed.seal(view[start : start + PART_SIZE_BYTES]))
    sock.sendall(sealed.tag())


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # not connected, or closed already
    sock.close()
