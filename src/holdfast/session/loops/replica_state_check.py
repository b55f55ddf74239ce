"""Comparison of the user's state, the buffers and the first batches between ranks, with one warning per difference.

Theory. A checkpoint holds the user's state and the buffers once, and the replacement of a lost rank gets the values of
another rank. If a rank keeps values of its own there (its environment, its own losses, buffers that DDP does not
broadcast), a fault would silently replace them. So each rank publishes digests after its first step, and rank 0
compares them after the next step. By then every rank has voted again, and so has published. Only ranks that hold the
same tensors of the model are compared, because only these can replace each other. Only items that a rank holds
completely are compared.

A variable that is not saved (a counter of the script) may decide when the user's state changes. A replacement then
changes the state at other steps than the other ranks. So the user's state is compared again after the first step of
each later generation, and at the end, before the last save. The vote of that save comes after all ranks have published.

Rank 0 reads the digests of all ranks in one message. If the names of a rank take too much room in it, the rank
publishes one digest of all buffers and one of all items instead.

Ranks that train different replicas of the model should train on different data. If all replicas have drawn the same
batch for the same step, no sampler divides the data, and each sample counts several times.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from typing import Any

import xxhash

from holdfast.core.ids import Generation
from holdfast.core.protocol.messages import FRAME_SIZE_BYTES_MAX
from holdfast.errors import HoldfastError
from holdfast.frameworks.common.adapter import Collected, StateAdapter
from holdfast.frameworks.common.optional_abilities import ComparesCopies, DigestsBatches
from holdfast.runtime.worker.script_attributes import attribute_of
from holdfast.runtime.worker.worker_client import WorkerClient
from holdfast.session.loops.dataset_check import repeat_on_first
from holdfast.store.format.json_values import encode_values
from holdfast.store.layouts.layout import Box
from holdfast.text import plural

log = logging.getLogger("holdfast")

PREFIX = "state."
END = "holdfast/state/end"
SAID_SIZE_BYTES_MAX = FRAME_SIZE_BYTES_MAX // 2
"""Largest size in bytes of the published digests of all ranks together, which are read in one message."""
Said = tuple[str, dict[str, str], dict[str, str], list[int]]
"""The digests that a rank publishes.

