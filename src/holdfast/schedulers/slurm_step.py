"""What the environment of a Slurm step says about a job of several nodes.

``srun`` describes the step to each of its tasks: how many nodes it has, which of them this is, and the names of all.
``holdfast run`` takes its own description of the job from there, so that one command serves every node. A batch
script has no step of its own (no ``SLURM_STEP_NODELIST``): there, nothing is taken from the environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from holdfast.errors import UsageError

NODES = "SLURM_STEP_NODELIST"
PORT_FIRST, PORT_COUNT = (
    20_000,
    10_000,
)  # below 32768, where Linux begins with the ports of outgoing connections
STEPS_APART = 8  # so many steps of a job that run at the same time have different ports
STEPS_OF_USERS = 0xFFFFFFF0  # greater numbers are those of Slurm's own steps (batch, extern, interactive)
FLAGS_INSTEAD = "give --nnodes, --node-rank, --master-addr, --master-port, --run-id and --token-file yourself"


class SlurmStep(NamedTuple):
    """A step, as one of its tasks sees it."""

    job: int
    step: int
    nodes: int
    node: int  # number of this one, from 0
    tasks_per_node: int  # the most that any node has
    first_host: str

    @property
    def name(self) -> str:
        """Names the run: the same at every start of a job that is queued again."""
        return f"slurm-{self.job}" + (f"-{self.step}" if self.step else "")

    @property
    def port(self) -> int:
        """Of the first contact: its own for each job, and for each of a few steps of a job."""
        return PORT_FIRST + (self.job * STEPS_APART + self.step) % PORT_COUNT


def read_step(env: Mapping[str, str]) -> SlurmStep | None:
    """The step that this process is a task of; None outside of one.

    Args:
        env: environment of the process.

    Raises:
        UsageError: a variable of the step is missing or malformed, or the job is heterogeneous.

    Example:
        ``read_step(os.environ)``
    """
    if NODES not in env or _number(env, "SLURM_STEP_ID") >= STEPS_OF_USERS:
        return None
    nodes, node = _number(env, "SLURM_STEP_NUM_NODES"), _number(env, "SLURM_NODEID")
    if not 0 <= node < nodes:
        raise UsageError(
            f"SLURM_NODEID={node} with SLURM_STEP_NUM_NODES={nodes}: the numbers are 0 to {nodes - 1}",
            hint=f"start the command with srun; or {FLAGS_INSTEAD}",
        )
    if nodes > 1 and "SLURM_HET_SIZE" in env:
        raise UsageError(
            "a step of a heterogeneous job numbers the nodes of each component from 0", hint=FLAGS_INSTEAD
        )
    return SlurmStep(
        job=_number(env, "SLURM_JOB_ID"),
        step=_number(env, "SLURM_STEP_ID"),
        nodes=nodes,
        node=node,
        tasks_per_node=most_tasks(env.get("SLURM_STEP_TASKS_PER_NODE", "")),
        first_host=first_host(env[NODES]),
    )


def _number(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    if re.fullmatch(r"[0-9]{1,10}", text) is None:
        raise UsageError(
            f"{NODES} is set, and {name}={text!r} is no number: this is no complete environment of a Slurm step",
            hint=f"start the command with srun; or unset {NODES}",
        )
    return int(text)


def first_host(nodelist: str) -> str:
    """The first name of Slurm's short form of a list: ``n1`` of ``n[1-4,7],m2``, ``r2n05`` of ``r[2-3]n[05-08]``.

    Raises:
        UsageError: no list of hosts.
    """
    first = re.match(r"((?:[^\[\],]|\[[^\[\]]*\])+)(?:,|$)", nodelist)
    name = re.sub(r"\[([^\[\],-]*)[^\[\]]*\]", r"\1", first[1]) if first else ""
    if re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", name) is None:
        raise UsageError(
            f"{NODES}={nodelist!r} is no list of hosts",
            hint="--master-addr HOST: the first host of the step",
        )
    return name


def most_tasks(counts: str) -> int:
    """The greatest number of Slurm's short form of counts: 2 of ``2(x3),1``. 1 where there is none."""
    return max(map(int, re.findall(r"(?:^|,)(\d{1,9})", counts)), default=1)
