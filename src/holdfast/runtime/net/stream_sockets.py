"""Listening and connecting sockets: the only module that distinguishes TCP from Unix sockets.

Theory. If all processes of a run are on one host, they listen at Unix sockets in a private directory. No process of
another user and no other host reaches these sockets. The path of a socket has at most 107 bytes. A longer path is
given through a descriptor of its directory. A socket is bound under a temporary name and then renamed. The rename
replaces the socket of a killed process in one step, and a socket listens before its name exists.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from holdfast.errors import UsageError
from holdfast.runtime.net.addresses import Address, family_of, is_loopback
from holdfast.runtime.net.connection_limits import BACKLOG

if TYPE_CHECKING:
    import asyncio

PATH_SIZE_BYTES_MAX = 107
USER_TIMEOUT_MS = 5_000
THIN_LINEAR_TIMEOUTS = (
    16  # TCP_THIN_LINEAR_TIMEOUTS: lost packets are repeated every 0.2 s, without growing pauses
)
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_COUNT = 2, 1, 3
P = TypeVar("P", bound="asyncio.BaseProtocol")
FULL_AGAIN_S = 0.01
"""Seconds between two attempts to connect to a Unix socket with a full backlog. The kernel refuses these at once."""


def is_private(directory: Path) -> bool:
    """Return True if ``directory`` belongs to this user and no other user may enter it.

    Return False for a symbolic link.

    Raises:
        FileNotFoundError: the directory does not exist.
    """
    about = directory.lstat()
    mine = about.st_uid == os.geteuid() and not stat.S_IMODE(about.st_mode) & 0o077
    return mine and stat.S_ISDIR(about.st_mode)


def listen(at: Address) -> tuple[socket.socket, Address]:
    """Return a socket that listens at ``at``, and its address. Port 0 means any free port.

    Raises:
        OSError: the address is not one of this machine, or the port is taken.
        UsageError: the directory of a socket path is not private, or no socket can be made in it.
    """
    if at.is_path:
        return _listen_at_path(Path(at.host)), at
    sock = socket.create_server((at.host, at.port), family=_family(at), backlog=BACKLOG)
    return sock, Address(at.host, int(sock.getsockname()[1]))


def dial(at: Address, timeout_s: float) -> socket.socket:
    """Return a socket that is connected to ``at``.

    Raises:
        OSError: no process listens there, or it does not accept the connection in time (``TimeoutError``).
    """
    if not at.is_path:
        return socket.create_connection(at, timeout_s)
    deadline_s = time.monotonic() + timeout_s
    while (sock := _dialled_path(Path(at.host))) is None:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the backlog of {at} is full")
        time.sleep(FULL_AGAIN_S)
    sock.settimeout(timeout_s)
    return sock


async def dial_protocol(make: Callable[[], P], at: Address) -> P:
    """Connect to ``at``, and return the asyncio protocol that ``make`` creates. There is no time limit here.

    Raises:
        OSError: no process listens there.
    """
    import asyncio  # here: a launcher has no event loop

    loop = asyncio.get_running_loop()
    if not at.is_path:
        return (await loop.create_connection(make, at.host, at.port))[1]
    while True:
        sock = _dialled_path(Path(at.host))
        if sock is not None:
            return (await loop.create_connection(make, sock=sock))[1]
        await asyncio.sleep(FULL_AGAIN_S)


def tune(sock: socket.socket) -> None:
    """Set a TCP socket to send without delay, and to notice a dead or unreachable peer within about five seconds.

    A Unix socket is not changed, because the kernel closes it when its process ends.
    """
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
    sock.setsockopt(socket.IPPROTO_TCP, THIN_LINEAR_TIMEOUTS, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_COUNT)


def is_local(sock: socket.socket) -> bool:
    """Return True if both ends of a connection are on this host: a Unix socket, or TCP over loopback."""
    if sock.family == socket.AF_UNIX:
        return True
    return is_loopback(str(sock.getpeername()[0])) and is_loopback(str(sock.getsockname()[0]))


def _family(at: Address) -> socket.AddressFamily:
    """Return the address family with which to listen at ``at``. A host name that has an IPv4 address gives IPv4."""
    if ":" in at.host or any(each[0] == socket.AF_INET for each in socket.getaddrinfo(at.host, at.port)):
        return family_of(at.host)
    return socket.AF_INET6


def _listen_at_path(path: Path) -> socket.socket:
    if not is_private(path.parent):
        raise UsageError(
            f"{path.parent} is not a private directory of this user: no socket is made there",
            hint=f"chmod 700 {path.parent}, or start the run as its owner",
        )
    new = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    sock = socket.socket(socket.AF_UNIX)
    try:
        with _short(new) as name:
            sock.bind(name)
        sock.listen(BACKLOG)
        new.replace(path)
    except OSError as error:
        sock.close()
        with suppress(OSError):
            new.unlink()
        raise UsageError(
            f"no socket can be made in {path.parent}: {error.strerror or error}",
            hint="where /dev/shm can be written, or --run-dir on a file system that takes sockets",
        ) from error
    return sock


def _dialled_path(path: Path) -> socket.socket | None:
    """Return a non-blocking connection to a Unix socket, or None if the backlog is full. Raises: OSError."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.setblocking(False)
        with _short(path) as name:
            sock.connect(name)
    except BlockingIOError:
        sock.close()
        return None
    except BaseException:
        sock.close()
        raise
    return sock


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield a name of ``path`` that is short enough for the address of a Unix socket."""
    if len(os.fsencode(path)) <= PATH_SIZE_BYTES_MAX:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
