"""The place where all processes of one job save, also those that start later.

Many scripts name their directory by the time of the start. A replacement, or a process after a restart of all ranks,
then names another directory than the ranks that began the job. Its shares would complete no checkpoint, and it would
not find the checkpoints of the job. So the place belongs to the job. The first rank publishes its own, and a
replacement takes that one. After a restart of all ranks, the controller names the place of the sessions before. So
does a new start with the same run id, as a scheduler makes it. But there the script may name a place with checkpoints
on purpose; that place is taken. Ranks of the first start must agree, because no rank knows which of them is right.

Invariant: two ranks on one host never save in different places.
"""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

from holdfast.errors import UsageError
from holdfast.runtime.worker.published_values import first_published
from holdfast.runtime.worker.worker_client import WorkerClient
from holdfast.store.backends.location import Place, place_of
from holdfast.store.manage.checkpoint_root import Root

log = logging.getLogger("holdfast")
_KEY = "holdfast/root"


def root_of_job(client: WorkerClient, root: Place | None, *, later: bool) -> Place | None:
    """Return the place where this process saves.

    Args:
        client: the connection to the agent.
        root: directory or URL that this process names; None to save nothing.
        later: this process is a replacement, or all ranks were started again.

    Raises:
        UsageError: another rank of the same start, on this host, names another place. Other hosts may mount the same
            place at another path.
        StoreUnreachable: the place cannot be read.
    """
    if client.saves.root and _is_here(client.saves.root) and (later or _is_empty(root)):
        root = _taken(client, root, client.saves.root)
    host, mine = socket.gethostname(), "" if root is None else str(root)
    what = "the places where the ranks save were"
    said = first_published(client, _KEY, [client.rank, host, mine, _resolved(root)], what)
    rank, where, first = int(said[0]), str(said[1]), str(said[2])
    if said[3] == _resolved(root):
        return root
    if later and first and (where == host or _is_here(first)):
        return _taken(client, root, first)
    if where == host:
        raise UsageError(
            f"rank {client.rank} saves in {mine or 'no place'}, rank {rank} in {first or 'no place'}: "
            "no checkpoint would be complete",
            hint="give all ranks the same place: checkpoint= an absolute path, or before the script changes its "
            "directory",
        )
    return root


def _taken(client: WorkerClient, root: Place | None, first: str) -> Place:
    """Return the place ``first`` of the job, after a warning if this process names another one."""
    taken = place_of(first)
    if _resolved(taken) != _resolved(root):
        log.warning(
            "holdfast: rank %d was started again and names %s; it saves in %s, as the job did before",
            client.rank, root or "no place for checkpoints", taken,
        )  # fmt: skip
    return taken


def _resolved(root: Place | None) -> str:
    """Return the place as text: a path without symbolic links, so that two spellings of one directory are equal."""
    return os.path.realpath(root) if isinstance(root, Path) else str(root or "")


def _is_empty(root: Place | None) -> bool:
    return root is None or not Root(root).names()


def _is_here(text: str) -> bool:
    """Return True if the place of another host is there on this host too."""
    place = place_of(text)
    return not isinstance(place, Path) or place.is_dir()
