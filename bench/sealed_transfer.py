"""Rate at which a rank gives its state to one newcomer, by the way of its transport.

``python -m bench.sealed_transfer [--size-mib 256] [--rounds 5]``: a server in its own process, one connection, the ways
in turn. Prints GB/s, and the CPU time of both ends, which other work on the machine changes less. ``unix socket`` and
``loopback`` carry a digest. ``plain``, ``authenticated`` and ``encrypted`` are TCP as between hosts: without any tag,
with HMAC-SHA256 and with AES-256-GCM.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from holdfast.core.ids import Generation
from holdfast.runtime.net import channel, request_server
from holdfast.runtime.net.addresses import LOOPBACK, Address
from holdfast.runtime.net.service_names import state_of
from holdfast.runtime.worker.state_transfer import StateServer, Wanted, fetch
from holdfast.sealing import BatchTag, FrameSeal, Secret
from holdfast.store.layouts.layout import Box

WAYS = ("unix socket", "loopback", "plain", "authenticated", "encrypted")
FIRST = Generation(1, 1)


class NoDigest:
    """A digest that does nothing, for the ways that only move bytes."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Do nothing."""

    def digest(self) -> bytes:
        """Return a constant digest."""
        return bytes(16)


def take_way(way: str) -> Secret:
    """Set up this process to send and receive in a way."""
    between_hosts = way in WAYS[2:]
    if between_hosts:
        vars(channel)["is_local"] = vars(request_server)["is_local"] = lambda sock: False
    if way == "plain":
        without = lambda self, *, local: BatchTag(NoDigest())  # noqa: E731
        setattr(FrameSeal, "seal_batch", without)  # noqa: B010
        setattr(FrameSeal, "open_batch", without)  # noqa: B010
    return Secret(b"t" * 32, encrypts=way == "encrypted")


def serve(way: str, size_bytes: int, at: Address) -> None:
    """Serve until the standard input ends."""
    data = memoryview(bytearray(size_bytes))
    server = StateServer(
        lambda fqn, box, start, stop: data[start:stop], b"", take_way(way), state_of(0, FIRST)
    )
    print(*server.start(at), flush=True)
    sys.stdin.read()


def rates(way: str, size_bytes: int, rounds: int) -> list[tuple[float, float]]:
    """Measure in a new process. Return GB/s, and CPU seconds of both ends per GiB, of each round."""
    words = [sys.executable, "-m", "bench.sealed_transfer", "--way", way]
    words += ["--size-mib", str(size_bytes >> 20), "--rounds", str(rounds)]
    said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    return [(float(rate), float(cpu_s)) for rate, cpu_s in map(str.split, said.splitlines())]


def cpu_s_of(pid: int) -> float:
    """Return the CPU time that a process has used, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(way: str, size_bytes: int, rounds: int) -> None:
    """Print GB/s and CPU seconds per GiB of each round."""
    with tempfile.TemporaryDirectory() as private:
        at = Address(str(Path(private) / "state")) if way == "unix socket" else LOOPBACK
        words = [sys.executable, "-m", "bench.sealed_transfer", "--serve", at.host, "--way", way]
        with subprocess.Popen(
            [*words, "--size-mib", str(size_bytes >> 20)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as server:
            assert server.stdout is not None and server.stdin is not None
            host, port = server.stdout.readline().split()
            secret, box, goal = take_way(way), Box((0,), (size_bytes,)), memoryview(bytearray(size_bytes))
            for _ in range(rounds):
                began_s, used_s = time.perf_counter(), time.process_time() + cpu_s_of(server.pid)
                fetch({0: Address(host, int(port))}, [Wanted("w", box, goal, (0,))], secret, FIRST)
                took_s = time.perf_counter() - began_s
                used_s = time.process_time() + cpu_s_of(server.pid) - used_s
                print(size_bytes / took_s / 1e9, used_s * 2**30 / size_bytes, flush=True)
            server.stdin.close()


def main() -> None:
    """Measure all ways in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--serve", default="")
    given = parser.parse_args()
    size_bytes = given.size_mib << 20
    if given.serve:
        serve(given.way, size_bytes, Address(given.serve))
    elif given.way:
        measure(given.way, size_bytes, given.rounds)
    else:
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for _ in range(given.rounds):
            for way in WAYS:
                found[way] += rates(way, size_bytes, 3)[1:]  # the first one touches the memory
        print(f"one holder, {given.size_mib} MiB, load {os.getloadavg()[0]:.1f}")
        for way, pairs in found.items():
            speeds, costs = zip(*pairs, strict=True)
            print(
                f"{way:14} GB/s median {statistics.median(speeds):.2f} best {max(speeds):.2f}, "
                f"CPU s/GiB median {statistics.median(costs):.2f} best {min(costs):.2f}"
            )


if __name__ == "__main__":
    main()
