"""The description of a worker process: its command and environment, and the messages between agent and zygote."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from holdfast.core.ids import NO_GENERATION, Generation, MemberId
from holdfast.core.job.spares import ANY_RANK, BuildSpare
from holdfast.core.protocol.messages import Assignment
from holdfast.runtime.net.addresses import family_of
from holdfast.runtime.node.process_title import ROOM
from holdfast.runtime.node.run_settings import RunSettings
from holdfast.runtime.node.rundir import RunDir, error_path, log_path, open_log
from holdfast.wire import Codec


class Spawn(msgspec.Struct, frozen=True, tag=True):
    """Message from agent to zygote: start one worker.

    ``env`` is added to the zygote's own environment, and overrides it.
    """

    member_id: MemberId
    env: dict[str, str]
    log: str


class Spawned(msgspec.Struct, frozen=True, tag=True):
    """Message from zygote to agent: the worker is forked.

    If the fork failed, ``error`` is the reason, and the agent starts the worker without the zygote.
    """

    member_id: MemberId
    pid: int
    error: str = ""


class Exited(msgspec.Struct, frozen=True, tag=True):
    """Message from zygote to agent: a worker has ended. The zygote sends the message again to each new agent."""

    member_id: MemberId
    pid: int
    code: int | None
    signal: int | None


# Below the ports of Linux for outgoing connections, and of Kubernetes for nodes.
_PORT_MIN, _PORT_MAX = 20000, 30000
_TRIES = 20
_OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
FORKS = "HOLDFAST_FORKS"
"""An environment variable with which the zygote starts, and by which a process forked from it is recognised."""

QUIET_DEVICES = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Environment for the zygote, where a module may ask torch at its import whether there is a GPU. With this variable
torch answers without loading the driver's state into the process. With that state no forked worker could use a GPU.
"""


class Preloaded(msgspec.Struct, frozen=True, tag=True):
    """First message from zygote to agent: the imports are done.

    ``imports_s``: seconds by import; ``missing``: failed imports, with their errors. ``unfit``: why workers cannot be
    forked; empty if they can. ``head``: why not all imports at the head of the script were made; empty if they were, or
    there are none.
    """

    imports_s: dict[str, float]
    missing: dict[str, str]
    threads: int
    unfit: str = ""
    head: str = ""


class Quit(msgspec.Struct, frozen=True, tag=True):
    """Message from agent to zygote: the run is over, and the zygote has to end."""


ZygoteMessage = Spawn | Spawned | Exited | Preloaded | Quit
ZYGOTE_MESSAGES: Codec[ZygoteMessage] = Codec(ZygoteMessage)  # type: ignore[arg-type]  # a union is no type[M]


class SpawnOrder(msgspec.Struct, frozen=True):
    """The order to start one worker: its assignment (member, rank, local rank), and the values of its generation."""

    assignment: Assignment
    generation: Generation
    world_size: int
    attempt: int
    restart_count: int
    resume: str
    join: bool
    master_host: str  # empty: ``master_addr`` of the settings
    master_port: int
    spare: Literal["", "any", "fixed"] = ""  # a spare: for any rank, or only for the assigned one
    rank_table: str = ""  # path of this generation's rank table; empty: that of the settings
    root: str = ""  # where the job has saved so far; empty: nowhere


