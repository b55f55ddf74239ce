"""The secret that the controller of ``mindio_ttp`` and its ranks know: its file, and how it is read and written."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
from pathlib import Path

from holdfast.compat.dying_checkpoint import (
    Done,
    Faulted,
    Here,
    LeaveOrder,
    Rename,
    Renamed,
    Replicas,
    Saved,
    SaveParts,
    Stood,
    Stop,
)
from holdfast.errors import UsageError
from holdfast.runtime.net.stream_sockets import is_private
from holdfast.runtime.node.rundir import SHARED_MEMORY, TOKEN_SIZE_BYTES, read_token, write_private
from holdfast.wire import Codec

TOKEN_VARIABLE = "HOLDFAST_TTP_TOKEN_FILE"
LOG_VARIABLE = "HOLDFAST_TTP_LOG"
LOG_NAME = "ttp_controller.jsonl"
ROLE = "worker"

Message = Here | Replicas | Faulted | Stood | Saved | Renamed | Done | Stop | SaveParts | Rename | LeaveOrder
LINES: Codec[Message] = Codec(Message)  # type: ignore[arg-type]  # a union is no type[M]


def token_path(host: str, port: int) -> Path:
    """Return the path of the file of the secret.

    The user names the file in ``HOLDFAST_TTP_TOKEN_FILE``. Without this variable, and only for a loopback address, the
    file is a private file of this machine.

    Raises:
        UsageError: the host is unknown, or other machines can reach it and the user named no file.
    """
    named = os.environ.get(TOKEN_VARIABLE, "")
    if named:
        return Path(named)
    if not all(ipaddress.ip_address(address).is_loopback for address in _addresses(host)):
        raise UsageError(
            f"the TTP controller would listen at {host}, where other machines reach it, without a secret",
            hint=f"umask 077; openssl rand -hex 32 > token; export {TOKEN_VARIABLE}=token on every host",
        )
    home = SHARED_MEMORY / f"holdfast-ttp-{os.getuid()}"
    with contextlib.suppress(FileExistsError):  # is_private() below checks an existing path
        home.mkdir(mode=0o700)
    if not is_private(home):
        raise UsageError(
            f"{home} is not a private directory of this user", hint=f"remove it, or set {TOKEN_VARIABLE}"
        )
    return home / f"{port}.token"


def _addresses(host: str) -> set[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"the host {host!r} of the TTP controller is unknown: {error}",
            hint="give an address of this machine, or a name that it knows: getent hosts NAME",
        ) from error
    return {str(address[0]).partition("%")[0] for *_, address in found}


def make_token(host: str, port: int) -> Path:
    """Write a new secret into the private file, and return its path. If the user named a file, only return its path."""
    path = token_path(host, port)
    if TOKEN_VARIABLE not in os.environ:
        write_private(path, secrets.token_hex(TOKEN_SIZE_BYTES).encode())
    return path


def drop_token(path: Path, secret: bytes) -> None:
    """Remove the private secret file of a controller that ends.

    The user's file, or a file with another secret, stays.
    """
    if TOKEN_VARIABLE in os.environ:
        return
    with contextlib.suppress(FileNotFoundError):
        if path.read_bytes().strip() == secret:
            path.unlink()


def token(host: str, port: int) -> bytes:
    """Return the secret of the controller at ``host:port``.

    Raises:
        AuthError: the file of the secret is missing, readable by others, or too short.
    """
    return read_token(token_path(host, port))
