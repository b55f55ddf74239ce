"""Two ways to replace the connections of a gloo group, measured in turn: torch's ``reconfigure`` (2.14) and Holdfast's.

``python -m bench.communicators rebuild [--rounds 10000]``: the time to connect again, up to the end of the first
all-reduce, in the same four processes. Prints file descriptors, threads and resident memory after 1 round, half of the
rounds and all rounds.
``python -m bench.communicators out [--trials 20]``: a rank dies, or is stopped, inside an all-reduce. The others get
the order at once and call ``abort()``. Prints the time until the last of them has left its collective. With
``ours-slices``, ranks wait in short slices, as scripts under Holdfast do, and stop when the order comes. The others
wait in gloo alone.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from holdfast.frameworks.torch import private_api
from holdfast.frameworks.torch.comm.comm_state import SLICE, CommState
from holdfast.frameworks.torch.comm.communicator import Communicator, FreshGroups
from holdfast.frameworks.torch.comm.group_builder import GroupSpec

RANKS = 4
BOUND = timedelta(seconds=10)
"""Of a collective: the way out for a rank that ``abort()`` does not free."""


class TorchReconfigure:
    """The communicator of torch: one backend for the life of the group."""

    def __init__(self, store: Store, rank: int) -> None:
        self.group = private_api.new_inner_group(store, rank, RANKS, "torch", nccl=False)
        make: Any = dist.ProcessGroupGloo
        self._backend = make(store, rank, RANKS, timeout=BOUND, enable_reconfigure=True)
        private_api.give_backend(self.group, "cpu", self._backend, nccl=False)

    @property
    def supports_reconfigure(self) -> bool:
        """Return whether torch supports ``reconfigure`` here."""
        return bool(self._backend.supports_reconfigure)

    def get_reconfigure_handle(self) -> str:
        """Return the address at which this rank listens."""
        return str(self._backend.get_reconfigure_handle())

    def reconfigure(self, uuid: str, handles: Sequence[str], timeout: timedelta) -> None:
        """Connect again."""
        options: Any = dist.distributed_c10d.ReconfigureOptions()  # type: ignore[attr-defined]
        options.uuid, options.handles, options.timeout = int(uuid), list(handles), timeout
        self._backend.reconfigure(options).wait()

    def abort(self) -> None:
        """Ask torch to abort, which does nothing on gloo."""
        self._backend.abort()


class Rank:
    """One rank of a world, with its store and both communicators."""

    def __init__(self, rank: int, port: int) -> None:
        self.rank = rank
        self.store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
        self._count = 0
        spec = GroupSpec("ours", ((), 0), rank, RANKS, (("cpu", "gloo"),), BOUND)
        self.ways: dict[str, Communicator] = {
            "ours": FreshGroups(CommState(), spec, lambda uuid, _: PrefixStore(f"ours/{uuid}/", self.store))
        }
        if version() >= (2, 14):
            self.ways["torch"] = TorchReconfigure(PrefixStore("torch/", self.store), rank)

    def tell(self, text: str) -> list[str]:
        """Publish a text and return the texts of all ranks, by rank. All ranks must call this."""
        self._count += 1
        self.store.set(f"said/{self._count}/{self.rank}", text)
        return [self.store.get(f"said/{self._count}/{rank}").decode() for rank in range(RANKS)]

    def connect(self, way: str, uuid: int) -> float:
        """Abort, connect again and run one all-reduce. Return the seconds that this took."""
        communicator = self.ways[way]
        self.tell("ready")
        began = time.perf_counter()
        communicator.abort()
        handle = communicator.get_reconfigure_handle()
        # Holdfast's communicator finds the ranks by name. Torch's communicator needs their addresses, which are
        # exchanged here.
        handles = self.tell(handle) if way == "torch" else [f"ours/{rank}" for rank in range(RANKS)]
        communicator.reconfigure(str(uuid), handles, timedelta(seconds=30))
        ones = torch.ones(4)
        communicator.group.allreduce([ones], dist.AllreduceOptions()).wait()
        if ones.tolist() != [RANKS] * 4:
            raise SystemExit(f"{way}: wrong sum {ones.tolist()}")
        return time.perf_counter() - began


def percentile(found: Sequence[float], share: float) -> float:
    """Return a percentile of the values. ``share`` is 0.5 for the median."""
    return sorted(found)[min(int(len(found) * share), len(found) - 1)]


def version() -> tuple[int, int]:
    """Return major and minor version of torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def held() -> str:
    """Return the descriptors, threads and resident memory of this process, as text."""
    with open("/proc/self/statm") as file:
        resident_mib = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    fds, threads = (len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task"))
    return f"{fds} descriptors, {threads} threads, {resident_mib:.0f} MiB"


def rebuild(rank: Rank, rounds: int) -> None:
    """Rebuild the connections with both communicators in turn, and print the times."""
    times: dict[str, list[float]] = {way: [] for way in rank.ways}
    for number in range(1, rounds + 1):
        for way in times:
            times[way].append(rank.connect(way, number))
        if rank.rank == 0 and number in (1, rounds // 2, rounds):
            print(f"after {number} rounds: {held()}", flush=True)
    for way, found in times.items() if rank.rank == 0 else ():
        parts = [found[:100], found[len(found) // 2 :][:100], found[-100:]]
        p50, p90 = (percentile(found, share) * 1e3 for share in (0.5, 0.9))
        trend = ", ".join(f"{percentile(part, 0.5) * 1e3:.1f}" for part in parts)
        print(
            f"{way:6s} n={len(found)} p50 {p50:.1f} ms p90 {p90:.1f} ms; first, middle and last 100: {trend} ms",
            flush=True,
        )


def leave(rank: Rank, way: str) -> None:
    """Run all-reduces until one breaks. A line on standard input is the order to abort."""
    name, _, slices = way.partition("-")
    rank.connect(name, 1)
    communicator = rank.ways[name]
    told = threading.Event()

    def obey() -> None:
        sys.stdin.readline()
        told.set()
        communicator.abort()

    threading.Thread(target=obey, daemon=True).start()
    print("ready", flush=True)
    tensor = torch.ones(1 << 16)
    try:
        while True:
            work = communicator.group.allreduce([tensor], dist.AllreduceOptions())
            if slices:
                _wait_in_slices(work, told)
            else:
                work.wait()
    except RuntimeError:
        print(f"out {time.monotonic()}", flush=True)
    os._exit(0)


def _wait_in_slices(work: dist.Work, told: threading.Event) -> None:
    """Wait in slices, as the groups of Holdfast do. After the order to abort, stop waiting for gloo."""
    while not work.is_completed():
        try:
            work.wait(SLICE)
        except RuntimeError:
            if told.is_set() or work.is_completed():
                raise


def _start(port: int, *arguments: str) -> list[subprocess.Popen[str]]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    base = [sys.executable, "-m", "bench.communicators", *arguments, "--port", str(port)]
    return [
        subprocess.Popen(
            [*base, "--rank", str(rank)], env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for rank in range(RANKS)
    ]


def trial(way: str, number: signal.Signals) -> float:
    """Return the seconds from the signal to rank 1 until the last survivor has left its collective."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = _start(server.port, "out", "--way", way)
    for each in ranks:
        _read(each, "ready")
    time.sleep(0.1)
    began = time.monotonic()
    ranks[1].send_signal(number)
    survivors = [each for each in ranks if each is not ranks[1]]
    for each in survivors:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    ended = max(float(_read(each, "out").split()[1]) for each in survivors)
    for each in ranks:
        each.kill()
        each.wait()
    return ended - began


def _read(process: subprocess.Popen[str], word: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(word):
            return line
    raise SystemExit(f"a rank ended with {process.wait()} before it said {word}")


def out(trials: int) -> None:
    """Measure every communicator in turn, with a rank that is killed and with one that is stopped."""
    ways = ["ours-slices", "ours", "torch"] if version() >= (2, 14) else ["ours-slices", "ours"]
    for number in (signal.SIGKILL, signal.SIGSTOP):
        found: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(trials):
            for way in ways:
                found[way].append(trial(way, number))
        for way in ways:
            p50, p90 = (percentile(found[way], share) * 1e3 for share in (0.5, 0.9))
            at_once = sum(each < 1 for each in found[way]) / trials
            print(
                f"{number.name} {way:11s} n={trials} p50 {p50:.0f} ms p90 {p90:.0f} ms, within 1 s {at_once:.0%}",
                flush=True,
            )


def main() -> None:
    """Start the ranks and wait."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["rebuild", "out"])
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--way", default="ours", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.rank >= 0:
        rank = Rank(given.rank, given.port)
        run: Callable[[], None] = (
            (lambda: rebuild(rank, given.rounds))
            if given.what == "rebuild"
            else lambda: leave(rank, given.way)
        )
        run()
        return
    print(f"torch {torch.__version__}, {RANKS} ranks", flush=True)
    if given.what == "out":
        out(given.trials)
        return
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = _start(server.port, "rebuild", "--rounds", str(given.rounds))
    assert ranks[0].stdout is not None
    for line in ranks[0].stdout:
        print(line, end="", flush=True)
    codes = [each.wait() for each in ranks]
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")


if __name__ == "__main__":
    main()
