"""Gradient accumulation: steps that take several batches of the loader.

Theory. The gradients that a block adds up over several batches belong to one step. After a fault, either all of these
batches are computed again or none. So the block gets a list of all batches of its step. The position of the step in the
data is after the last batch of the list. If the length of an epoch is known, the last list of an epoch may be shorter.
Otherwise a list may continue into the next epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.errors import UsageError
from holdfast.frameworks.common.adapter import DataIdentity, Feed
from holdfast.frameworks.common.state_tree import Plain


def grouped(feed: Feed, batches: int | None) -> Feed:
    """Return a feed that draws lists of ``batches`` batches from ``feed``. If ``batches`` is None, return ``feed``."""
    return feed if batches is None else AccumulatingFeed(feed, batches)


def checked_count(batches: int | None, loader: Any) -> int | None:
    """Return ``batches`` of ``Session.steps`` after a check. Raises: UsageError: no positive int, or no loader."""
    if batches is None:
        return None
    if isinstance(batches, bool) or not isinstance(batches, int) or batches < 1 or loader is None:
        raise UsageError(
            f"steps(batches={batches!r}): {'no loader gives them' if loader is None else 'not a number of batches'}",
            hint="for step in s.steps(loader, batches=4): with step as batches: for batch in batches: ...",
        )
    return batches


class AccumulatingFeed:
    """A feed (:class:`holdfast.frameworks.common.adapter.Feed`) that draws lists of batches.

    Args:
        feed: the feed of single batches.
        batches: number of batches in one list, 1 or more.
    """

    def __init__(self, feed: Feed, batches: int) -> None:
        self._feed = feed
        self._batches = batches
        self.repeatable, self.rewinds = feed.repeatable, feed.rewinds
        self.epoch, self.last_in_epoch = feed.epoch, feed.last_in_epoch

    def draw(self, epochs: int | None = None) -> list[Any]:
        """Return the next list of batches. Raises: StopIteration: ``epochs`` epochs are over (None: no limit)."""
        drawn = [self._feed.draw(epochs)]
        self.epoch = self._feed.epoch
        try:
            while len(drawn) < self._batches and not self._feed.last_in_epoch:
                drawn.append(self._feed.draw(epochs))
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
        """Return the part of the position that only this rank knows; None: there is no such part."""
        return self._feed.local_state()

    def identity(self) -> DataIdentity | None:
        """Return the identity of the dataset; None: it is not known."""
        return self._feed.identity()

    def close(self) -> None:
        """Stop the worker processes of the loader."""
        self._feed.close()
