"""What went wrong on one rank, for the others: they stop with its words, not with a riddle.

Theory. The ranks agree by a vote, which carries no text. So the rank that cannot go on writes its error under a key
before it votes, and a rank that has heard the result of the vote reads it.
"""

from __future__ import annotations

import json

from holdfast.errors import HoldfastError
from holdfast.runtime.worker.worker_client import WorkerClient

WHY_LENGTH_MAX = 4000
KEY_TIMEOUT_S = 600.0


def tell_why(client: WorkerClient | None, key: str, rank: int, error: Exception) -> None:
    """Before the ranks agree. Without a client there is no other rank."""
    if client is None:
        return
    message, hint = (error.message, error.hint) if isinstance(error, HoldfastError) else (str(error), "")
    told = [f"rank {rank}: {message}"[:WHY_LENGTH_MAX], hint[:WHY_LENGTH_MAX]]
    client.kv("set", (key,), json.dumps(told).encode())


def hear_why(client: WorkerClient | None, key: str) -> tuple[str, str]:
    """Rank and message, and the hint; of one of the ranks where several have told. Of none where a fault came first."""
    value = client.kv("get", (key,), timeout_s=KEY_TIMEOUT_S).value if client is not None else b""
    if not value:
        return "another rank cannot, its log says why", ""
    message, hint = json.loads(value)
    return message, hint
