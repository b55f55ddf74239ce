"""A small server of questions and answers for processes of the same run: a thread per line, one answer per question.

Large data follows an answer on the line as it lies in memory: no frame, no copy.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Generic, TypeVar

from holdfast.errors import ProtocolError
from holdfast.runtime.channel import RECEIVE_SIZE_BYTES, tune
from holdfast.wire import NONCE_SIZE_BYTES, Codec, Link

TIMEOUT_S = 30.0
M = TypeVar("M")


class AnswerServer(ABC, Generic[M]):
    """Listens, checks who asks, and answers.

    Args:
        codec: of questions and answers.
        token: of the run.
    """

    def __init__(self, codec: Codec[M], token: bytes) -> None:
        self._codec = codec
        self._token = token
        self._listener: socket.socket | None = None
        self._peers: set[socket.socket] = set()

    @abstractmethod
    def _answer(self, message: M) -> tuple[M, Sequence[memoryview]]:
        """The answer, and what follows it on the line as raw bytes. In the thread of the line."""

    def start(self, host: str) -> int:
        """Listen on ``host``; returns the port."""
        self._listener = socket.create_server((host, 0))
        threading.Thread(
            target=self._accept, args=(self._listener,), name="holdfast-serve", daemon=True
        ).start()
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Stop; lines under way are cut."""
        for sock in (self._listener, *self._peers):
            if sock is not None:
                _shut(sock)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return  # closed
            self._peers.add(sock)
            threading.Thread(target=self._serve, args=(sock,), name="holdfast-serve", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        link = Link(self._codec, self._token, os.urandom(NONCE_SIZE_BYTES), role=None, refused=Counter())
        try:
            tune(sock)
            sock.settimeout(TIMEOUT_S)
            sock.sendall(link.take_output())
            while data := sock.recv(RECEIVE_SIZE_BYTES):
                for message in link.receive(data):
                    answer, raw = self._answer(message)
                    link.send(answer)
                    sock.sendall(link.take_output())
                    for view in raw:
                        sock.sendall(view)
                sock.sendall(link.take_output())
        except ProtocolError:
            with contextlib.suppress(OSError):
                sock.sendall(link.take_output())  # why a stranger is refused
        except OSError:
            pass  # whoever asked is gone
        finally:
            self._peers.discard(sock)
            sock.close()


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # not connected, or closed already
    sock.close()
