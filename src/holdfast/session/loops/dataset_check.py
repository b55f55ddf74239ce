"""Comparison of the dataset of this rank with those of the other ranks, and of the job that wrote the checkpoint.

Theory. Ranks that share a sampler must have the same dataset. With a shorter one a rank ends its epoch earlier, and
some samples are trained on twice or never. The first rank publishes the identity of its dataset, and all others compare
with it. This needs no collective, so a newcomer does it alone. Ranks with their own data may have other data, but not
more of it: otherwise an epoch ends at another step on each rank, which causes one warning. A difference from the
checkpoint may be intended (more data), so it only causes a warning.
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
"""Key of the warning about lengths, written once in a run."""


def compare_with_ranks(client: WorkerClient | None, rank: int, loop: int, mine: DataIdentity) -> None:
    """Compare this dataset with that of the first rank that opened this loop.

    Raises:
        UsageError: the dataset of this rank has other data.
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
    """Warn about different lengths, on the first rank that finds them."""
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
    """Repeat, on rank 0 with its output on the console, the warning of another rank about lengths."""
    said = client.kv("get", (LENGTHS,)).value
    for found in json.loads(said) if said else ():
        if not found.startswith("rank 0 "):
            log.warning("holdfast: %s", found)


def compare_with_checkpoint(saved: object, now: DataIdentity) -> None:
    """Warn if the checkpoint was written by a job with another dataset; ``saved`` is its record there."""
    if not isinstance(saved, list) or len(saved) != 2:
        return
    if difference := now.differs(DataIdentity(saved[0], saved[1], now.shared)):
        log.warning(
            "holdfast: this is not the dataset that the checkpoint's job drew from: it has %s; the place in it means "
            "other samples now",
            difference,
        )
