"""On which network interface the workers' own communication listens.

Neither gloo nor NCCL checks who connects, so on one host both stay on loopback, and with several hosts on the network
that the agents use. Left alone, gloo takes the address that the host's name means, and NCCL any interface that is up.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import struct
from fcntl import ioctl
from pathlib import Path

import msgspec

from holdfast.runtime.node.run_settings import RunSettings

GLOO, NCCL, NCCL_FAMILY = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY"
LOOPBACK = "127.0.0.1"
SIOCGIFCONF = 0x8912
"""Lists every IPv4 address with its interface; SIOCGIFADDR gives the first address of each alone."""
CONF = struct.Struct("iP")  # size in bytes of the list, where it is
ENTRY_SIZE_BYTES, NAME_SIZE_BYTES = 40, 16
ADDRESS = slice(NAME_SIZE_BYTES + 4, NAME_SIZE_BYTES + 8)
ENTRIES_MAX = 4096
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
    if wanted[0] == 127:
        return "lo"
    entries = ctypes.create_string_buffer(ENTRIES_MAX * ENTRY_SIZE_BYTES)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        asked = CONF.pack(len(entries), ctypes.addressof(entries))
        size_bytes, _ = CONF.unpack(ioctl(sock, SIOCGIFCONF, asked))
    for start in range(0, size_bytes, ENTRY_SIZE_BYTES):
        entry = entries.raw[start : start + ENTRY_SIZE_BYTES]
        if entry[ADDRESS] == wanted:
            label = entry[:NAME_SIZE_BYTES].partition(b"\0")[0].decode()
            return label.partition(":")[0]
    return ""


def _interface_of(wanted: bytes) -> str:
    """The same for 16 bytes of an IPv6 address; a kernel without IPv6 has no such file."""
    try:
        lines = ADDRESSES.read_text().splitlines()
    except FileNotFoundError:
        return ""
    return next((words[5] for words in map(str.split, lines) if bytes.fromhex(words[0]) == wanted), "")
