"""The comparison of the batches that a framework's own loop draws with the batches that an earlier process drew.

Theory. A loader may give other batches after a restart, so digests of batches are compared
(``session/loops/batch_digest.py``). A framework draws its batches itself, often one batch before the step that uses it.
So a batch is identified by the epoch and its number in this rank's share of the epoch. This rank keeps a record (epoch,
number, digest) of one batch: the newest batch that the step trains on. The record is saved with the rank-local values
of the step. The next process with this rank draws that batch again, to repeat the step or only to compare the batch
before its first step.

Invariants:
1. A batch that differs raises an error before the step of that batch begins.
2. Nothing is compared if the number of ranks has changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from holdfast.frameworks.common.adapter import Feed
from holdfast.frameworks.common.state_tree import Plain
from holdfast.frameworks.torch.data.batch_digest import digest_of_batch
from holdfast.session.loops.batch_digest import another_batch

KEPT_MAX = 64
"""Number of recent batches whose digests are kept: more than a framework draws ahead, or uses in one step."""


class DrawnBatches:
    """The batches that one rank draws. A *record* has epoch, number and digest of one batch.

    Args:
        expected: the record of the earlier process with this rank; None if there was no process, or no record.
        verify: True to compare batches; otherwise nothing is done.

    Attributes:
        record: record of the newest batch that the step trains on, for the next process; None if it is not known.
    """

    def __init__(self, expected: Plain, *, verify: bool) -> None:
        self._rank, self._world = (
            (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        )
        same = isinstance(expected, Mapping) and expected.get("world") == self._world
        self._expected: Mapping[str, Any] | None = (
            expected if same and isinstance(expected, Mapping) else None
        )
        self._verify = verify
        self.record: Plain = expected
        self._digests: dict[tuple[int, int], int] = {}

    def expects(self, epoch: int, batch: int) -> bool:
        """Return True if batch number ``batch`` of the epoch will be compared when it is drawn."""
        known = self._expected
        return self._verify and known is not None and (known["epoch"], known["batch"]) == (epoch, batch)

    def saw(self, epoch: int, batch: int, drawn: Any, loader: Any) -> None:
        """Record a batch that was drawn from ``loader``, and compare it if its record is known.

        Raises:
            DataError: the batch differs from the batch of the earlier process.
        """
        if not self._verify:
            return
        found = digest_of_batch(drawn)
        known = self._expected
        if known is not None and self.expects(epoch, batch) and known["digest"] != found:
            raise another_batch(self._rank, loader, f"batch {batch} of epoch {epoch}")
        self._digests[epoch, batch] = found
        while len(self._digests) > KEPT_MAX:
            del self._digests[next(iter(self._digests))]

    def trains(self, epoch: int, batch: int) -> None:
        """Record that this batch is the last one that the current or the next step trains on."""
        found = self._digests.get((epoch, batch))
        known = {"epoch": epoch, "batch": batch, "digest": found, "world": self._world}
        self.record = None if found is None else known

    def draw(self, feed: Feed, loader: Any) -> Any:
        """Return the next batch of ``feed``, for the step that begins next. Raises: DataError: see :meth:`saw`."""
        place = feed.place()
        drawn = feed.draw()
        self.saw(place["epoch"], place["batch"], drawn, loader)
        self.trains(place["epoch"], place["batch"])
        return drawn

    def seek(self, feed: Feed, place: Mapping[str, int], loader: Any) -> None:
        """Move ``feed`` to the position ``place``. If the earlier process left a record, first compare that batch."""
        known = self._expected
        if known is not None and self._verify:
            feed.seek({name: known[name] for name in ("epoch", "batch")})
            self.draw(feed, loader)
        feed.seek(place)
