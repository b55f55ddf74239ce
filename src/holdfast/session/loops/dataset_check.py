"""Whether all ranks, and the job that wrote the checkpoint, draw from the same data.

Theory. Ranks that a sampler deals to must have the same dataset: one that is shorter ends its epoch earlier, other
samples are trained on twice or never. The first rank to come says what it has, all others compare: no collective, so a
newcomer does it alone. Ranks that bring data of their own may have other data, but not more of it: an epoch ends on
each rank at another step then, which is said once. With the checkpoint a difference may be meant (more data), so it is
only said.
"""

from __future__ import annotations

import logging
from typing import Any

from holdfast.errors import ProtocolError, UsageError
from holdfast.frameworks.common.adapter import DataIdentity
from holdfast.runtime.worker.worker_client import WorkerClient
from holdfast.store.format.json_values import decode_values, encode_values
from holdfast.text import plural

log = logging.getLogger("holdfast")
LENGTHS = "holdfast/data/lengths"
"""Key of what is said about them, once in a run."""


def compare_with_ranks(client: WorkerClient | None, rank: int, loop: int, mine: DataIdentity) -> None:
    """Compare with what the first rank that opened this loop has.

    Raises:
        UsageError: it has other data.
    """
    if client is None:
        return
    words = encode_values([rank, *mine], "data")
    reply = client.kv("compare_set", (f"holdfast/data/{loop}",), value=words)
    if reply.error:
        log.warning("holdfast: the data of the ranks was not compared: %s", reply.error)
        return
    other, *theirs = _words(reply.value)
    if not mine.shared:
        _tell_lengths(client, rank, mine.length, int(other), int(theirs[0]))
    elif difference := mine.differs(DataIdentity(*theirs)):
        raise UsageError(
            f"rank {rank} and rank {other} draw from different datasets: here are {difference}",
            hint="give every rank the same dataset (the same files on every node)",
        )


def _tell_lengths(client: WorkerClient, rank: int, mine: int, other: int, theirs: int) -> None:
    """Warn, on the first rank that finds it."""
    if mine == theirs:
        return
    found = (
        f"rank {rank} draws from {plural(mine, 'sample')}, rank {other} from {theirs}, and no sampler shares them: an "
        "epoch ends at another step on each rank; give every rank the same dataset with a DistributedSampler, or as "
        "many samples"
    )
    reply = client.kv("compare_set", (LENGTHS,), value=found.encode())
    if not reply.error and reply.value == found.encode():
        log.warning("holdfast: %s", found)


def repeat_on_first(client: WorkerClient) -> None:
    """Rank 0, whose output is on the console, says what another rank has found about lengths."""
    found = client.kv("get", (LENGTHS,)).value.decode()
    if found and not found.startswith("rank 0 "):
        log.warning("holdfast: %s", found)


def compare_with_checkpoint(saved: object, now: DataIdentity) -> None:
    """Warn when the checkpoint was written by a job that drew from other data; ``saved`` as it was written."""
    if not isinstance(saved, list) or len(saved) != 2:
        return
    if difference := now.differs(DataIdentity(saved[0], saved[1], now.shared)):
        log.warning(
            "holdfast: this is not the dataset that the checkpoint's job drew from: it has %s; the place in it means "
            "other samples now",
            difference,
        )


def _words(data: bytes) -> list[Any]:
    words = decode_values(data, "data of another rank")
    if not isinstance(words, list) or len(words) != 4:
        raise ProtocolError("another rank said nonsense of its data")
    return words
