"""A job of several hosts: one ``holdfast run`` in each network namespace, one command per host."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from pathlib import Path
from typing import Self

from holdfast import event_log
from holdfast.event_log import Event
from holdfast.runtime.node.run_processes import sweep
from holdfast.runtime.node.rundir import PAGE, RunDir
from holdfast.runtime.node.status_page import committed_step, each_page
from holdfast.runtime.rank_table.table import make
from tests.cli.command import HOLDFAST, clean_environment
from tests.nodes.cables import Network
from tests.runtime.runs import LOOP, exists, kill_at_once, until, without_torch

BOUND_S = 180.0

TRAIN = """
import hashlib, os, sys, time
import torch
import torch.distributed as dist
import holdfast
from torch.nn.parallel import DistributedDataParallel

steps, pause_s, result = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(7)
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
rank = dist.get_rank()
data = torch.utils.data.TensorDataset(torch.arange(4096.0).reshape(-1, 16).sin())
loader = torch.utils.data.DataLoader(data, 8, sampler=torch.utils.data.DistributedSampler(data, seed=7))
with holdfast.session(model=model, optimizer=optimizer, seed=7) as s:
    for step in s.steps(loader, until=steps):
        with step as batch:
            if os.path.exists(result + ".hurry"):
                pause_s = 0.0
            time.sleep(pause_s)
            ((model(batch[0]) - 1) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest()
open(f"{result}-{rank}", "w").write(digest)
dist.destroy_process_group()
"""
"""A training script with DDP and dropout. Each rank writes the digest of its final weights. Once the file
``RESULT.hurry`` exists, steps have no pause."""


class Hosts:
    """``holdfast run`` on every host of a network. Use it as a context manager, which leaves no process or file."""

    def __init__(
        self, net: Network, base: Path, nnodes: str, script: str = LOOP, args: tuple[str, ...] = (), nproc: int = 1,
        flags: tuple[str, ...] = (), torch: bool = False, table: bool = False, first: str = "",
        counts: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.net = net
        self.base = base
        self.nnodes = nnodes
        self.counts = counts or (nproc,)
        self.flags = flags
        self.table = table  # all hosts use the same command, with a rank table
        self.first = first or net.address(0)  # the value of --master-addr
        base.mkdir(exist_ok=True)
        if table:
            (base / "table.json").write_bytes(
                make([net.address(i) for i in range(len(net.names))], self.counts)
            )
        self.script = base / "train.py"
        self.script.write_text(script)
        self.args = args
        self.token = base / "token"
        self.token.touch(0o600)
        self.token.write_text(secrets.token_hex(32))
        self.env = clean_environment({"HOLDFAST_CHECKPOINT": str(base / "checkpoints")})
        if not torch:
            self.env |= without_torch(base)
        self.commands: dict[int, subprocess.Popen[bytes]] = {}
        self.homes = {index: f"host{index}" for index in range(len(net.names))}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for index in self.commands:
            self.kill(index)
        for command in self.commands.values():
            command.wait()
        for directory in self.base.glob("host*/*/run.json"):
            run = RunDir(directory.parent)
            sweep(run)
            run.remove_pages()

    def start(self, *indices: int) -> None:
        """Start the command on the given hosts; without arguments, on all hosts."""
        for index in indices or range(len(self.net.names)):
            if index in self.commands:
                self.homes[index] = f"host{index}-again"
            words = [
                *self.net.on(index), HOLDFAST, "run", "--token-file", str(self.token),
                *(["--rank-table", str(self.base / "table.json")] if self.table else self.place(index)),
                "--run-dir", str(self.base / self.homes[index]),
                "--run-id", "job", "--grace-s", "20", *self.flags, str(self.script), *self.args,
            ]  # fmt: skip
            with open(self.base / f"host{index}.out", "ab") as out:
                self.commands[index] = subprocess.Popen(words, stdout=out, stderr=out, env=self.env)

    def place(self, index: int) -> list[str]:
        """The flags that say which host of the job this is."""
        return ["--nnodes", self.nnodes, "--node-rank", str(index), "--master-addr", self.first,
                "--nproc-per-node", ",".join(map(str, self.counts))]  # fmt: skip

    def run(self, index: int) -> RunDir:
        """Return the run directory of a host."""
        return RunDir(self.base / self.homes[index] / f"job-node{index}")

    def events(self, index: int, kind: str = "") -> list[Event]:
        """Return the events in the log of a host, all or of one kind."""
        return [e for e in event_log.read(self.run(index).journal).events if kind in ("", e.kind)]

    def wait_event(self, index: int, kind: str, count: int = 1, bound_s: float = BOUND_S) -> Event:
        """Wait for the ``count``-th event of a kind on a host, and return it."""
        event: Event = until(
            f"{kind} on host {index}",
            lambda: next(iter(self.events(index, kind)[count - 1 :]), None),
            bound_s,
        )
        return event

    def wait_step(self, index: int, step: int) -> None:
        """Wait until a worker of a host has committed ``step``, according to its status page."""
        until(f"step {step} on host {index}", lambda: self.committed(index) >= step, BOUND_S)

    def committed(self, index: int) -> int:
        """Return the newest step that a worker of a host has committed."""
        return committed_step(each_page(self.run(index).pages_link, PAGE))

    def let_end(self) -> None:
        """Let the endless loop end, or let the training run without pauses."""
        self.script.with_name("enough").touch()
        (self.base / "out.hurry").touch()

    def wait(self, index: int, bound_s: float = BOUND_S) -> int:
        """Wait for the command of a host to end, and return its exit code."""
        return self.commands[index].wait(bound_s)

    def output(self, index: int) -> str:
        """Return the output of a host's command."""
        return (self.base / f"host{index}.out").read_text()

    def pids(self, index: int) -> list[int]:
        """Return the pids of all processes of a host."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.net.names[index]], capture_output=True, text=True, check=True
        )
        return [int(word) for word in listed.stdout.split()]

    def freeze(self, index: int) -> list[int]:
        """Stop all processes of a host, and return their pids."""
        pids = self.pids(index)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        return pids

    def kill(self, index: int) -> None:
        """Simulate a power loss of a host: all its processes are stopped first, so none sees another die."""
        while pids := [pid for pid in self.pids(index) if exists(pid)]:
            kill_at_once(pids)
