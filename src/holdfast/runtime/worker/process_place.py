"""The place of this process in its job, from the environment, the rank table that it names, or an agent.

Under ``holdfast run`` the agent has sent it. In all other processes :func:`holdfast.core.launch_environment.seat_of`
reads it from the variables of the launcher.
"""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.core.launch_environment import RANK_TABLE, ProcessPlace, seat_of
from holdfast.runtime.rank_table.table import read, refusal
from holdfast.runtime.worker.worker_client import WorkerClient


def seat_here(known: tuple[int, int] | None = None) -> ProcessPlace:
    """Return the place of this process in its job, under any launcher.

    Args:
        known: rank and size of the framework's own group, if it has one already.

    Raises:
        UsageError: the variables are incomplete, no numbers, or contradict each other or ``known``; the rank table has
            mistakes.
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
    """Return rank and world size of this process; see :func:`seat_here`, also for the errors."""
    seat = seat_here(known)
    return seat.rank, seat.world_size
