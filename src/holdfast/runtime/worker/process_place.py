"""The place of this process in its job (rank, world size, local rank), from one of three sources.

Under ``holdfast run`` the agent has sent the place. In all other processes
:func:`holdfast.core.launch_environment.seat_of` reads the place from the environment variables of the launcher, or from
the rank table that a variable names.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from holdfast.core.launch_environment import RANK_TABLE, ProcessPlace, seat_of
from holdfast.errors import UsageError
from holdfast.runtime.rank_table.table import read, refusal
from holdfast.runtime.worker.worker_client import WorkerClient


def seat_here(known: tuple[int, int] | None = None) -> ProcessPlace:
    """Return the place of this process in its job, under any launcher.

    Args:
        known: rank and size of the framework's own group, if it has one already.

    Raises:
        UsageError: the variables are incomplete, are not numbers, or contradict each other or ``known``; the rank
            table has mistakes.
    """
    client, env = WorkerClient.current(), os.environ
    if client is not None:
        rank, world_size = known or (client.rank, client.world_size)
        return ProcessPlace(rank, world_size, client.local_rank, 0, said=f"rank {rank} of {world_size}")
    path = env.get(RANK_TABLE, "")
    if path and (env.get("RANK_ID") or env.get("RANK_SIZE") or not seat_of(env, known=known).said):
        found = read(Path(path))
        if found.table is None:
            raise refusal(Path(path), found.mistakes)
        hosts = [[device.rank for device in server.devices] for server in found.table.servers]
        return seat_of(env, known=known, hosts=hosts)
    return seat_of(env, known=known)


def place_here(known: tuple[int, int] | None = None) -> tuple[int, int]:
    """Return (rank, world size) of this process.

    ``known``: rank and size of the framework's own group. The errors are those of :func:`seat_here`.
    """
    seat = seat_here(known)
    return seat.rank, seat.world_size


def refuse_started_by_script() -> None:
    """Refuse to run as a rank that rank 0 has started by running the script again.

    Fabric and Lightning start ranks in this way without a launcher. Rank 0 was started alone, so its process groups
    are torch's own and not Holdfast's. In these groups rank 0 would wait for this rank forever.

    Raises:
        UsageError: this process is such a rank.
    """
    if WorkerClient.current() is not None or "LOCAL_RANK" not in os.environ:
        return
    try:
        seat_of(os.environ)
    except UsageError:
        if _is_run_again(sys.argv, os.getppid()):
            raise UsageError(
                f"this process (LOCAL_RANK={os.environ['LOCAL_RANK']}) was started by the script itself, not by a "
                "launcher: rank 0 does not know that it is one of several",
                hint=f"holdfast run --nproc-per-node {os.environ.get('WORLD_SIZE', 'N')} "
                f"{os.path.basename(sys.argv[0])}, or torchrun; the script stays as it is",
            ) from None


def _is_run_again(argv: list[str], parent: int) -> bool:
    """Return True if the parent process is an interpreter that runs the same script with the same arguments."""
    command: list[str] = []
    directory = Path(f"/proc/{parent}/cwd")
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{parent}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    at = len(command) - len(argv)
    if at < 1 or command[at + 1 :] != argv[1:]:
        return False
    same = command[at - 1] == "-m" or os.path.realpath(directory / command[at]) == os.path.realpath(argv[0])
    return same and not any((directory / option).is_file() for option in command[1:at])
