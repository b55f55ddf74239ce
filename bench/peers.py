"""Time from kill -9 of a worker to the next committed step: Holdfast, NVRx, torchft and torchrun in turn, same model.

    python -m venv peers; peers/bin/pip install torch==2.13.0 nvidia-resiliency-ext torchft-nightly
    PYTHONPATH=src python bench/peers.py --python peers/bin/python [--rounds 5] [--size 10m]

The venv also needs Holdfast's own dependencies, because its scripts train the drill's model. ``ft_launcher`` (NVRx) and
torchrun restart all workers from a checkpoint every 10 steps. torchft is tuned tight: heartbeat and join 1 s, tick 50
ms, collectives 5 s, where its defaults wait up to 60 s. It continues with three replicas until the fourth is back.
Holdfast continues at full size. torchft loads its data without worker processes: forked workers would keep the sockets
of a dead replica open until they notice its death, and its peers would wait 5 s.

Prints markdown: seconds to the next step, and to the next step of the rank that was killed; min / median / max.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from recovery import KILL_FROM, KILL_TO, NPROC, ours

from holdfast.drill.trace import read_trace
from holdfast.runtime.node.process_info import alive

STEPS = 60
BACK_S_MAX = 90.0
HERE = Path(__file__).parent


@dataclass
class Found:
    """Measured times of one system, in seconds. ``lost`` counts the steps done again."""

    first_s: list[float] = field(default_factory=list)
    full_s: list[float] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    never: int = 0


class Job:
    """One run of another system. ``start`` starts its processes with an environment."""

    def __init__(self, place: Path, command: list[str], environment: dict[str, str]) -> None:
        self.place = place
        place.mkdir(parents=True)
        self._log = (place / "log").open("wb")
        self._started: list[subprocess.Popen[bytes]] = []
        self._ending = False
        self.start(command, environment)

    def start(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start one more process of this run."""
        job = subprocess.Popen(command, stdout=self._log, stderr=self._log, start_new_session=True,
                               env={**os.environ, "OMP_NUM_THREADS": "1", **environment})  # fmt: skip
        self._started.append(job)
        return job

    def again(self, command: list[str], environment: dict[str, str]) -> None:
        """Keep a replica running: a loop in a thread starts it again whenever it dies."""

        def keep() -> None:
            while not self._ending and self.start(command, environment).wait() != 0:
                continue

        threading.Thread(target=keep, daemon=True).start()

    def trace(self, rank: int) -> list[tuple[int, int]]:
        """Return the steps of one rank and their times."""
        path = self.place / f"rank-{rank:05d}.trace"
        return read_trace(path) if path.exists() else []

    def end(self) -> None:
        """Kill all processes of this run."""
        self._ending = True
        for job in self._started:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
        self._log.close()


