"""A network of several hosts on one machine. Its cables can be cut in one or both directions, or lose packets.

Every host is a network namespace with a TAP device. A thread copies the frames from each device to the others,
according to the state of the cables. ``tun`` is the only kernel module needed, and the loss rate is exact. The thread
can also delay, repeat and reorder frames, so a kernel without netem is enough.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
FRAME_SIZE_BYTES_MAX = 65536
OVERTAKEN_S = 0.05  # a frame that others overtake arrives so much later
NAMES = Path("/etc/netns")  # ip(8) mounts its files over those of /etc
_LIBC = ctypes.CDLL(None, use_errno=True)


def why_not() -> str:
    """Return the reason why this machine cannot have such a network, or an empty string."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "there is no /dev/net/tun"
    name = f"hf{os.getpid()}t"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if made.returncode:
        return f"ip netns add: {made.stderr.decode().strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


class Weather(NamedTuple):
    """The treatment of all frames that arrive."""

    delay_s: float = 0.0
    doubled: float = 0.0  # share of frames that arrive twice
    overtaken: float = 0.0  # share of frames that arrive after later ones


class Network:
    """A network of ``count`` hosts with the addresses 10.77.0.1 and following. Use it as a context manager."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self.names = [f"hf{os.getpid()}n{i}" for i in range(count)]
        self.loss: dict[tuple[int, int], float] = {}  # (from, to) -> share of frames that are lost
        self.weather = Weather()
        self.carried = self.dropped = 0
        self.recorded: list[bytes] | None = None  # all frames that were carried; None: they are not recorded
        self._taps: list[int] = []
        # A heap: time due, number of the frame, device, frame.
        self._late: list[tuple[float, int, int, bytes]] = []
        self._random = random.Random(seed)
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def __enter__(self) -> Network:
        for index, name in enumerate(self.names):
            _ip("netns", "add", name)
            self._taps.append(_tap_in(name))
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "addr", "add", f"{self.address(index)}/24", "dev", "tap0")
            _ip("-n", name, "link", "set", "tap0", "up")
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        os.write(self._stop_write, b"x")
        self._thread.join()
        for tap in (*self._taps, self._stop_read, self._stop_write):
            os.close(tap)
        for name in self.names:
            _ip("netns", "del", name)
            shutil.rmtree(NAMES / name, ignore_errors=True)

    @staticmethod
    def address(index: int) -> str:
        """Return the address of one host."""
        return f"10.77.0.{index + 1}"

    def on(self, index: int) -> list[str]:
        """Return the words before a command that make it run on this host."""
        return ["ip", "netns", "exec", self.names[index]]

    def know(self, index: int, *addresses: str) -> None:
        """Set the names that one host can resolve: ``first`` has these addresses."""
        place = NAMES / self.names[index]
        place.mkdir(parents=True, exist_ok=True)
        # Written in place, because running commands have this file mounted as their /etc/hosts.
        lines = ["127.0.0.1 localhost", *(f"{address} first" for address in addresses)]
        (place / "hosts").write_text("\n".join(lines) + "\n")

    def also_at(self, index: int, address: str) -> None:
        """Give one host a second address, in a network without other hosts."""
        _ip("-n", self.names[index], "addr", "add", f"{address}/24", "dev", "tap0")

    def cut(self, index: int, *, to_it: bool = True, from_it: bool = True) -> None:
        """Cut the cable of one host, in one or both directions."""
        self._set(index, 1.0, to_it=to_it, from_it=from_it)

    def mend(self, index: int) -> None:
        """Repair the cable of one host."""
        self._set(index, 0.0, to_it=True, from_it=True)

    def _set(self, index: int, loss: float, *, to_it: bool, from_it: bool) -> None:
        for other in range(len(self.names)):
            if from_it:
                self.loss[index, other] = loss
            if to_it:
                self.loss[other, index] = loss

    def part(self, one: int, other: int) -> None:
        """Cut the cable between two hosts, which both still reach all others."""
        self.loss[one, other] = self.loss[other, one] = 1.0

    def calm(self) -> None:
        """Repair all cables, and treat frames well."""
        self.loss, self.weather = {}, Weather()

    def lose(self, share: float) -> None:
        """Make every cable lose this share of its frames, in both directions."""
        count = range(len(self.names))
        self.loss = {(a, b): share for a in count for b in count}

    def _carry(self) -> None:
        poller = select.poll()
        for fd in (*self._taps, self._stop_read):
            poller.register(fd, select.POLLIN)
        while True:
            for fd, _ in poller.poll(self._until_due_ms()):
                if fd == self._stop_read:
                    return
                self._forward(self._taps.index(fd), os.read(fd, FRAME_SIZE_BYTES_MAX))

    def _forward(self, source: int, frame: bytes) -> None:
        for target, tap in enumerate(self._taps):
            if target == source:
                continue
            if self._random.random() < self.loss.get((source, target), 0.0):
                self.dropped += 1
                continue
            self.carried += 1
            if self.recorded is not None:
                self.recorded.append(frame)
            self._deliver(tap, frame)

    def _deliver(self, tap: int, frame: bytes) -> None:
        weather = self.weather
        for _ in range(1 + self._happens(weather.doubled)):
            wait_s = weather.delay_s + OVERTAKEN_S * self._happens(weather.overtaken)
            if wait_s:
                heapq.heappush(self._late, (time.monotonic() + wait_s, self.carried, tap, frame))
            else:
                os.write(tap, frame)

    def _happens(self, share: float) -> bool:
        return share > 0.0 and self._random.random() < share

    def _until_due_ms(self) -> float | None:
        """Deliver the late frames that are due. Return the time until the next one; None: there is none."""
        while self._late and self._late[0][0] <= time.monotonic():
            _, _, tap, frame = heapq.heappop(self._late)
            os.write(tap, frame)
        return max(1.0, 1000 * (self._late[0][0] - time.monotonic())) if self._late else None


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _tap_in(name: str) -> int:
    """Make a TAP device in a namespace. Return its descriptor in this process."""
    with inside(name):
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH", b"tap0", IFF_TAP | IFF_NO_PI))
        return fd


@contextmanager
def inside(name: str) -> Iterator[None]:
    """Put this thread into the network namespace of a host, in which the sockets that it makes stay."""
    with open("/proc/self/ns/net") as home, open(Path("/run/netns") / name) as there:
        _enter(there.fileno())
        try:
            yield
        finally:
            _enter(home.fileno())


def _enter(namespace: int) -> None:
    if _LIBC.setns(namespace, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns failed")
