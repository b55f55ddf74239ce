"""Limits of a listener for strangers: connections that have not yet proved that they know the secret of the run.

Theory. Any process that reaches a port can open connections to it and send nothing. A stranger may hold one descriptor
for at most ``HANDSHAKE_TIMEOUT_S`` seconds. All strangers together may use only a share of the descriptors that the
process may open, and the last ``RESERVE`` descriptors are kept for the process itself. If there are too many strangers,
the oldest one is closed. This is safe, because a process of the run proves the secret within milliseconds. A connection
that cannot be accepted causes only a line in the log.
"""

from __future__ import annotations

import logging
import resource
import threading
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

log = logging.getLogger("holdfast")

HANDSHAKE_TIMEOUT_S = 10.0
STRANGERS_MAX = 1024
SHARE = 8
"""The strangers of one listener may use at most one descriptor in ``SHARE``."""
RESERVE = 32
LIMIT_MAX = 1 << 20
"""Soft limit of descriptors if there is no hard limit. It is finite, because some programs close all descriptors."""
BURST = 16
"""Connections that are accepted in one go, before surplus connections are closed."""
BACKLOG = 1024
"""Connections that the kernel queues until they are accepted."""
ACCEPT_AGAIN_S = 0.1

S = TypeVar("S", bound=Hashable)


def raise_limit() -> None:
    """Raise the soft limit of open files to the hard limit. Processes that this process starts inherit the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = LIMIT_MAX if hard == resource.RLIM_INFINITY else min(hard, LIMIT_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def is_accept(context: dict[str, Any]) -> bool:
    """Return True if the ``context`` of an event loop's exception handler is about a connection that was not accepted.

    Causes are a lack of descriptors or an error of the network.
    """
    return isinstance(context.get("exception"), OSError) and "accept" in str(context.get("message"))


class ConnectionLimits(Generic[S]):
    """The strangers (connections not yet authenticated) of one listener, oldest first. The class is thread-safe.

    Args:
        most: largest number of strangers. The limit is lower if the process may not open enough files.
    """

    def __init__(self, most: int = STRANGERS_MAX) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._here: dict[S, None] = {}
        self._told = False

    def __len__(self) -> int:
        return len(self._here)

    def admit(self, stranger: S, fd: int) -> list[S]:
        """Add a stranger with the descriptor ``fd``.

        Return the strangers above the limit, which the caller has to close.
        """
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        limit = LIMIT_MAX if limit == resource.RLIM_INFINITY else limit
        with self._lock:
            self._here[stranger] = None
            surplus = len(self._here) - max(1, min(self._most, limit // SHARE))
            if fd >= limit - RESERVE:  # the kernel gives the lowest free number, so all lower ones are in use
                surplus = max(surplus, 1 + len(self._here) // 2)
            return [self._pop() for _ in range(surplus)]

    def release(self, stranger: S) -> None:
        """Remove a stranger that has authenticated or is closed."""
        with self._lock:
            self._here.pop(stranger, None)

    def refused(self, error: BaseException) -> list[S]:
        """Handle a failure to accept a connection.

        Return the strangers that the caller has to close to free descriptors.

        Of several failures in a row only the first is logged.
        """
        with self._lock:
            if not self._told:
                log.warning("holdfast: cannot take a connection, trying on: %s", error)
            self._told = True
            return [self._pop() for _ in range((1 + len(self._here)) // 2)]

    def accepted(self) -> None:
        """Record that a connection was accepted. The next failure is then logged again."""
        self._told = False

    def _pop(self) -> S:
        oldest = next(iter(self._here))
        del self._here[oldest]
        return oldest
