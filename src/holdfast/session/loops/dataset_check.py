"""Comparison of this rank's dataset with those of the other ranks, and with that of the job in the checkpoint.

Theory. Ranks that share a sampler must have the same dataset. A rank with a shorter dataset would end its epoch
earlier, and some samples would be used twice or never. The rank that first opens a loop publishes the identity of its
dataset, and all other ranks compare theirs with it. This needs no collective, so a newcomer can compare alone. Ranks
without a common sampler may have different data, but not different numbers of samples. With different numbers an epoch
ends at different steps on the ranks, which causes one warning. A difference from the checkpoint may be intended (more
data), so it only causes a warning.
"""

from __future__ import annotations

import json
import logging

from holdfast.errors import UsageError
from holdfast.frameworks.common.adapter import DataIdentity
from holdfast.runtime.worker.published_values import first_published
from holdfast.runtime.worker.worker_client import WorkerClient
from holdfast.text import plural

log = logging.getLogger("holdfast")
LENGTHS = "holdfast/data/lengths"
"""Key, in the run's key-value store, of the one warning about different numbers of samples."""


def compare_with_ranks(client: WorkerClient | None, rank: int, loop: int, mine: DataIdentity) -> None:
    """Compare this rank's dataset with that of the rank that first opened this loop.

    Args:
        loop: number of the loop over steps in the script.
        mine: the identity of this rank's dataset.

    Raises:
        UsageError: the datasets differ, although they must be the same.
    """
    what = "the data of the ranks was"
    other, *words = first_published(client, f"holdfast/data/{loop}", [rank, *mine], what)
    theirs = DataIdentity(*words)
    if not mine.shared:
        _tell_lengths(client, rank, mine.length, other, theirs.length)
    elif difference := mine.differs(theirs):
        raise UsageError(
            f"rank {rank} and rank {other} draw from different datasets: here are {difference}",
            hint="give every rank the same dataset (the same files on every node)",
        )


def _tell_lengths(client: WorkerClient | None, rank: int, mine: int, other: int, theirs: int) -> None:
    """Warn that two ranks have different numbers of samples. Only the first rank that finds a difference warns.

    Args:
        rank, mine: this rank and its number of samples.
        other, theirs: the other rank and its number of samples.
    """
    if mine == theirs:
        return
    found = (
        f"rank {rank} draws from {plural(mine, 'sample')}, rank {other} from {theirs}, and no sampler shares them: an "
        "epoch ends at another step on each rank; give every rank the same dataset with a DistributedSampler, or as "
        "many samples"
    )
    if first_published(client, LENGTHS, [found], "the lengths of the ranks' data were") == [found]:
        log.warning("holdfast: %s", found)


def repeat_on_first(client: WorkerClient) -> None:
    """Repeat another rank's warning about numbers of samples on rank 0, whose output is on the console."""
    said = client.kv("get", (LENGTHS,)).value
    for found in json.loads(said) if said else ():
        if not found.startswith("rank 0 "):
            log.warning("holdfast: %s", found)


def compare_with_checkpoint(saved: object, now: DataIdentity) -> None:
    """Warn if the checkpoint was written with another dataset.

    Args:
        saved: length and content digest of the dataset, from the checkpoint; any other value means that they are not
            known.
        now: the identity of the present dataset.
    """
    if not isinstance(saved, list) or len(saved) != 2:
        return
    if difference := now.differs(DataIdentity(saved[0], saved[1], now.shared)):
        log.warning(
            "holdfast: this is not the dataset that the checkpoint's job drew from: it has %s; its position in the "
            "data means other samples now",
            difference,
        )