In this order: a digest of the names of its tensors, digests of the items of the user's state by name, digests of the
buffers by name, and a list. The list has the number of the rank's model replica and the digests of the batches of its
first step. It is empty if no loader draws batches.
"""


_ADVICE = (
    "also save the values that decide when it changes, or derive them from step.number (a variable that counts steps "
    "starts again in a process that joins)"
)


class ReplicaStateCheck:
    """The comparison of the user's state between all ranks: at the first steps, after recoveries and at the end.

    Args:
        adapter: the framework.
        client: the connection to the agent; if None, nothing is compared.
        state: the user's state by name. An item with a true attribute ``may_differ`` is left out.
    """

    def __init__(self, adapter: StateAdapter, client: WorkerClient | None, state: Mapping[str, Any]) -> None:
        self._adapter = adapter
        self._left_out = {name for name, item in state.items() if attribute_of(item, "may_differ", False)}
        self._peers = None if client is None or adapter.world_size == 1 else client
        self._recovered = client is not None and client.joining  # the first steps of the job are over
        self._key = self._key_at_end = ""
        self._compared: Generation | None = None  # the newest generation whose ranks have been compared
        self._named: set[str] = set()  # items that differed before

    def committed(self, drawn: Sequence[int]) -> None:
        """Publish this rank's digests after its first committed step of a generation.

        After its second committed step, rank 0 compares the digests of all ranks.

        Args:
            drawn: digests of the batches of the step; empty if they are not known.
        """
        client, adapter = self._peers, self._adapter
        if client is None or client.generation == self._compared:
            return
        key = f"holdfast/state/{client.generation}"
        if self._key != key:
            self._key = key
            part, items, buffers = digests(adapter, adapter.collect(), self._left_out)
            here = [adapter.copy.number, *drawn] if drawn and isinstance(adapter, DigestsBatches) else []
            self._publish(client, key, (part, items, *(({}, []) if self._recovered else (buffers, here))))
            return
        self._compared = client.generation
        if adapter.rank == 0:
            said_by = published(client, key)
            client.kv("delete", (key,))  # otherwise each recovery would leave one
            if not self._recovered:
                repeat_on_first(client)
                _warn_of_buffers_and_batches(said_by)
            self._warn_of_items(said_by)
        self._recovered = True

    def _warn_of_items(self, said_by: list[Said]) -> None:
        found = set(differing([(part, items) for part, items, *_ in said_by])) - self._named
        self._named |= found
        for name in sorted(found):
            if self._recovered:
                log.warning(
                    'holdfast: state "%s" is not the same on all ranks since a recovery: %s', name, _ADVICE
                )
            else:
                log.warning(
                    'holdfast: state "%s" is not the same on all ranks: a replacement, or a rank that starts from a '
                    "checkpoint, gets that of another rank; keep the values of one rank in s.own (plain values), or "
                    "compute them from the number of the step",
                    name,
                )

    def publish_end(self) -> None:
        """Publish this rank's digests of the user's state at the end of the job."""
        self._key_at_end = ""
        if self._peers is None:
            return
        try:
            collected = self._adapter.collect()
        except HoldfastError as error:
            log.debug("holdfast: the state at the end is not compared: %s", error)  # the save reports it
            return
        part, items, _ = digests(self._adapter, collected, self._left_out)
        self._key_at_end = f"{END}/{self._peers.generation}"
        self._publish(self._peers, self._key_at_end, (part, items, {}, []))

    def compare_end(self) -> None:
        """On rank 0, compare the digests that all ranks have published at the end of the job. Warn of differences."""
        if self._peers is None or not self._key_at_end or self._adapter.rank:
            return
        for name in differing(
            [(part, found) for part, found, *_ in published(self._peers, self._key_at_end)]
        ):
            if name not in self._named:
                log.warning(
                    'holdfast: state "%s" is not the same on all ranks at the end, and the checkpoint holds that of '
                    "one rank: %s",
                    name,
                    _ADVICE,
                )

    def _publish(self, client: WorkerClient, key: str, said: Said) -> None:
        client.kv("append", (key,), spoken(said, SAID_SIZE_BYTES_MAX // self._adapter.world_size))


def _warn_of_buffers_and_batches(said_by: list[Said]) -> None:
    if copies := all_alike([drawn for *_, drawn in said_by]):
        log.warning(
            "holdfast: all %d copies of the model have drawn the same batch for the first step. If the script "
            "splits neither the batch nor the model itself, each sample counts %d times: give the loader a "
            "DistributedSampler, or let each rank draw data of its own",
            copies,
            copies,
        )
    if buffers := differing([(part, found) for part, _, found, _ in said_by]):
        log.warning(
            "holdfast: not the same on all ranks: %s, %s first: a replacement, or a rank that starts from a "
            "checkpoint, gets the buffers of another rank; DDP(broadcast_buffers=True) keeps them equal",
            plural(len(buffers), "buffer"),
            buffers[0],
        )


def published(client: WorkerClient, key: str) -> list[Said]:
    """Return the digests that the ranks have published under ``key``."""
    return [json.loads(words) for words in client.kv("get", (key,)).value.decode().splitlines()]


def spoken(said: Said, size_bytes_max: int) -> bytes:
    """Return the digests ``said`` as the line of JSON that this rank publishes.

    If that line is longer than ``size_bytes_max``, return a line with one digest of all items and one of all buffers.
    """
    line = f"{json.dumps(said)}\n".encode()
    if len(line) <= size_bytes_max:
        return line
    part, items, buffers, drawn = said
    return f"{json.dumps((part, _together(items), _together(buffers), drawn))}\n".encode()


def _together(found: Mapping[str, str]) -> dict[str, str]:
    total = xxhash.xxh3_64(json.dumps(found, sort_keys=True).encode())
    return {f"one of {len(found)}": total.hexdigest()} if found else {}


def all_alike(drawn: Sequence[Sequence[int]]) -> int:
    """Return the number of model replicas if all have drawn the same batches.

    The result is 0 if they have not, or if it is not known.

    Args:
        drawn: for each rank, the number of its replica, followed by the digests of its batches of one step. A digest
            of 0 says that the content of a batch is not known.
    """
    if not all(drawn) or any(0 in found for _, *found in drawn):
        return 0
    copies = {copy for copy, *_ in drawn}
    batches = {tuple(found) for _, *found in drawn}
    return len(copies) if len(copies) > 1 and len(batches) == 1 else 0


def digests(
    adapter: StateAdapter, collected: Collected, left_out: Set[str]
) -> tuple[str, dict[str, str], dict[str, str]]:
    """Return the digests of one rank's state.

    Args:
        adapter: the framework.
        collected: the state.
        left_out: names of items of the user's state that are not compared.

    Returns:
        A digest of the names of the rank's tensors, digests of the items of the user's state by name, and digests of
        the buffers by name.
    """
    state = collected.values.get("state", {})
    compared = {name: value for name, value in state.items() if name not in left_out}
    totals = {name: xxhash.xxh3_64(encode_values(value, name)) for name, value in compared.items()}
    buffers: dict[str, str] = {}
    part = xxhash.xxh3_64()
    for meta in collected.layout(adapter.rank, adapter.world_size).tensors:
        if not meta.fqn.startswith(PREFIX):
            part.update(meta.fqn.encode())
            if isinstance(adapter, ComparesCopies) and not adapter.compares(meta.fqn):
                buffers[meta.fqn] = xxhash.xxh3_64_hexdigest(collected.view(meta.fqn, meta.box))
        elif meta.box == Box.whole(meta.shape):
            words = meta.fqn.removeprefix(PREFIX).split(".")
            owners = [name for at in range(len(words)) if (name := ".".join(words[: at + 1])) in totals]
            for name in owners[-1:]:
                totals[name].update(collected.view(meta.fqn, meta.box))
    return part.hexdigest(), {name: total.hexdigest() for name, total in totals.items()}, buffers


def differing(said: list[tuple[str, dict[str, str]]]) -> list[str]:
    """Return the names whose digests differ between ranks that hold the same part of the model.

    Args:
        said: for each rank, the digest of the names of its tensors, and its digests by name.
    """
    seen: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for part, items in said:
        for name, digest in items.items():
            seen[part, name].add(digest)
    return sorted({name for (_, name), found in seen.items() if len(found) > 1})
