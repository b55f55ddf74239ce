"""Library mode: a script that was started by torchrun, srun, mpirun or a shell loop starts its agent itself.

The process with local rank 0 starts the agent in a new process session. With ``RunSettings.library``, the agent watches
and saves, but never starts workers. The process with local rank 0 also writes a pointer file, which names the run
directory. All local ranks derive the name of the pointer file from the same environment variables. A pointer file is
valid only while the process that wrote it lives. So the pointer file of an earlier run with the same variables is never
used. Pointer files are in a private directory of this user, because a shell loop may start each rank in another working
directory. In a job of several nodes each node has an agent; ``library_nodes.py`` connects these agents.

Invariant: two processes never take the same rank of one agent. If two jobs run with the same variables, the later job
is refused.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from holdfast.core.ids import Generation, MemberId
from holdfast.core.launch_environment import RANK_TABLE, ProcessPlace
from holdfast.core.protocol.status_page import Word
from holdfast.errors import HINTS_OF_THE_MACHINE, GroupError, UsageError
from holdfast.runtime.node.death_watch import hold
from holdfast.runtime.node.hang_evidence import offer_stacks
from holdfast.runtime.node.process_info import start_ticks
from holdfast.runtime.node.run_settings import RunSettings
from holdfast.runtime.node.rundir import RunDir, write_private
from holdfast.runtime.node.stack_texts import stacks_path
from holdfast.runtime.node.status_page import Page
from holdfast.runtime.worker.library_nodes import (
    JOIN_S,
    Exchange,
    LibraryNodes,
    agree,
    refuse_unknown,
    wait_for_job,
)
from holdfast.runtime.worker.pointer_directory import check_owner, pointer_directory
from holdfast.runtime.worker.torchrun_root import root_before
from holdfast.runtime.worker.worker_client import JobSaves, WorkerClient

FIRST_GENERATION = Generation(1, 1)
JOIN_TIMEOUT_S = 30.0
POLL_S = 0.02
_OF_A_START = ("TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", RANK_TABLE)
_OF_A_JOB = (
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "SLURM_STEP_ID",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "MS_SCHED_PORT",
)
"""Environment variables that differ between two jobs at the same time.

