"""The error of one rank, sent to the other ranks so that they stop with its text.

Theory. The ranks agree by a vote, which carries no text. So a rank that cannot continue writes its error into the
key-value store of the run before it votes. After the vote, the other ranks read the error there.
"""

from __future__ import annotations

import json

from holdfast.errors import HoldfastError
from holdfast.runtime.worker.worker_client import WorkerClient

WHY_LENGTH_MAX = 4000


def tell_why(client: WorkerClient | None, key: str, rank: int, error: Exception) -> None:
    """Publish the error of this rank under ``key``, before the ranks vote. Without a client (one rank), do nothing."""
    if client is None:
        return
    message, hint = (error.message, error.hint) if isinstance(error, HoldfastError) else (str(error), "")
    told = [f"rank {rank}: {message}"[:WHY_LENGTH_MAX], hint[:WHY_LENGTH_MAX]]
    client.kv("set", (key,), json.dumps(told).encode())


def hear_why(client: WorkerClient | None, key: str) -> tuple[str, str]:
    """Return the error that a rank has published under ``key``: the message, with the number of the rank, and the hint.

    If no rank has published an error, the message only refers to the log of another rank.
    """
    value = client.kv("get", (key,)).value if client is not None else b""
    if not value:
        return "another rank cannot, its log says why", ""
    message, hint = json.loads(value)
    return message, hint
