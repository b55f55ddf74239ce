"""On which network interface the workers' own communication listens.

Neither gloo nor NCCL checks who connects, so on one host both stay on loopback, and with several hosts on the network
that the agents use. Left alone, gloo takes the address that the host's name means, and NCCL any interface that is up.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from fcntl import ioctl
from pathlib import Path

import msgspec

from holdfast.runtime.settings import RunSettings

GLOO, NCCL, NCCL_FAMILY = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY"
LOOPBACK = "127.0.0.1"
SIOCGIFADDR = 0x8915
ADDRESSES = Path("/proc/net/if_inet6")


def with_interfaces(settings: RunSettings) -> RunSettings:
    """``settings`` with the interface of gloo and of NCCL in the environment of workers, where the user names none."""
    name = interface_of(settings.bind if settings.several else LOOPBACK)
    # NCCL takes a name for a prefix, eth1 for eth10 too, unless it follows an equals sign.
    ours = {GLOO: name, NCCL: f"={name}"} if name else {}
    if settings.several and ":" in settings.bind:
        ours[NCCL_FAMILY] = "AF_INET6"
    unset = {key: value for key, value in ours.items() if key not in os.environ}
    return msgspec.structs.replace(settings, env={**unset, **settings.env})


def interface_of(address: str) -> str:
    """Name of the network interface that has this address, empty when none has."""
    wanted = ipaddress.ip_address(address).packed
    if len(wanted) == 16:
        return _interface_of(wanted)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                found = ioctl(sock, SIOCGIFADDR, name.encode()[:15].ljust(256, b"\0"))
            except OSError:  # it has no IPv4 address
                continue
            if found[20:24] == wanted or (name == "lo" and wanted[0] == 127):
                return name
    return ""


def _interface_of(wanted: bytes) -> str:
    """The same for 16 bytes of an IPv6 address; a kernel without IPv6 has no such file."""
    try:
        lines = ADDRESSES.read_text().splitlines()
    except FileNotFoundError:
        return ""
    return next((words[5] for words in map(str.split, lines) if bytes.fromhex(words[0]) == wanted), "")