If none of them is set, the id of the process session is used instead.
"""
_ADDRESSES = ("MASTER_ADDR", "MS_SCHED_HOST")


class Pointer(msgspec.Struct, frozen=True):
    """A pointer to the agent of one node: the run directory, and the pid of the process that started the agent."""

    run_dir: str
    pid: int
    started: int  # start time of ``pid``, in clock ticks since boot


def join_or_start_agent(seat: ProcessPlace, exchange: Exchange | None = None) -> WorkerClient:
    """Return the started client of this process.

    Local rank 0 first starts the agent, with a run directory in ``./runs``.

    Args:
        seat: the place of this process in the job, from the variables of its launcher.
        exchange: returns sums over all ranks without an agent; None if the framework has no such function, so the job
            may have only one node.

    Raises:
        UnsupportedError: the job has several nodes, and either no ``exchange`` or nodes of different sizes.
        UsageError: another process has the same rank, or another job the same variables; ``runs`` cannot be written, or
            the pointer file cannot be read.
        GroupError: the agent did not start within ``JOIN_TIMEOUT_S``, or the agents of the nodes did not meet.
        AuthError: another user has made the pointer or the run directory.
        PeerLost: a rank of another node is gone.
    """
    nodes = None
    if not seat.one_node:
        refuse_unknown(seat, may_exchange=exchange is not None)
        assert exchange is not None, "refused above"
        nodes = agree(seat, exchange)
    pointer = pointer_directory() / f"library-{_key(seat, nodes)}.json"
    run = _start_agent(pointer, seat, nodes) if seat.local_rank == 0 else _find_agent(pointer)
    if nodes is not None:
        wait_for_job(run)
    member_id = MemberId(seat.rank + 1)
    try:
        page = Page.create(
            run.page_path(member_id), generation=FIRST_GENERATION.pack(), member=member_id, rank=seat.rank
        )
    except FileExistsError as error:
        raise UsageError(
            f"another process is rank {seat.rank} of {run.path} already; this one has {seat.said}",
            hint="give each process a rank of its own; for two jobs at the same time: another MASTER_PORT for each",
        ) from error
    page[Word.PID] = os.getpid()
    client = WorkerClient(
        member_id=member_id,
        generation=FIRST_GENERATION,
        rank=seat.rank,
        local_rank=seat.local_rank,
        world_size=seat.world_size,
        local_world_size=seat.local_world_size,
        page=page,
        run_dir=run.path,
        saves=JobSaves(root_before(), ""),
    )
    hold(page.path)
    client.start()
    offer_stacks(stacks_path(run, member_id), page)
    return client


def _key(seat: ProcessPlace, nodes: LibraryNodes | None) -> str:
    env = os.environ
    known = {name: env.get(name, "") for name in (*_OF_A_START, *_OF_A_JOB, *_ADDRESSES)}
    if not any(known[name] for name in _OF_A_JOB):
        known["session"] = str(os.getsid(0))
    known["node"] = str(None if nodes is None else nodes.number)
    text = "|".join(f"{name}={value}" for name, value in known.items()) + f"|{seat.world_size}|{os.getuid()}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _start_agent(pointer: Path, seat: ProcessPlace, nodes: LibraryNodes | None) -> RunDir:
    _refuse_twice(pointer, seat)
    base = Path("runs").absolute()
    # In containers that share a directory two processes can have the same pid.
    run_id = f"library-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{secrets.token_hex(2)}"
    run = RunDir(base / run_id)
    run.create(b"" if nodes is None else nodes.token)
    settings = RunSettings(
        run_id=run_id,
        target=sys.argv[0] or "python",
        args=tuple(sys.argv[1:]),
        command=tuple(sys.orig_argv),
        created_at=time.time(),
        nproc=seat.local_world_size,
        library=True,
    )
    if nodes is not None:
        settings = msgspec.structs.replace(
            settings,
            nnodes=nodes.total,
            nnodes_max=nodes.total,
            node=f"node{nodes.number}",
            contacts=(nodes.contact,),
            bind=nodes.address,
            join_s=JOIN_S,
        )
    settings.save(run.path)
    log = str(run.path / "agent.log")
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    # No Popen: its object would warn about a running child when the script ends; this child is never waited for.
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "holdfast.runtime.agent.agentd", str(run.path)],
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, log, append, 0o600),
            (os.POSIX_SPAWN_OPEN, 2, log, append, 0o600),
        ],
        setsid=True,
    )
    write_private(pointer, msgspec.json.encode(Pointer(str(run.path), os.getpid(), start_ticks(os.getpid()))))
    return run


def _refuse_twice(pointer: Path, seat: ProcessPlace) -> None:
    """Remove the pointer files of ended processes. A pointer file of another job that cannot be read stays.

    Raises:
        UsageError: a living process has written ``pointer``, or ``pointer`` cannot be read.
    """
    found = _read(pointer)
    if found is not None:
        raise UsageError(
            f"the process {found.pid} has started a job with the same variables, and it still runs "
            f"({found.run_dir}); this one has {seat.said}",
            hint="give each process a rank of its own; for two jobs at the same time: another MASTER_PORT for each",
        )
    for path in pointer.parent.glob("library-*.json"):
        with suppress(FileNotFoundError, UsageError):
            if _read(path) is None:
                path.unlink()


def _read(pointer: Path) -> Pointer | None:
    """Return the pointer to a run (directory and agent) in a file.

    The result is None if there is no such file, or if its writer has ended.

    Raises:
        UsageError: the file cannot be read, or it is not known whether its writer still runs.
    """
    try:
        found = msgspec.json.decode(pointer.read_bytes(), type=Pointer)
        return found if found.started == start_ticks(found.pid) else None
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
    except OSError as error:
        raise UsageError(
            f"cannot read {pointer}, which names the agent of this job, or the state of its writer: {error.strerror}",
            hint=HINTS_OF_THE_MACHINE.get(error.errno or 0, "see what is in the place of this file"),
        ) from error


def _find_agent(pointer: Path) -> RunDir:
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while time.monotonic() < deadline:
        found = _read(pointer)
        if found is not None:
            check_owner(pointer)
            check_owner(Path(found.run_dir))
            return RunDir(found.run_dir)
        time.sleep(POLL_S)
    raise GroupError(
        f"local rank 0 started no agent within {JOIN_TIMEOUT_S:g} s (looked at {pointer})",
        hint="open the session on every local rank; where the ranks are on several nodes, set LOCAL_RANK and "
        "LOCAL_WORLD_SIZE, or start the script with `holdfast run`",
    )
