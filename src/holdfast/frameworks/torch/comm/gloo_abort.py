"""The abort of gloo's collectives: gloo's connected sockets are identified and shut down from any thread.

gloo's ``abort()`` does nothing. But a blocked collective ends at once when its sockets are shut down, even if the peer
is only stopped. The candidates are the sockets that the process opened while the backend was made. Another thread may
have opened some of them. So a candidate counts only if one of its two ends is a listener of gloo, here or at a peer;
the ranks exchange the ports of their listeners. Listeners are not shut down: gloo ends the process if one fails.

While gloo connects there is nothing to shut down: it dials a lost peer, or waits to be dialled, until its time-out. So
gloo connects in a separate thread, which is abandoned if a fault comes first.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

from holdfast.errors import GroupError
from holdfast.frameworks.torch.private_api import Backend, Store

STOP_POLL_S = 0.02


class Endpoints:
    """The connected sockets of one gloo backend.

    They are duplicates, because gloo may close its own descriptor and another file may then get the same number.
    """

    def __init__(self, sockets: list[socket.socket]) -> None:
        self._sockets = sockets
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._sockets)

    def shutdown(self) -> None:
        """Shut down every connection, in both directions. Idempotent."""
        with self._lock:
            for sock in self._sockets:
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:  # already closed by gloo or by the peer
                    continue

    def close(self) -> None:
        """Close the duplicates; gloo's own descriptors stay open."""
        with self._lock:
            for sock in self._sockets:
                sock.close()
            self._sockets.clear()


class Recorder:
    """A context manager around the building of a gloo backend that finds the backend's sockets.

    Use: build the backend inside ``with Recorder() as made:``, then call :meth:`endpoints`. It takes no lock, because a
    lock around a blocking rendezvous could deadlock two ranks. Two threads that build at the same time each hold the
    sockets of both groups. That is harmless, because a poison shuts down all of them.
    """

    def __enter__(self) -> Recorder:
        self._before = set(_socket_inodes())
        self._new: list[int] = []
        return self

    def __exit__(self, *exc: object) -> None:
        self._new = [fd for inode, fd in _socket_inodes().items() if inode not in self._before]

    def endpoints(self, store: Store, rank: int, world_size: int) -> Endpoints:
        """Return duplicates of the connections that gloo made.

        Args:
            store: a store that all members reach; each rank sets one key, the ports of its listeners.
            rank, world_size: rank in this group, and its size.
        """
        if world_size == 1:
            return Endpoints([])
        listeners, connected = _sort([_duplicate(fd) for fd in self._new])
        own = {_port(sock.getsockname()) for sock in listeners}
        for sock in listeners:
            sock.close()
        store.set(f"ports/{rank}", ",".join(map(str, sorted(own))))
        accepted = [s for s in connected if _port(s.getsockname()) in own]
        unknown = [s for s in connected if s not in accepted]
        if not unknown:
            return Endpoints(accepted)
        theirs = {
            int(port)
            for peer in range(world_size)
            if peer != rank
            for port in store.get(f"ports/{peer}").decode().split(",")
            if port
        }
        dialled: list[socket.socket] = []
        for sock in unknown:
            if _peer_port(sock) in theirs:
                dialled.append(sock)
            else:
                sock.close()
        return Endpoints(accepted + dialled)


def connect(make: Callable[[], Backend], stop: Callable[[], str]) -> Backend:
    """Return the result of ``make``, run in a separate thread, unless ``stop`` returns a reason first.

    After a stop the thread is abandoned; it ends at gloo's time-out at the latest. Its result or error is ignored,
    because no caller waits for that group.

    Raises:
        GroupError: ``stop`` has returned a reason.
    """
    made: list[Backend] = []
    failed: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        try:
            made.append(make())
        except BaseException as error:
            failed.append(error)
        ended.set()

    threading.Thread(target=run, name="holdfast-connect", daemon=True).start()
    while not ended.wait(STOP_POLL_S):
        if reason := stop():
            raise GroupError(f"connecting to peers was stopped: {reason}")
    if failed:
        raise failed[0]
    return made[0]


def _socket_inodes() -> dict[str, int]:
    """Return the file descriptor of every socket of this process, by the link target in /proc (``socket:[inode]``)."""
    found: dict[str, int] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # closed between the listing and now
            continue
        if link.startswith("socket:"):
            found[link] = int(name)
    return found


def _duplicate(fd: int) -> socket.socket | None:
    try:
        return socket.socket(fileno=os.dup(fd))
    except OSError:  # closed since it was listed
        return None


def _sort(found: list[socket.socket | None]) -> tuple[list[socket.socket], list[socket.socket]]:
    """Return the listening and the connected TCP sockets among ``found``; close its other sockets."""
    listeners: list[socket.socket] = []
    connected: list[socket.socket] = []
    for sock in found:
        if sock is None:
            continue
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
            sock.close()
        elif sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            listeners.append(sock)
        else:
            connected.append(sock)
    return listeners, connected


def _port(address: tuple[object, ...]) -> int:
    return int(str(address[1]))


def _peer_port(sock: socket.socket) -> int:
    try:
        return _port(sock.getpeername())
    except OSError:  # not connected, or gone already
        return 0
