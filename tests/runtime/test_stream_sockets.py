"""Unix sockets in a private directory: listen and connect, with paths of any length and after a killed process."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from holdfast.errors import UsageError
from holdfast.runtime.net.addresses import LOOPBACK, Address
from holdfast.runtime.net.stream_sockets import (
    PATH_SIZE_BYTES_MAX,
    dial,
    dial_protocol,
    is_local,
    is_private,
    listen,
)
from holdfast.runtime.node.rundir import RunDir
from tests.runtime.runs import BOUND_S


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """Make a directory that only this user may enter."""
    found = tmp_path / "private"
    found.mkdir(mode=0o700)
    return found


def exchanged(listener: socket.socket, at: Address) -> bytes:
    """Connect to ``at``. Return what the server reads from the client."""
    with dial(at, BOUND_S) as client, listener.accept()[0] as server:
        assert is_local(client) and is_local(server)
        client.sendall(b"word")
        return server.recv(16)


@pytest.mark.parametrize("length", [4, PATH_SIZE_BYTES_MAX, 200])
def test_a_socket_has_a_path_of_any_length(private: Path, length: int) -> None:
    """Regression: a path of more than 107 bytes was an error of the system."""
    directory = private / ("d" * max(1, length - len(os.fsencode(private)) - 4))
    directory.mkdir(mode=0o700)
    listener, at = listen(Address(str(directory / "s")))
    with listener:
        assert at == Address(str(directory / "s")) and at.is_path and str(at) == at.host
        assert exchanged(listener, at) == b"word"
    assert os.listdir(directory) == ["s"], "nothing of a temporary name is left"


def test_a_port_is_chosen_where_none_is_given() -> None:
    listener, at = listen(LOOPBACK)
    with listener:
        assert at.port and not at.is_path and str(at) == f"127.0.0.1:{at.port}"
        assert exchanged(listener, at) == b"word"


def test_the_socket_of_a_killed_process_is_replaced(private: Path) -> None:
    at = Address(str(private / "agent"))
    listen(at)[0].close()  # as a kill does: the file stays
    with pytest.raises(ConnectionRefusedError):
        dial(at, 1.0)
    first, _ = listen(at)
    second, _ = listen(at)
    with first, second:
        assert exchanged(second, at) == b"word"


def test_a_socket_that_is_gone_is_an_error_of_the_system(private: Path) -> None:
    at = Address(str(private / "agent"))
    with pytest.raises(FileNotFoundError):
        dial(at, 1.0)
    with pytest.raises(FileNotFoundError):
        asyncio.run(dial_protocol(asyncio.Protocol, at))


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_a_directory_that_others_may_enter_is_refused(private: Path, mode: int) -> None:
    private.chmod(mode)
    with pytest.raises(UsageError, match="is not a private directory") as refused:
        listen(Address(str(private / "agent")))
    assert f"chmod 700 {private}" in refused.value.hint and not os.listdir(private)


def test_a_link_is_no_private_directory(private: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(private)
    assert is_private(private) and not is_private(tmp_path / "link")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a directory away")
def test_a_directory_of_another_user_is_refused(private: Path) -> None:
    os.chown(private, 12345, -1)
    with pytest.raises(UsageError, match="is not a private directory"):
        listen(Address(str(private / "agent")))


class Unable(socket.socket):
    """A socket on a file system that does not support sockets."""

    def bind(self, address: object) -> None:
        """Fail as on such a file system."""
        raise OSError(95, "Operation not supported")


def test_a_file_system_without_sockets_is_named(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.runtime.net.stream_sockets.socket.socket", Unable)
    with pytest.raises(UsageError, match=f"no socket can be made in {private}: Operation not") as refused:
        listen(Address(str(private / "agent")))
    assert "--run-dir" in refused.value.hint


def test_a_run_whose_directory_takes_no_sockets_is_refused_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, pages = RunDir(tmp_path / "run"), list[Path]()
    made = run.pages

    def noted() -> Path:
        pages.append(made())
        return pages[-1]

    monkeypatch.setattr("holdfast.runtime.net.stream_sockets.socket.socket", Unable)
    monkeypatch.setattr(run, "pages", noted)
    with pytest.raises(UsageError, match="no socket can be made in /"):
        run.create()
    assert pages and not pages[0].exists() and not run.path.exists(), "nothing was begun"


@pytest.fixture
def full(private: Path) -> Iterator[tuple[socket.socket, Address, ExitStack]]:
    """Yield a listener that accepts nothing, and the connections that fill its backlog."""
    listener, at = listen(Address(str(private / "agent")))
    listener.listen(0)
    with listener, ExitStack() as waiting:
        waiting.enter_context(dial(at, 1.0))
        yield listener, at, waiting


def test_a_full_backlog_is_a_wait(full: tuple[socket.socket, Address, ExitStack]) -> None:
    """The kernel refuses such a connection at once. Regression: asyncio took it for an open one."""
    listener, at, _ = full
    with pytest.raises(TimeoutError, match="backlog"):
        dial(at, 0.05)
    made = threading.Event()

    async def scenario() -> None:
        dialling = asyncio.create_task(dial_protocol(Noted, at))
        await asyncio.sleep(0)
        assert not dialling.done()
        made.set()
        await asyncio.wait_for(dialling, BOUND_S)

    class Noted(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transport.close()

    def take() -> None:
        made.wait(BOUND_S)
        listener.accept()[0].close()

    taker = threading.Thread(target=take)
    taker.start()
    asyncio.run(scenario())
    taker.join(BOUND_S)
