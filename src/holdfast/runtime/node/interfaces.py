"""The network interface at which gloo and NCCL listen in the workers.

Neither gloo nor NCCL checks the peer of a connection. So both are bound to loopback in a job of one host. In a job of
several hosts they are bound to the interface at which the agent listens. By default, gloo would take the address of the
host's name, and NCCL any interface that is up.
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
"""The ioctl that lists every IPv4 address with its interface. SIOCGIFADDR gives only the first address of each."""
CONF = struct.Struct("iP")  # size in bytes of the list, and its address
ENTRY_SIZE_BYTES, NAME_SIZE_BYTES = 40, 16
ADDRESS = slice(NAME_SIZE_BYTES + 4, NAME_SIZE_BYTES + 8)
ENTRIES_MAX = 4096
ADDRESSES = Path("/proc/net/if_inet6")


def with_interfaces(settings: RunSettings) -> RunSettings:
    """Return ``settings`` with the interface for gloo and NCCL in the worker environment, unless the user names one."""
    name = interface_of(settings.bind if settings.several else LOOPBACK)
    # NCCL takes a name as a prefix (eth1 matches eth10), unless an equals sign precedes it.
    ours = {GLOO: name, NCCL: f"={name}"} if name else {}
    if settings.several and ":" in settings.bind:
        ours[NCCL_FAMILY] = "AF_INET6"
    unset = {key: value for key, value in ours.items() if key not in os.environ}
    return msgspec.structs.replace(settings, env={**unset, **settings.env})


def interface_of(address: str) -> str:
    """Return the name of the network interface that has IP address ``address``; empty if none has it."""
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
    """Return the interface that has a 16-byte IPv6 address; empty if none has it or the kernel has no IPv6."""
    try:
        lines = ADDRESSES.read_text().splitlines()
    except FileNotFoundError:
        return ""
    return next((words[5] for words in map(str.split, lines) if bytes.fromhex(words[0]) == wanted), "")
