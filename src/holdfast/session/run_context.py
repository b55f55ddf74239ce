"""The facts about a run that a session needs."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from holdfast.runtime.agent.peer_replication import puller
from holdfast.runtime.node.run_settings import RunSettings
from holdfast.runtime.node.rundir import RunDir
from holdfast.runtime.worker.worker_client import WorkerClient
from holdfast.session.checkpoints.memory_tier import AUTO


class RunContext(NamedTuple):
    """The facts about a run that a session needs.

    Attributes:
        saves_as: id of the run in the names of its checkpoints.
        age_s: seconds since the run began.
        verify_every: number of steps in which all copies of the state are compared once; 0 means never.
        memory_every: steps between two states in the memory tier; 0 if no states are kept, AUTO if the tier decides.
        checkpoints: the default directory of checkpoints; None if there is none.
        shared: directory in shared memory that outlives this process; None if there is none.
        pull: function (rank, step) that fetches a state of the memory tier from another node, and returns False if no
            node has that state. None if the run has one node.
    """

    saves_as: str
    age_s: float = 0.0
    verify_every: int = 0
    memory_every: int = AUTO
    checkpoints: Path | None = None
    shared: Path | None = None
    pull: Callable[[int, int], bool] | None = None


def run_of(client: WorkerClient | None, library: bool) -> RunContext:
    """Return the facts about the run of this process. Without a client they describe a run of this process alone.

    Args:
        client: the connection to the agent; None in a job of one process without a launcher.
        library: the job has no launcher, and the session itself started the agent.
    """
    if client is None or client.run_dir is None:
        return RunContext(f"solo-{secrets.token_hex(4)}")
    place, about = RunDir(client.run_dir), RunSettings.load(client.run_dir)
    return RunContext(
        about.saves_as,
        time.time() - about.created_at,
        about.verify_every,
        about.memory_every,
        None if library else place.checkpoints,
        None if library else place.pages(),
        puller(place, about.node) if about.several and not library else None,
    )