def log_root(run: RunDir, settings: RunSettings) -> str:
    """Return the directory that contains the ``attempt-NNN/`` directories with worker logs."""
    return settings.log_dir or str(run.path)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port on which no process listens at this moment.

    The kernel gives other processes ports for their outgoing connections. One of these may be taken before the caller
    listens on it, so the result is a port below them if there is one.
    """
    ports = range(_PORT_MIN, min(_PORT_MAX, _outgoing_from()))
    for _ in range(_TRIES if ports else 0):
        with suppress(OSError):
            return _bound(host, secrets.choice(ports))  # not `random`: a script may have seeded it
    return _bound(host, 0)


def _bound(host: str, port: int) -> int:
    with socket.socket(family_of(host)) as sock:
        sock.bind((host, port))
        return int(sock.getsockname()[1])


def _outgoing_from() -> int:
    """Return the first port that the kernel gives to outgoing connections; 0 if it is not known."""
    try:
        return int(_OUTGOING.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def thread_count(settings: RunSettings) -> int:
    """Return the number of OpenMP threads of each worker.

    The user's setting has precedence. Otherwise a single worker on the node gets all cores, and several workers get 1
    each, as in torchrun. With all cores each they would slow each other down.
    """
    said = settings.env.get("OMP_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS", "")
    if said.isdigit() and int(said) > 0:
        return int(said)
    return 1 if settings.nproc > 1 else len(os.sched_getaffinity(0))


def worker_env(run: RunDir, settings: RunSettings, order: SpawnOrder) -> dict[str, str]:
    """Return the environment of one worker: torchrun's and Holdfast's variables, overridden by the user's."""
    member = order.assignment
    group, here = settings.group(member.rank)
    groups = len(settings.nprocs) or order.world_size // settings.nproc
    return {
        "RANK": str(member.rank),
        "LOCAL_RANK": str(member.local_rank),
        "WORLD_SIZE": str(order.world_size),
        "LOCAL_WORLD_SIZE": str(here),
        "GROUP_RANK": str(group),
        "GROUP_WORLD_SIZE": str(groups),
        "ROLE_RANK": str(member.rank),
        "ROLE_WORLD_SIZE": str(order.world_size),
        "ROLE_NAME": settings.role,
        "MASTER_ADDR": order.master_host or settings.master_addr,
        "MASTER_PORT": str(order.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(order.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(settings.max_restarts),
        "TORCHELASTIC_RUN_ID": settings.job_id,
        # False: the agent serves no store at MASTER_PORT. With env:// and torch's own groups, rank 0 serves it.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": str(error_path(log_root(run, settings), order.attempt, member.rank)),
        "OMP_NUM_THREADS": str(thread_count(settings)),
        "HOLDFAST_RUN_DIR": str(run.path),
        "HOLDFAST_MEMBER_ID": str(member.member_id),
        "HOLDFAST_GENERATION": str(order.generation),
        "HOLDFAST_RESUME": order.resume,
        "HOLDFAST_JOB_ROOT": order.root,
        "HOLDFAST_JOIN": "1" if order.join else "",
        "HOLDFAST_PARTS": str(settings.workers // order.world_size),
        "HOLDFAST_SPARE": order.spare,
        "HOLDFAST_PAGE": str(run.page_path(member.member_id)),
        **_table_env(settings, order),
        **settings.env,
    }


def zygote_command(run: RunDir, settings: RunSettings) -> list[str]:
    """Return the command line that starts a zygote. Its last word reserves room for a process title."""
    return [settings.python or sys.executable, "-m", "holdfast.runtime.agent.zygote", str(run.path), ROOM]


def differing(run: RunDir, settings: RunSettings) -> frozenset[str]:
    """Return the names of the environment variables that may differ between two workers, or from the zygote."""
    member = Assignment(MemberId(0), 0, 0)
    order = SpawnOrder(
        member, NO_GENERATION, settings.workers, attempt=0, restart_count=0, resume="", join=False,
        master_host="", master_port=0,
    )  # fmt: skip
    same = {"HOLDFAST_RUN_DIR", *settings.env}
    if thread_count(settings) == 1:  # as in the zygote
        same.add("OMP_NUM_THREADS")
    return frozenset(worker_env(run, settings, order)) - same


def _table_env(settings: RunSettings, order: SpawnOrder) -> dict[str, str]:
    """Return the variables that a script written for Ascend's rank table reads; empty without a table."""
    if not settings.rank_table:
        return {}
    return {
        "RANK_TABLE_FILE": order.rank_table or settings.rank_table,
        "RANK_ID": str(order.assignment.rank),
        "RANK_SIZE": str(order.world_size),
        "DEVICE_ID": str(settings.device_ids[order.assignment.local_rank]),
    }


def spare_order(build: BuildSpare, settings: RunSettings) -> SpawnOrder:
    """Return the order to start a spare, which has no generation yet."""
    place = build.rank if build.rank != ANY_RANK else build.world_size - 1
    return SpawnOrder(
        Assignment(build.member_id, place, build.local_rank),
        build.generation,
        build.world_size,
        attempt=0,
        restart_count=0,
        resume="",
        join=True,
        master_host="",
        master_port=settings.master_port or free_port(),
        spare="any" if build.rank == ANY_RANK else "fixed",
    )


def worker_log(run: RunDir, settings: RunSettings, order: SpawnOrder) -> str:
    """Return the log file of one worker. For a spare, return the log file for the time before it becomes a member."""
    if order.spare:
        return str(Path(log_root(run, settings)) / "spares" / f"spare{order.assignment.member_id}.log")
    return str(log_path(log_root(run, settings), order.attempt, order.assignment.rank))


def open_worker_log(run: RunDir, settings: RunSettings, order: SpawnOrder) -> int:
    """Return a file descriptor that appends to the log of a worker; the caller closes it.

    Raises:
        OSError: the log cannot be made.
    """
    path = Path(worker_log(run, settings, order))
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return open_log(path)
