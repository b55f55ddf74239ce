"""The number and the contacts of a node in a job of several nodes, from the environment of a Slurm step.

``srun`` describes the step to each of its tasks: the number of nodes, the number of this node, and the names of all
nodes. ``holdfast run`` reads the job's nodes from this description, so that one command works on every node. A batch
script runs outside of a step (no ``SLURM_STEP_NODELIST``): nothing is read from its environment.
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
STEPS_APART = 8  # number of steps of a job that can run at the same time with different ports
STEPS_OF_USERS = 0xFFFFFFF0  # numbers from here on are Slurm's own steps (batch, extern, interactive)
FLAGS_INSTEAD = "give --nnodes, --node-rank, --master-addr, --master-port, --run-id and --token-file yourself"


class SlurmStep(NamedTuple):
    """A Slurm step, as one of its tasks sees it."""

    job: int
    step: int
    nodes: int
    node: int  # number of this node, from 0
    tasks_per_node: int  # the maximum over all nodes
    first_host: str

    @property
    def name(self) -> str:
        """The name of the run, which stays the same when the job is queued again."""
        return f"slurm-{self.job}" + (f"-{self.step}" if self.step else "")

    @property
    def port(self) -> int:
        """The port of the first contact. Jobs with near numbers, and up to 8 steps of one job, have different ports."""
        return PORT_FIRST + (self.job * STEPS_APART + self.step) % PORT_COUNT


def read_step(env: Mapping[str, str]) -> SlurmStep | None:
    """Return the Slurm step of which this process is a task; None outside of a step.

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
    """Return the first name of a list in Slurm's form: ``n1`` of ``n[1-4,7],m2``, ``r2n05`` of ``r[2-3]n[05-08]``.

    Raises:
        UsageError: the text is not a list of hosts.
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
    """Return the greatest number of a list of counts in Slurm's short form: 2 of ``2(x3),1``; 1 for an empty list."""
    return max(map(int, re.findall(r"(?:^|,)(\d{1,9})", counts)), default=1)
