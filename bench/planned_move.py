"""Cost of a planned move, compared with a usual step and with kill -9; and many notices in a row on one job (root).

    PYTHONPATH=. python bench/planned_move.py [--notices 15] [--kills 5] [--pause 0.3] [--width 512] [--minutes M]

Three network namespaces stand for three hosts, with ``--nnodes 2:3``; two of them have ranks. One job runs throughout.
The disturbances come in turns. First, a host is drained: its ranks move to the waiting host, and its launcher is
started again and waits from then on. Second, every third notice is withdrawn at once. Third, a worker is killed while a
spare process waits on its host. The stall is the gap between the two steps of the undisturbed rank around the change,
minus the median of its twenty steps before. At the end the weights are compared with those of an undisturbed run of as
many steps. No step may have been done again.

Prints markdown: n, median, p90 and the share within the goal, which is one usual step. After ``--minutes`` no further
disturbance begins; n says how many there were.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from rounds import quantile

from holdfast.errors import InternalError
from tests.cli.command import HOLDFAST
from tests.nodes.cables import Network
from tests.nodes.jobs import Hosts
from tests.runtime.runs import until

TRAIN = """
import hashlib, os, sys, time
import torch
import torch.distributed as dist
import holdfast
from torch.nn.parallel import DistributedDataParallel

