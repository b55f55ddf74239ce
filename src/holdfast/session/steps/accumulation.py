"""Gradient accumulation: steps that take several batches of the loader.

Theory. The gradients that a block adds up over several batches belong to one step. After a fault, either all of these
batches are computed again or none. So the block gets a list of all batches of its step. The position of the step in the
data is after the last batch of the list. If the length of an epoch is known, the last list of an epoch may be shorter.
Otherwise a list may continue into the next epoch.

A loader may fill the same tensors with each batch. A loop that uses one batch at a time does not notice that, but a
list of batches would hold the last batch several times. So the first list of a process is checked: each of its batches
must keep its values while the next ones are drawn. A rank that does the work of several ranks lists a batch for each of
them, and the first of these lists is checked as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.errors import DataError, UsageError
from holdfast.frameworks.common.adapter import DataIdentity, Feed
from holdfast.frameworks.common.optional_abilities import DigestsBatches
from holdfast.frameworks.common.state_tree import Plain


def grouped(feed: Feed, batches: int | None, adapter: object) -> Feed:
    """Return a feed that draws lists of ``batches`` batches from ``feed``. If ``batches`` is None, return ``feed``.

    Args:
        adapter: the framework. If it cannot digest batches, the lists are not checked.
    """
    return feed if batches is None else AccumulatingFeed(feed, batches, RefilledBatches(adapter))


def checked_count(batches: int | None, loader: Any) -> int | None:
    """Return the argument ``batches`` of ``Session.steps``.

    Raises:
        UsageError: ``batches`` is not None, and is not a positive int or is given without a loader.
    """
    if batches is None:
        return None
    if isinstance(batches, bool) or not isinstance(batches, int) or batches < 1 or loader is None:
        raise UsageError(
            f"steps(batches={batches!r}): {'no loader gives them' if loader is None else 'not a number of batches'}",
            hint="for step in s.steps(loader, batches=4): with step as batches: for batch in batches: ...",
        )
    return batches


class RefilledBatches:
    """The check that a loader does not write the next batch into the tensors of an earlier batch.

    Args:
        adapter: the framework. If it cannot digest batches, nothing is checked.
    """

    def __init__(self, adapter: object) -> None:
        self._digests = adapter if isinstance(adapter, DigestsBatches) else None
        self._found: list[int] = []  # of the batches of the first list, when the last of them was drawn

    def drew(self, batches: Sequence[Any]) -> None:
        """Check that the earlier batches of a list are unchanged. Call this after each batch that is added to the list.

        Only the first list of the process is checked.

        Args:
            batches: the batches of the list so far.

        Raises:
            DataError: an earlier batch of the list has changed.
        """
        if self._digests is None:
            return
        if len(batches) == 1 and len(self._found) > 1:
            self._digests = None
            return
        found = [self._digests.digest_batch(batch) for batch in batches]
        if len(batches) > 1 and found[:-1] != self._found:
            raise DataError(
                "the loader writes each batch into the tensors of a batch before: a step of several batches would use "
                "the last one several times",
                hint="yield copies in the loader: `yield x.clone(), y.clone()`",
            )
        self._found = found


class AccumulatingFeed:
    """A feed (:class:`holdfast.frameworks.common.adapter.Feed`) that draws lists of batches.

    Args:
        feed: the feed of single batches.
        batches: number of batches in one list, 1 or more.
        refilled: the check of the first list.
    """

    def __init__(self, feed: Feed, batches: int, refilled: RefilledBatches) -> None:
        self._feed = feed
        self._batches = batches
        self._refilled = refilled
        self.repeatable, self.rewinds = feed.repeatable, feed.rewinds
        self.epoch, self.last_in_epoch = feed.epoch, feed.last_in_epoch

    def draw(self, epochs: int | None = None) -> list[Any]:
        """Return the next list of batches.

        Raises:
            StopIteration: ``epochs`` epochs are over (None: no limit).
            DataError: the loader has changed a batch of the list.
        """
        drawn = [self._feed.draw(epochs)]
        self._refilled.drew(drawn)
        self.epoch = self._feed.epoch
        try:
            while len(drawn) < self._batches and not self._feed.last_in_epoch:
                drawn.append(self._feed.draw(epochs))
                self._refilled.drew(drawn)
        except StopIteration:
            pass
        self.last_in_epoch = self._feed.last_in_epoch
        return drawn

    def place(self) -> Mapping[str, int]:
        """Return the position after the last batch drawn. Its entry ``share`` is the number of samples in a step."""
        at = self._feed.place()
        return {**at, "share": at["share"] * self._batches} if "share" in at else at

    def seek(self, place: Mapping[str, int], local: Plain = None) -> None:
        """Move to the position ``place``; ``local`` is the result of :meth:`local_state` there, if any."""
        self._feed.seek(place, local)

    def local_state(self) -> Plain:
        """Return the part of the position that only this rank knows; None if there is no such part."""
        return self._feed.local_state()

    def identity(self) -> DataIdentity | None:
        """Return the identity of the dataset; None if it is not known."""
        return self._feed.identity()

    def close(self) -> None:
        """Stop the worker processes of the loader."""
        self._feed.close()
