"""The user's state is that of the job: told once when ranks keep different things in it.

Theory. A checkpoint holds it once, and who takes a lost rank's place has that of another rank. What each rank keeps for
itself (its environment, its own losses) would be another rank's after a fault, without a word. So each rank says after
its first step what it has, by digests, and the first rank compares after the next one: by then everybody has voted
again, and so has spoken. Only ranks that hold the same tensors of the model are compared, as only these stand in for
each other, and only what each of them holds whole.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict

import xxhash

from holdfast.adapters.base import Adapter, Collected
from holdfast.runtime.client import Client
from holdfast.store.layout import Box
from holdfast.store.values import encode_values

log = logging.getLogger("holdfast")

PREFIX = "state."


class Common:
    """Compares the user's state of all ranks, once in the life of a process that began with the others."""

    def __init__(self, adapter: Adapter, client: Client | None) -> None:
        self._adapter = adapter
        self._client = None if client is None or client.joining or adapter.world_size == 1 else client
        self._key = ""

    def committed(self) -> None:
        """A step counts."""
        client, adapter = self._client, self._adapter
        if client is None:
            return
        if not self._key:
            collected = adapter.collect()
            if not collected.values.get("state"):
                self._client = None
                return
            self._key = f"holdfast/state/{client.generation}"
            words = json.dumps(digests(collected, adapter.rank, adapter.world_size))
            client.kv("append", (self._key,), f"{words}\n".encode())
            return
        self._client = None
        if adapter.rank == 0:
            said = client.kv("get", (self._key,)).value.decode().splitlines()
            for name in differing([json.loads(words) for words in said]):
                log.warning(
                    'holdfast: state "%s" is not the same on all ranks: it is that of the job, and who takes a lost '
                    "rank's place, or starts from a checkpoint, has that of another rank; what is one rank's belongs "
                    "into s.own (plain values), or is made from the number of the step",
                    name,
                )


def digests(collected: Collected, rank: int, world_size: int) -> tuple[str, dict[str, str]]:
    """Which part of the model this rank holds, and a digest of each item of the user's state."""
    state = collected.values["state"]
    totals = {name: xxhash.xxh3_64(encode_values(value, name)) for name, value in state.items()}
    part = xxhash.xxh3_64()
    for meta in collected.layout(rank, world_size).tensors:
        if not meta.fqn.startswith(PREFIX):
            part.update(meta.fqn.encode())
        elif meta.box == Box.whole(meta.shape):
            words = meta.fqn.removeprefix(PREFIX).split(".")
            owners = [name for at in range(len(words)) if (name := ".".join(words[: at + 1])) in totals]
            for name in owners[-1:]:
                totals[name].update(collected.view(meta.fqn, meta.box))
    return part.hexdigest(), {name: total.hexdigest() for name, total in totals.items()}


def differing(said: list[tuple[str, dict[str, str]]]) -> list[str]:
    """Names of what ranks of one part have different things in."""
    seen: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for part, items in said:
        for name, digest in items.items():
            seen[part, name].add(digest)
    return sorted({name for (_, name), found in seen.items() if len(found) > 1})