pause_s, width, result = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(7)
net = torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.Linear(width, width), torch.nn.Linear(width, 1))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.arange(4096.0).reshape(-1, 16).sin())
with holdfast.session(model=model, optimizer=optimizer, seed=7) as s:
    rank = dist.get_rank()
    loader = torch.utils.data.DataLoader(data, 8, sampler=torch.utils.data.DistributedSampler(data, seed=7))
    for step in s.steps(loader, until=1_000_000):
        with step as batch:
            if not os.path.exists(result + ".hurry"):
                time.sleep(pause_s)
            ((model(batch[0]) - 1) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if step.committed:
            with open(f"{result}-times-{rank}", "a") as times:
                times.write(f"{s.step} {time.monotonic()}\\n")
            if os.path.exists(result + ".end") and s.step >= int(open(result + ".end").read()):
                break
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest()
open(f"{result}-{rank}", "w").write(digest)
dist.destroy_process_group()
"""
AFTER_STEPS = 3  # steps that must follow before a disturbance counts as over
END_STEPS = 50  # more than the ranks can make while the file with the last step is written
BOUND_S = 300.0


class Bench:
    """A running job with its hosts."""

    def __init__(self, hosts: Hosts, result: Path) -> None:
        self.hosts = hosts
        self.result = result
        self.homes = {0: 0, 1: 1}  # host by rank
        self.waits = 2  # the host without ranks

    def times(self, rank: int) -> list[tuple[int, float]]:
        """Return step and CLOCK_MONOTONIC of each commit of a rank."""
        path = Path(f"{self.result}-times-{rank}")
        lines = path.read_text().splitlines()[:-1] if path.exists() else []
        return [(int(step), float(at_s)) for step, at_s in map(str.split, lines)]

    def steps(self, rank: int) -> int:
        """Return how many steps a rank has done so far."""
        return len(self.times(rank))

    def more(self, rank: int, count: int = AFTER_STEPS) -> None:
        """Wait until a rank has done ``count`` more steps."""
        goal = self.steps(rank) + count
        until(f"{goal} steps of rank {rank}", lambda: self.steps(rank) >= goal, BOUND_S)

    def stall(self, rank: int, at_s: float) -> tuple[float, float]:
        """Return the stall of a rank around ``at_s`` and its usual step, both in seconds.

        The stall is the gap between two steps in which ``at_s`` lies, minus a usual step.
        """
        moments = [moment_s for _, moment_s in self.times(rank)]
        place = bisect_right(moments, at_s)
        usual_s = statistics.median(end - begin for begin, end in pairwise(moments[place - 21 : place]))
        return moments[place] - moments[place - 1] - usual_s, usual_s

    def end(self) -> int:
        """Let the job end at a step that no rank has reached, and return that step."""
        last = self.times(0)[-1][0] + END_STEPS
        end_after(self.result, last)
        return last

    def voters(self, watcher: int) -> list[str]:
        """Return the nodes with a vote, from the newest record in the log of a host."""
        told = self.hosts.events(watcher, "electorate")
        return list(told[-1].data["voters"]) if told else []

    def command(self, *words: str) -> None:
        """Run a ``holdfast`` command on the run, on a host that stays."""
        index = self.homes[0]
        place = [*self.hosts.net.on(index), HOLDFAST, *words, str(self.hosts.run(index).path)]
        subprocess.run(place, check=True, env=self.hosts.env, stdout=subprocess.DEVNULL)

    def withdraw(self, rank: int) -> tuple[float, float]:
        """Give notice of a host and withdraw it. Return the stall and the usual step."""
        since_s, node = time.monotonic(), f"node{self.homes[rank]}"
        self.command("drain", node)
        self.command("drain", "--cancel", node)
        self.more(1 - rank)
        return self.stall(1 - rank, since_s)

    def move(self, rank: int) -> tuple[float, float]:
        """Drain a host: its rank moves to the waiting host, and the drained host starts again and waits.

        Return the stall.
        """
        hosts, index, watcher = self.hosts, self.homes[rank], self.homes[1 - rank]
        self.command("drain", f"node{index}")
        hosts.wait(index, BOUND_S)
        self.homes[rank], self.waits = self.waits, index
        self.more(1 - rank)
        found = self.stall(1 - rank, hosts.events(watcher, "holding")[-1].t_mono)
        hosts.start(index)
        until("it has a vote", lambda: f"node{index}" in self.voters(watcher), BOUND_S)
        self.more(1 - rank, 20)
        return found

    def kill(self, rank: int) -> tuple[float, float]:
        """Kill the worker of a rank with SIGKILL. Return the stall and the usual step."""
        hosts, index = self.hosts, self.homes[rank]
        status = [*hosts.net.on(index), HOLDFAST, "status", "--json", str(hosts.run(index).path)]
        view = json.loads(subprocess.run(status, check=True, env=hosts.env, capture_output=True).stdout)
        pid = next(r["pid"] for r in view["ranks"] if r["rank"] == rank and r["alive"])
        since_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        self.more(1 - rank)
        found = self.stall(1 - rank, since_s)
        self.more(1 - rank, 20)
        return found


def end_after(result: Path, step: int) -> None:
    """Tell the job that writes to ``result`` to end after a step."""
    told = Path(f"{result}.told")
    told.write_text(str(step))
    told.rename(f"{result}.end")  # a rank reads it whole


def row(name: str, found: Sequence[tuple[float, float]]) -> str:
    """Return n, median and p90 of the stall, and the share below one usual step, as one line of the table."""
    stalls = sorted(stall_s for stall_s, _ in found)
    if not stalls:
        return f"| {name} | 0 | | | |"
    p90 = quantile(stalls, 0.9)
    within = sum(stall_s < usual_s for stall_s, usual_s in found)
    return (
        f"| {name} | {len(found)} | {statistics.median(stalls):.3f} | {p90:.3f} | {within} of {len(found)} |"
    )


def train(
    hosts: Hosts, result: Path, args: argparse.Namespace
) -> tuple[list[tuple[str, tuple[float, float]]], int]:
    """Run the disturbed job to its end. Return the stalls by kind of disturbance, and the number of steps."""
    bench, rng = Bench(hosts, result), random.Random(1)
    hosts.start(0, 1)
    hosts.wait_event(0, "generation_started", bound_s=BOUND_S)
    hosts.start(2)
    until("host 2 has a vote", lambda: "node2" in hosts.events(0, "electorate")[-1].data["voters"], BOUND_S)
    bench.more(0, 25)
    plan = ["false" if number % 3 == 2 else "move" for number in range(args.notices)]
    for number in range(args.kills):
        plan.insert((number + 1) * len(plan) // (args.kills + 1), "kill")
    found: list[tuple[str, tuple[float, float]]] = []
    end_s = time.monotonic() + args.minutes * 60
    for number, kind in enumerate(plan):
        if args.minutes and time.monotonic() >= end_s:
            print(f"{number} of {len(plan)} in {args.minutes:g} minutes", file=sys.stderr)
            break
        rank = rng.randrange(2)
        act = {"move": bench.move, "false": bench.withdraw, "kill": bench.kill}[kind]
        stall_s, usual_s = act(rank)
        found.append((kind, (stall_s, usual_s)))
        print(
            f"{number + 1} of {len(plan)}: {kind} of rank {rank}: {stall_s:.3f} s, a step {usual_s:.3f} s",
            file=sys.stderr,
        )
    last = bench.end()
    codes = [hosts.wait(index, 3600.0) for index in bench.homes.values()]
    if codes != [0, 0]:
        raise InternalError(f"the job ended with {codes}: {hosts.output(bench.homes[0])[-2000:]}")
    lost = [e.data["steps_lost"] for e in hosts.events(bench.homes[0], "restored")]
    if any(lost):
        raise InternalError(f"steps were done again: {lost}")
    return found, last


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--notices", type=int, default=15)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.3)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--minutes", type=float, default=0.0, help="0: until all of them are done")
    args = parser.parse_args()
    digests = []
    with tempfile.TemporaryDirectory() as base, Network(3) as net:
        for name in ("disturbed", "undisturbed"):
            place = Path(base) / name
            words = (str(args.pause), str(args.width), str(place / "out"))
            # A host whose workers are killed on purpose has not failed.
            flags = ("--spares", "1", "--max-restarts", "1000", "--node-faults", "0")
            with Hosts(net, place, "2:3", TRAIN, words, flags=flags, torch=True) as hosts:
                if name == "disturbed":
                    found, last = train(hosts, place / "out", args)
                else:
                    end_after(place / "out", last)
                    Path(f"{place / 'out'}.hurry").touch()
                    hosts.start(0, 1)
                    if [hosts.wait(0, 3600.0), hosts.wait(1, 3600.0)] != [0, 0]:
                        raise InternalError(hosts.output(0)[-2000:])
            digests.append({(place / f"out-{rank}").read_text() for rank in range(2)})
    print("| stall, s | n | median | p90 | below one usual step |\n|---|---|---|---|---|")
    for kind, name in (
        ("move", "planned move"),
        ("false", "withdrawn notice"),
        ("kill", "kill -9, a spare waits"),
    ):
        print(row(name, [stall for said, stall in found if said == kind]))
    usual_s = statistics.median(usual_s for _, (_, usual_s) in found)
    same = "the same bits as" if digests[0] == digests[1] else "OTHER BITS than"
    print(f"\na usual step {usual_s:.3f} s, 0 steps done again, {same} the undisturbed run")
    if digests[0] != digests[1]:
        raise InternalError("the weights differ")


if __name__ == "__main__":
    main()
