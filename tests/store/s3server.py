"""A real S3 server on loopback (moto, in its own process), and a proxy that damages the traffic."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest

from holdfast.runtime.node.spawn import free_port

START_S = 60.0
DENIED = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
long = pytest.mark.skipif("HOLDFAST_S3" not in os.environ, reason="make s3")
SECRET = "marked-SECRET-4f1c"
ACCESS = "marked-ACCESS-77ab"


@contextlib.contextmanager
def server() -> Iterator[str]:
    """Yield the URL of a new server."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                with urllib.request.urlopen(f"{url}/moto-api/"):
                    break
            except OSError:
                assert time.monotonic() < deadline_s and process.poll() is None, "the server does not start"
                time.sleep(0.05)
        yield url
    finally:
        process.kill()
        process.wait()


def make_bucket(url: str, name: str) -> None:
    """Make a bucket."""
    with urllib.request.urlopen(urllib.request.Request(f"{url}/{name}", method="PUT")) as reply:
        assert reply.status == 200


def reset(url: str) -> None:
    """Remove all buckets and objects."""
    with urllib.request.urlopen(urllib.request.Request(f"{url}/moto-api/reset", method="POST")) as reply:
        assert reply.status == 200


def environment(url: str, retry_s: float = 60.0) -> dict[str, str]:
    """Return the environment that a client of the server at ``url`` needs."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": ACCESS,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "HOLDFAST_S3_RETRY_S": str(retry_s),
    }


class Proxy:
    """A proxy that passes bytes to a server; a context manager.

    Attributes:
        replace: bytes to write in place of other bytes of requests (of the same length).
        answers: cut this number of connections in the middle of their answer, after ``after_size_bytes``.
        delay_s: wait before each piece of a request is passed on.
        read_only: answer every PUT with 403.
        passed_size_bytes: of all requests so far.
    """

    def __init__(self, url: str) -> None:
        self._server = int(url.rpartition(":")[2])
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.replace = (b"", b"")
        self.answers = 0
        self.after_size_bytes = 0
        self.delay_s = 0.0
        self.read_only = False
        self.passed_size_bytes = 0
        self._listener: socket.socket | None = None
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Proxy:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()
        for thread in self._threads:
            thread.join()

    def up(self) -> None:
        """Start to listen."""
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=64)
        self._start(self._accept, self._listener)

    def down(self) -> None:
        """Cut every connection and stop listening."""
        listener, self._listener = self._listener, None
        for one in (*([listener] if listener else []), *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        if listener:
            listener.close()

    def turn_away(self) -> None:
        """Refuse one client while the proxy is down, and return after that."""
        with socket.create_server(("127.0.0.1", self.port)) as listener:
            listener.settimeout(START_S)
            client, _ = listener.accept()
            with client:  # reset, not closed in order
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._server)) as behind:
            self._open |= {client, behind}
            try:
                self._pass(client, behind)
            except OSError:
                return  # one end has closed, or was cut
            finally:
                self._open -= {client, behind}

    def _pass(self, client: socket.socket, behind: socket.socket) -> None:
        answered = 0
        while True:
            ready, _, _ = select.select([client, behind], [], [], 60)
            for one in ready:
                data = one.recv(65536)
                if not data:
                    return
                if one is client:
                    answered = 0
                    if self.read_only and data.startswith(b"PUT "):
                        client.sendall(DENIED)
                        return
                    time.sleep(self.delay_s)
                    self.passed_size_bytes += len(data)
                    behind.sendall(data.replace(*self.replace) if self.replace[0] else data)
                    continue
                answered += len(data)
                if self.answers and answered > self.after_size_bytes:
                    self.answers -= 1
                    return
                client.sendall(data)


def refusing(answer: bytes) -> tuple[str, socket.socket]:
    """Start a server that answers every request with 403 and this body, until its socket is closed."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client, contextlib.suppress(OSError):
                client.recv(65536)
                head = f"HTTP/1.1 403 Forbidden\r\nContent-Length: {len(answer)}\r\nConnection: close\r\n\r\n"
                client.sendall(head.encode() + answer)

    threading.Thread(target=serve, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}", listener
