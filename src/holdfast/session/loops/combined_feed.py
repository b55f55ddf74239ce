"""Batches of several loaders in each step, such as labeled and unlabeled data.

Theory. The first loader determines the epochs: an epoch ends with its last batch. Each further loader begins again
whenever it ends, and gets ``set_epoch`` with the number of its passes. It continues where it is when the first loader
begins an epoch. So after a number of steps, each further loader has drawn that number of batches. If only an epoch of
the first loader is known (a checkpoint of a job with one loader), the positions of all loaders follow from their
lengths.

The position is one flat mapping. It has the entries of the first feed, and those of feed 1 as ``1.epoch``, ``1.batch``
and so on. A checkpoint of a job with one loader has none of these: further loaders then begin where they would be if
they had been there from the start.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.errors import UnsupportedError, UsageError
from holdfast.frameworks.common.adapter import Adapter, DataIdentity, Feed, length_of
from holdfast.frameworks.common.optional_abilities import DrawsFromSeveral, StandsForOthers
from holdfast.frameworks.common.state_tree import Plain
from holdfast.session.steps.accumulation import grouped


class SeveralLoaders:
    """The loaders of one loop, in the order of ``Session.steps``; its length is that of the first loader."""

    def __init__(self, loaders: Sequence[Any]) -> None:
        self.loaders = tuple(loaders)

    def __len__(self) -> int:
        """Return the number of batches in an epoch. Raises: TypeError: the first loader has no length."""
        return len(self.loaders[0])


def together(loader: Any, further: Sequence[Any]) -> Any:
    """Return the loaders of a loop as one object; ``loader`` itself if it is the only one.

    Raises:
        UsageError: one of several loaders is None.
    """
    if not further:
        return loader
    if loader is None or any(each is None for each in further):
        raise UsageError(
            "steps() got None in place of one of several loaders",
            hint="s.steps(labeled, unlabeled): the block gets one batch of each",
        )
    return SeveralLoaders((loader, *further))


def loaders_of(loader: Any) -> tuple[Any, ...]:
    """Return the loaders in ``loader``, a result of :func:`together`."""
    return loader.loaders if isinstance(loader, SeveralLoaders) else (loader,)


def feed_of(adapter: Adapter, loader: Any, batches: int | None) -> Feed:
    """Return the batches of ``loader``, a result of :func:`together`.

    Args:
        adapter: the framework.
        batches: number of batches in a list; None if there are no lists.

    Raises:
        UsageError: a loader cannot be iterated.
        UnsupportedError: the framework combines several loaders in its own way.
    """
    loaders = loaders_of(loader)
    if len(loaders) == 1:
        return _combined([adapter.feed(loader)], loaders, batches, adapter)
    if not isinstance(adapter, DrawsFromSeveral):
        raise UnsupportedError(
            "steps() got several loaders: this framework has an operation that combines datasets",
            hint="give one dataset: tf.data.Dataset.zip((a, b.repeat())), or mindspore.dataset.zip((a, b))",
        )
    return _combined(adapter.feeds(loaders), loaders, batches, adapter)


def feed_of_copy(adapter: Adapter, loader: Any, copy: int, batches: int | None) -> Feed | None:
    """Return the batches that copy number ``copy`` of the model draws from ``loader``; None if they are not known.

    The arguments are those of :func:`feed_of`.
    """
    blocks = adapter.others if isinstance(adapter, StandsForOthers) else None
    if blocks is None:
        return None
    loaders = loaders_of(loader)
    found = [blocks.feed(each, copy, number) for number, each in enumerate(loaders)]
    feeds = [feed for feed in found if feed is not None]
    return _combined(feeds, loaders, batches, adapter) if len(feeds) == len(loaders) else None


def _combined(feeds: Sequence[Feed], loaders: Sequence[Any], batches: int | None, adapter: Adapter) -> Feed:
    feed = feeds[0] if len(feeds) == 1 else CombinedFeed(feeds, [length_of(each) for each in loaders])
    return grouped(feed, batches, adapter)


def same_loaders(one: Any, other: Any) -> bool:
    """Return whether two results of :func:`together` are the same loaders."""
    pairs = loaders_of(one), loaders_of(other)
    return len(pairs[0]) == len(pairs[1]) and all(map(operator.is_, *pairs))


def start_of_epoch(
    epoch: int, then: Mapping[str, int] | None, local: Plain
) -> tuple[Mapping[str, int], Plain]:
    """Return the position at the start of an epoch of the first loader, and its rank-local part.

    Further loaders are at their position of ``then``, an earlier position with the rank-local part ``local``. If it is
    None, their position follows from the lengths of the loaders.
    """
    further = {key: value for key, value in (then or {}).items() if "." in key}
    states = [None, *local[1:]] if further and isinstance(local, list) else None
    return {"epoch": epoch, "batch": 0, **further}, states


def rescaled(at: Mapping[str, int], before: int, now: int) -> dict[str, int]:
    """Return the position ``at`` of a job of ``before`` ranks for a job of ``now`` ranks.

    A feed that has counted samples (``seen``) finds its position by them. Samples that were not counted are assumed to
    be dealt in turn: fewer ranks then have drawn more batches each.
    """
    return {
        key: value * before // now
        if key.endswith("batch") and f"{key.removesuffix('batch')}seen" not in at
        else value
        for key, value in at.items()
    }


class CombinedFeed:
    """A feed (:class:`holdfast.frameworks.common.adapter.Feed`) that draws one batch of each of several feeds.

    Args:
        feeds: the feeds, the one that determines the epochs first.
        lengths: number of batches in a pass of each loader; None if it is not known.
    """

    def __init__(self, feeds: Sequence[Feed], lengths: Sequence[int | None]) -> None:
        self._feeds = feeds
        self._lengths = lengths
        self.epoch, self.last_in_epoch = 0, False
        self.repeatable = all(feed.repeatable for feed in feeds)
        self.rewinds = all(feed.rewinds for feed in feeds)

    def draw(self, epochs: int | None = None) -> tuple[Any, ...]:
        """Return the next batch of each loader. Raises: StopIteration: ``epochs`` epochs of the first are over."""
        first, *further = self._feeds
        drawn = first.draw(epochs), *(feed.draw() for feed in further)
        self.epoch, self.last_in_epoch = first.epoch, first.last_in_epoch
        return drawn

    def place(self) -> Mapping[str, int]:
        """Return the position after the last batches drawn."""
        at = dict(self._feeds[0].place())
        for number, feed in enumerate(self._feeds[1:], start=1):
            at |= {f"{number}.{key}": value for key, value in feed.place().items()}
        return at

    def seek(self, place: Mapping[str, int], local: Plain = None) -> None:
        """Move to the position ``place``; ``local`` is the result of :meth:`local_state` there, if any.

        Raises:
            UsageError: ``place`` is the start of an epoch, and the length of a loader is not known.
        """
        states = local or [None] * len(self._feeds)
        self._feeds[0].seek({key: value for key, value in place.items() if "." not in key}, states[0])
        for number, feed in enumerate(self._feeds[1:], start=1):
            prefix = f"{number}."
            at = {key.removeprefix(prefix): place[key] for key in place if key.startswith(prefix)}
            feed.seek(at or self._by_lengths(place, number), states[number])

    def _by_lengths(self, place: Mapping[str, int], number: int) -> dict[str, int]:
        """Return the position of feed ``number`` after the steps before ``place``, a position of the first feed."""
        if not place["epoch"] and not place["batch"]:
            return {"epoch": 0, "batch": 0}
        epoch, own = self._lengths[0], self._lengths[number]
        if epoch is None or own is None:
            raise UsageError(
                "steps() got several loaders in s.epochs(...), and one of them has no length: the position of loader "
                f"{number + 1} at the start of an epoch is not known",
                hint="give the loader a __len__, or use one loop: s.steps(a, b, until=N)",
            )
        passes, batch = divmod(place["epoch"] * epoch + place["batch"], own)
        return {"epoch": passes, "batch": batch}

    def local_state(self) -> Plain:
        """Return the parts of the position that only this rank knows, one per feed; None if there is no such part."""
        states = [feed.local_state() for feed in self._feeds]
        return None if all(state is None for state in states) else states

    def identity(self) -> DataIdentity | None:
        """Return the identity of all datasets together; None if one of them is not known."""
        known = [feed.identity() for feed in self._feeds]
        found = [each for each in known if each is not None]
        if len(found) < len(known):
            return None
        content = "+".join(each.content for each in found) if all(each.content for each in found) else ""
        return DataIdentity(sum(each.length for each in found), content, all(each.shared for each in found))

    def close(self) -> None:
        """Stop the worker processes of all loaders."""
        for feed in self._feeds:
            feed.close()
