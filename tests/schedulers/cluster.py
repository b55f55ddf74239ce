"""A Slurm cluster on this machine: a controller and four slurmd, each a node of its own (root; Debian: slurm-wlm)."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.runtime.node.spawn import free_port
from tests.cli.command import HOLDFAST, clean_environment
from tests.runtime.runs import kill_at_once, until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel")
LOOK_S = 0.3
NODES = ("n1", "n2", "n3", "n4")
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
ReturnToService=1
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmdSpoolDir={directory}/spool/%n
StateSaveLocation={directory}/state
SlurmctldPort={port}
SlurmctldTimeout=10
SlurmdTimeout=10
InactiveLimit=0
KillWait=30
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
{nodes}
PartitionName=main Nodes=n[1-4] Default=YES MaxTime=INFINITE State=UP
"""
"""A lost node is down after 10 s; a job that is queued again waits 5 s, the life of its credential, not two minutes."""


def why_not() -> str:
    """Return the reason why there can be no cluster here; empty if there can be one."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [name for name in PROGRAMS if _program(name) is None]
    return f"not installed: {', '.join(missing)} (Debian: slurm-wlm)" if missing else ""


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


class Cluster:
    """A cluster of four nodes, whose jobs work in ``work``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.work = directory / "work"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.env = clean_environment({"SLURM_CONF": str(directory / "slurm.conf")})

    def start(self) -> None:
        """Start all programs, and wait until every node is idle."""
        for name in ("state", "log", "work", *(f"spool/{node}" for node in NODES)):
            (self.directory / name).mkdir(parents=True)
        os.chmod(self.directory, 0o755)
        host = socket.gethostname().partition(".")[0]
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=1 State=UNKNOWN"
            for node in NODES
        )
        config = CONFIG.format(host=host, directory=self.directory, port=free_port(), nodes=nodes)
        (self.directory / "slurm.conf").write_text(config)
        key = self.directory / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        places = {"key-file": key.name, "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "log/munge",
                  "seed-file": "munge.seed"}  # fmt: skip
        self._run(
            "munged", "--foreground", "--force", *(f"--{k}={self.directory / v}" for k, v in places.items())
        )
        until("munged listens", (self.directory / "munge.socket").exists)
        self._run("slurmctld", "-D", "-c")
        for node in NODES:
            self._run("slurmd", "-D", "-N", node)
        until("four nodes are idle", lambda: self.ask("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "4")

    def _run(self, program: str, *args: str) -> None:
        name = args[-1] if program == "slurmd" else program
        found = _program(program)
        assert found is not None
        with (self.directory / "log" / f"{name}.out").open("wb") as log:
            self.processes[name] = subprocess.Popen([found, *args], env=self.env, stdout=log, stderr=log)

    def ask(self, *command: str) -> str:
        """Run a command of Slurm after a pause, and return its output.

        The pause limits the processes that polling starts.
        """
        time.sleep(LOOK_S)
        return subprocess.run(
            command, cwd=self.work, env=self.env, capture_output=True, text=True, timeout=60, check=False
        ).stdout

    def submit(self, *args: str) -> str:
        """Run ``holdfast submit slurm``. Return the number of the job."""
        done = subprocess.run(
            [HOLDFAST, "submit", "slurm", *args],
            cwd=self.work, env=self.env, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def output(self, job: str) -> str:
        """Return the output of the job so far."""
        path = self.work / "runs" / f"slurm-{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def state(self, job: str) -> dict[str, str]:
        """Return what Slurm reports on a job."""
        words = self.ask("scontrol", "show", "job", "--oneliner", job).split()
        return {key: value for key, _, value in (word.partition("=") for word in words)}

    def lose(self, node: str) -> None:
        """Kill all processes of a node, as the loss of its power would."""
        self.processes[node].kill()
        self.processes[node].wait()
        self._kill(f"SLURMD_NODENAME={node}")

    def _kill(self, variable: str) -> None:
        """Kill every process of this cluster's jobs that has the variable, and the stepd that started it."""
        ours = f"SLURM_CONF={self.env['SLURM_CONF']}"
        found: set[int] = set()
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                if ours in words and variable in words:
                    found |= {int(entry.name), *_stepds(entry)}
            except OSError:
                continue  # the process has ended
        kill_at_once(found)

    def stop(self) -> None:
        """End all jobs and programs."""
        self.ask("scancel", "--signal=KILL", "--full", "--user=root")
        self.ask("scancel", "--user=root")
        for node in NODES:
            self._kill(f"SLURMD_NODENAME={node}")
        for process in reversed(self.processes.values()):
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _stepds(entry: Path) -> list[int]:
    """Return the parent of a process, if it is a slurmstepd."""
    parent = next(
        line.split()[1] for line in (entry / "status").read_text().splitlines() if line.startswith("PPid:")
    )
    name = Path("/proc", parent, "comm")
    return [int(parent)] if name.read_text().startswith("slurmstepd") else []


@contextmanager
def cluster(directory: Path) -> Iterator[Cluster]:
    """Yield a running cluster."""
    made = Cluster(directory)
    try:
        made.start()
        yield made
    finally:
        made.stop()