def restarting(place: Path, launcher: list[str], size: str) -> Job:
    """Start torchrun, or a launcher with its flags, on the plain script with a save every 10 steps."""
    script = [str(HERE / "plain.py"), "--size", size, "--steps", str(STEPS), "--trace", str(place)]
    saved = ["--save-every", "10", "--checkpoint", str(place)]
    return Job(place, [*launcher, *script, *saved], {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


def torchft(place: Path, python: Path, size: str) -> Job:
    """Start a lighthouse and four replicas."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    tight = ["--heartbeat_timeout_ms", "1000", "--join_timeout_ms", "1000", "--quorum_tick_ms", "50"]
    lighthouse = [
        str(python.with_name("torchft_lighthouse")),
        "--min_replicas",
        "2",
        "--bind",
        f"[::]:{port}",
    ]
    job = Job(place, [*lighthouse, *tight], {})
    script = [
        str(python),
        str(HERE / "plain_torchft.py"),
        "--size",
        size,
        "--steps",
        str(STEPS),
        "--trace",
        str(place),
    ]
    for replica in range(NPROC):
        own = {"BENCH_REPLICA": str(replica), "BENCH_REPLICAS": str(NPROC), "RANK": "0", "WORLD_SIZE": "1",
               "TORCHFT_LIGHTHOUSE": f"http://localhost:{port}"}  # fmt: skip
        job.again(script, own)
    return job


def kill_one(job: Job, draw: random.Random, found: Found) -> None:
    """Kill a random rank at a random moment and wait until this rank, or its replacement, has done a step."""
    victim, step = draw.randrange(NPROC), draw.randrange(KILL_FROM, KILL_TO)
    others = [rank for rank in range(NPROC) if rank != victim]
    deadline_s = time.monotonic() + BACK_S_MAX
    while not all(any(done >= step for done, _ in job.trace(rank)) for rank in range(NPROC)):
        if time.monotonic() > deadline_s:
            found.never += 1
            return
        time.sleep(0.005)
    time.sleep(draw.uniform(0.0, 0.2))
    pid = int((job.place / f"rank-{victim:05d}.pid").read_text())
    killed_ns = time.monotonic_ns()
    os.kill(pid, signal.SIGKILL)
    while alive(pid):
        time.sleep(0.001)
    dead_ns = time.monotonic_ns()  # the victim may have ended a step while dying
    while time.monotonic() < deadline_s + BACK_S_MAX:
        back = [moment for _, moment in job.trace(victim) if moment > dead_ns]
        # Some ranks still finish a step that was running at the kill. Only a step that began after the kill counts.
        ahead = [moment for rank in others for done, moment in job.trace(rank)
                 if moment > killed_ns and done != before(job.trace(rank), killed_ns) + 1]  # fmt: skip
        if back and ahead:
            found.first_s.append((min(*ahead, *back) - killed_ns) / 1e9)
            found.full_s.append((min(back) - killed_ns) / 1e9)
            resumed = next(done for done, moment in job.trace(victim) if moment > dead_ns)
            found.lost.append(max(0, before(job.trace(others[0]), killed_ns) - (resumed - 1)))
            return
        time.sleep(0.005)
    found.never += 1


def before(trace: list[tuple[int, int]], moment_ns: int) -> int:
    """Return the number of steps done at a moment."""
    return max((done for done, at_ns in trace if at_ns <= moment_ns), default=0)


def row(name: str, found: Found) -> str:
    """Return one line of the table."""

    def figures(values: list[float]) -> str:
        low, middle, high = (f(values) for f in (min, statistics.median, max))
        return f"{low:.2f} / {middle:.2f} / {high:.2f}"

    if not found.first_s:
        return f"| {name} | 0 ({found.never} never) | - | - | - |"
    lost = f"{min(found.lost)} to {max(found.lost)}"
    came = f"{len(found.first_s)}" + (f" ({found.never} never)" if found.never else "")
    return f"| {name} | {came} | {figures(found.first_s)} | {figures(found.full_s)} | {lost} |"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", type=Path, required=True, help="of a venv with NVRx and torchft")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", default="10m")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    python = given.python.absolute()  # not resolved: a venv's interpreter is a link
    draw, found = random.Random(given.seed), defaultdict[str, Found](Found)
    nproc = ["--nproc-per-node", str(NPROC), "--max-restarts", "3"]
    nvrx = [str(python), "-m", "nvidia_resiliency_ext.fault_tolerance.launcher", "--nnodes", "1",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--ignore-missing-fault-tol-cfg"]  # fmt: skip
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory:
        base = Path(directory)
        peers: dict[str, Callable[[Path], Job]] = {
            "torchrun": lambda place: restarting(place, [*torchrun, *nproc], given.size),
            "NVRx ft_launcher": lambda place: restarting(
                place, [*nvrx, "--rdzv-id", place.name, *nproc], given.size
            ),
            "torchft, tight": lambda place: torchft(place, python, given.size),
        }
        for number in range(given.rounds):
            for spares in (0, 1):
                place = base / f"spares-{spares}"
                place.mkdir(exist_ok=True)
                seconds = ours(place, number, given.size, spares, draw)["resumed"]
                name = "Holdfast" + (", a spare waits" if spares else "")
                found[name].first_s.append(seconds)
                found[name].full_s.append(seconds)
                found[name].lost.append(0)
            for name, start in peers.items():
                job = start(base / f"{name.replace(' ', '-').replace(',', '')}-{number}")
                try:
                    kill_one(job, draw, found[name])
                finally:
                    job.end()
            print(f"round {number} done", file=sys.stderr)
    print(
        "| kill -9 of a random rank | n | s to a next step | s to the next step of that rank | steps lost |"
    )
    print("|---|---|---|---|---|")
    for name in found:
        print(row(name, found[name]))


if __name__ == "__main__":
    main()
