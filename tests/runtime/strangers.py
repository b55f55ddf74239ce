"""Connections of processes that do not belong to the run: silent, slow (a byte at a time) and half closed."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Iterator

import pytest

from holdfast.runtime.net.addresses import Address
from holdfast.runtime.net.stream_sockets import dial

COUNT = 400
LIMIT = 256
"""Descriptors of a process among so many strangers."""


@contextlib.contextmanager
def many_files() -> Iterator[None]:
    """Let this process open as many files as its hard limit allows."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < 5 * COUNT:
        pytest.skip(f"at most {before[1]} open files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Crowd:
    """``COUNT`` foreign connections at each of some addresses; a context manager."""

    def __init__(self, *addresses: Address) -> None:
        self._addresses = addresses
        self._all: list[socket.socket] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Crowd:
        with self._stack:
            for address in self._addresses:
                for number in range(COUNT):
                    self._all.append(self._stack.enter_context(dial(address, 10)))
                    self._all[-1].setblocking(False)
                    self._act(number)
            self._stack = self._stack.pop_all()
        return self

    def _act(self, number: int) -> None:
        with contextlib.suppress(OSError):  # the connection was cut
            if number % 3 == 1:
                self._all[-1].send(b"\0")
            elif number % 3 == 2:
                self._all[-1].shutdown(socket.SHUT_WR)

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def drip(self) -> None:
        """Send one more byte on each slow connection."""
        for sock in self._all[1::3]:
            with contextlib.suppress(OSError):
                sock.send(b"\0")
