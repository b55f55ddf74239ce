"""Network addresses: their text forms, and the address at which a process listens.

In text, an IPv6 address is in brackets if a port follows: ``10.0.0.1:29500``, ``[fd00::2]:29500``. An address without
a port has no brackets. In the structures of this package, host and port are two fields, and the host has no brackets.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import NamedTuple

from holdfast.errors import UsageError


class Address(NamedTuple):
    """The address at which a process listens: host and port, or the absolute path of a Unix socket with port 0.

    Messages carry host and port as two fields. ``runtime/net/stream_sockets.py`` listens and connects at addresses.
    """

    host: str
    port: int = 0

    @property
    def is_path(self) -> bool:
        """True if the address is the path of a Unix socket, which only processes of this host reach."""
        return self.host.startswith("/")

    def __str__(self) -> str:
        return self.host if self.is_path else endpoint(self.host, self.port)


LOOPBACK = Address("127.0.0.1")
"""An address at which to listen with any free port, for processes of this host only."""


def family_of(address: str) -> socket.AddressFamily:
    """Return the address family of an IP address. A host name counts as IPv4."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def is_loopback(address: str) -> bool:
    """Return True if ``address`` is a loopback IP address. Return False for a host name."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name
        return False


def same_address(address: str) -> str:
    """Return the canonical spelling of an IP address. A host name is returned unchanged."""
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        return address


def endpoint(host: str, port: int) -> str:
    """Return ``host:port``. An IPv6 host is put in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_endpoint(text: str) -> Address:
    """Parse a text in the form of :func:`endpoint`, and return it as an address."""
    host, _, port = text.rpartition(":")
    return Address(host.strip("[]"), int(port))


def read_host(text: str, flag: str) -> str:
    """Return the host in ``text``, which the user gave to the command-line flag ``flag``.

    It is a host name or an IP address, without brackets.

    Raises:
        UsageError: ``text`` is neither a host name nor an IP address, or the address has a scope id.
    """
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    _refuse_scope(host, flag)
    if ":" in host or host != text:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise UsageError(
                f"{flag} {text} is neither a name nor an address",
                hint=f"{flag} HOST, without a port: host0, 10.0.0.1 or fd00::2",
            ) from None
    return host


def read_endpoint(text: str, flag: str, default_port: int) -> tuple[str, int]:
    """Return the host and the port in ``text``, which the user gave to the command-line flag ``flag``.

    Args:
        text: ``HOST``, ``HOST:PORT``, ``[ADDRESS]`` or ``[ADDRESS]:PORT``.
        flag: name of the command-line flag, for the error.
        default_port: the port if ``text`` has none.

    Raises:
        UsageError: ``text`` has another form: an IPv6 address without brackets, a scope id, or an invalid port.
    """
    if text.startswith("["):
        address, closed, rest = text[1:].partition("]")
        host, port = f"[{address}{closed}", rest.removeprefix(":") if rest else str(default_port)
        sound = bool(closed) and (not rest or rest.startswith(":"))
    else:
        host, colon, port = text.partition(":")
        port, sound = (port, ":" not in port) if colon else (str(default_port), True)
        if not sound:
            _refuse_scope(text, flag)
            raise UsageError(
                f"{flag} {text}: an IPv6 address stands in brackets before its port",
                hint=f"{flag} '{_in_brackets(text, default_port)}'",
            )
    if not sound or not port.isdecimal() or not 0 < int(port) <= 65535:
        raise UsageError(
            f"{flag} {text} is not of the form HOST:PORT",
            hint=f"for example 10.0.0.1:{default_port} or '[fd00::2]:{default_port}'",
        )
    return read_host(host, flag), int(port)


def _in_brackets(text: str, default_port: int) -> str:
    """Return the IPv6 endpoint that ``text`` probably means, with brackets; an example endpoint if there is none."""
    head, _, tail = text.rpartition(":")
    for address, port in ((text, str(default_port)), (head, tail)):
        try:
            return f"[{ipaddress.IPv6Address(address)}]:{port}"
        except ValueError:
            continue
    return f"[fd00::2]:{default_port}"


def _refuse_scope(text: str, flag: str) -> None:
    if "%" in text:
        raise UsageError(
            f"{flag} {text}: a scope id names an interface of one host, and means nothing on the others",
            hint="an address that all hosts reach: ip -6 addr show scope global",
        )


def address_towards(host: str, port: int) -> str:
    """Return the IP address of this host from which packets to ``host`` would leave. No packet is sent.

    Raises:
        OSError: there is no route, or the name is unknown.
    """
    with socket.socket(family_of(host), socket.SOCK_DGRAM) as sock:
        sock.connect((host, port))
        return str(sock.getsockname()[0])
