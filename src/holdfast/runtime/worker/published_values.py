"""Values that ranks publish for each other in their agents' key-value store.

A collective is not possible, because a newcomer cannot run one alone. Either the first rank publishes its values and
all others compare theirs, or one rank publishes and all others read.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from holdfast.errors import GroupError, ProtocolError
from holdfast.runtime.worker.worker_client import WorkerClient
from holdfast.store.format.json_values import decode_values, encode_values

log = logging.getLogger("holdfast")
WAIT_ENDS = {"fenced": "a recovery began", "orphaned": "launcher and agent were lost"}


def first_published(client: WorkerClient | None, key: str, mine: Sequence[object], what: str) -> list[Any]:
    """Publish the plain values ``mine`` under ``key``, unless another rank has published values there before.

    Return the values that were published first. Without a client these are ``mine``. If the agent answers with an
    error, the result is also ``mine``, after a warning that begins with ``what``, the values in words.

    Raises:
        ProtocolError: the first rank has published another number of values.
    """
    if client is None:
        return [*mine]
    reply = client.kv("compare_set", (key,), value=encode_values([*mine], key))
    if reply.error:
        log.warning("holdfast: %s not compared: %s", what, reply.error)
        return [*mine]
    first = decode_values(reply.value, key)
    if not isinstance(first, list) or len(first) != len(mine):
        raise ProtocolError(f"another rank has published nonsense under {key}")
    return first


def published(client: WorkerClient, key: str, when: str, wait_s: float = 0.0) -> bytes:
    """Return the bytes that a rank has published under ``key``; empty if there are none within ``wait_s`` seconds.

    Raises:
        GroupError: a recovery began, or the agent was lost. ``when`` is the end of the error message.
    """
    reply = client.kv("wait", (key,), timeout_s=wait_s)
    if reply.error not in WAIT_ENDS:
        reply = client.kv("get", (key,))
    if reply.error in WAIT_ENDS:
        raise GroupError(f"{WAIT_ENDS[reply.error]} {when}")
    return reply.value
