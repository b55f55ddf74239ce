"""Library mode: the script was started by torchrun, srun or mpirun, so there is no agent yet.

The process with local rank 0 starts one (``RunSettings.library``: it watches, saves and never starts workers) in its
own session, below a pointer file whose name all local ranks derive from the same variables. A pointer counts only
while the process that wrote it lives, so a run before this one under the same address cannot be mistaken for it.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
import time
from pathlib import Path

import msgspec

from holdfast.core.ids import Generation, MemberId
from holdfast.core.page import Word
from holdfast.errors import AuthError, GroupError, UnsupportedError
from holdfast.runtime.client import Client
from holdfast.runtime.evidence import offer_stacks, stacks_path
from holdfast.runtime.lifeline import hold
from holdfast.runtime.owners import doubt
from holdfast.runtime.page import Page
from holdfast.runtime.pids import start_ticks
from holdfast.runtime.rundir import RunDir, write_private
from holdfast.runtime.settings import RunSettings

FIRST_GENERATION = Generation(1, 1)
JOIN_TIMEOUT_S = 30.0
POLL_S = 0.02
_VARIABLES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID",
    "MS_SCHED_HOST",
    "MS_SCHED_PORT",
)


class Pointer(msgspec.Struct, frozen=True):
    """Who started the agent of these local ranks, and where its run directory is."""

    run_dir: str
    pid: int
    started: int  # start time of ``pid``, in clock ticks since boot


def join_or_start_agent(*, rank: int, local_rank: int, world_size: int, local_world_size: int) -> Client:
    """The started client of this process; local rank 0 starts the agent first, below ``runs`` in the working directory.

    Args:
        rank, local_rank, world_size, local_world_size: as the launcher set them.

    Raises:
        UnsupportedError: the job has more than one node.
        GroupError: the agent did not come up in ``JOIN_TIMEOUT_S``.
        AuthError: another user has made what names the agent.
        UsageError: ``runs`` cannot be written.
    """
    if world_size != local_world_size:
        raise UnsupportedError(
            f"library mode serves one node, this job has {world_size} ranks, {local_world_size} of them here",
            hint="start the script with `holdfast run`",
        )
    base = Path("runs").absolute()
    pointer = base / f".library-{_key()}.json"
    if local_rank == 0:
        run = _start_agent(base, pointer, world_size)
    else:
        run = _find_agent(pointer)
    member_id = MemberId(rank + 1)
    page = Page.create(
        run.page_path(member_id), generation=FIRST_GENERATION.pack(), member=member_id, rank=rank
    )
    page[Word.PID] = os.getpid()
    client = Client(
        member_id=member_id,
        generation=FIRST_GENERATION,
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        page=page,
        run_dir=run.path,
    )
    hold(page.path)
    client.start()
    offer_stacks(stacks_path(run, member_id), page)
    return client


def _key() -> str:
    text = "|".join(f"{name}={os.environ.get(name, '')}" for name in _VARIABLES) + f"|{os.getuid()}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _start_agent(base: Path, pointer: Path, world_size: int) -> RunDir:
    # In containers that share a directory the process numbers are equal, too.
    run_id = f"library-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{secrets.token_hex(2)}"
    run = RunDir(base / run_id)
    run.create()
    RunSettings(
        run_id=run_id,
        target=sys.argv[0] or "python",
        args=tuple(sys.argv[1:]),
        command=tuple(sys.orig_argv),
        created_at=time.time(),
        nproc=world_size,
        library=True,
    ).save(run.path)
    log = str(run.path / "agent.log")
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    # No Popen: its object would complain about a running child when the script ends; nobody waits for this one.
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "holdfast.runtime.agentd", str(run.path)],
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


def _check_owner(path: Path) -> None:
    """What another user has put there may not lead this process to an agent. Raises: AuthError."""
    why = doubt(path)
    if why:
        raise AuthError(
            f"{path} {why}: the agent it names is not trusted", hint="start in a directory of your own"
        )


def _find_agent(pointer: Path) -> RunDir:
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            found = msgspec.json.decode(pointer.read_bytes(), type=Pointer)
        except (OSError, msgspec.MsgspecError):
            found = None
        if found is not None and found.started == start_ticks(found.pid):
            _check_owner(pointer)
            _check_owner(Path(found.run_dir))
            return RunDir(found.run_dir)
        time.sleep(POLL_S)
    raise GroupError(
        f"local rank 0 started no agent within {JOIN_TIMEOUT_S:g} s (looked at {pointer})",
        hint="open the session on every local rank, from the same working directory",
    )
