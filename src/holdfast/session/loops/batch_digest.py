"""Comparison of the batches that a rank draws with those that its earlier process drew at the same position.

Theory. A replacement, and each rank after a restart, seeks its position in the data. The loader may then give other
samples than before: its order may depend on the number of times that this process has iterated it, or the dataset may
have changed. The job would then silently train on other data. So each rank keeps a record of the step whose batches
it drew last: the number of the step, the data position before it, and the digests of the batches. The record is one
of the rank-local values: it is on the status page from the start of the block, and in each checkpoint. The next
process of the rank compares its batches with the record. If it runs that step again, it draws the batches anyway. If
it starts after that step, it reads the batches of that step only for the comparison. This also moves its feed to the
right position. The ranks may be at different positions, if the loader of one rank is shorter and begins again earlier.
The place of the job has the position of one rank only, so the record also holds this rank's own position after the
step. A block may change its batch in place and then run again. For the second run the batch is drawn again,
and this draw is compared as well.

Invariants:
1. A difference raises an error before the block of the next step begins.
2. Nothing is compared if the number of ranks has changed, because the ranks then draw other batches. A feed with
   ``local_state`` (a position that only this rank knows) cannot move to an earlier position. The batches of such a feed
   are compared only if their step runs again.

The digest covers a sample of each tensor (``frameworks/torch/data/batch_digest.py``). It detects another batch, but may
miss one flipped pixel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast.errors import DataError
from holdfast.frameworks.common.adapter import Feed
from holdfast.frameworks.common.optional_abilities import DigestsBatches
from holdfast.frameworks.common.state_tree import Plain
from holdfast.session.loops.combined_feed import loaders_of


class Drawn:
    """The comparison of the batches that this rank draws with those that its earlier process drew.

    Args:
        adapter: the framework. If it cannot digest batches, nothing is compared.
        rank: the rank of this process.
        verify: if False, nothing is compared.

    Attributes:
        record: step, digests and start position of the batches that were drawn last, for the rank-local values; None
            if they are not known.
        numbered: the batches that were drawn last are plain numbers, by which the script finds its own data.
    """

    def __init__(self, adapter: object, rank: int, *, verify: bool) -> None:
        self.record: dict[str, Plain] | None = None
        self.numbered = False
        self._digests = adapter if verify and isinstance(adapter, DigestsBatches) else None
        self._rank = rank
        self._expected: Mapping[str, Any] | None = None
        self._loader: Any = None
        self._loop = -1

    def begin(self, loader: Any, loop: int) -> None:
        """Set the number of the loop that begins, and its loader for the text of errors."""
        self._loader, self._loop = loader, loop

    def stand_at(self, record: Plain) -> None:
        """Take over the record of the earlier process.

        ``record`` is None if there is no record, or if the earlier job had another number of ranks.
        """
        self.record = self._expected = record if isinstance(record, dict) else None

    def drew(
        self, step: int, batches: Sequence[Any], before: Mapping[str, int], after: Mapping[str, int]
    ) -> None:
        """Compare and record the batches of ``step``, between the positions ``before`` and ``after``.

        Raises:
            DataError: other batches were drawn for this step before.
        """
        if self._digests is None:
            return
        found = [self._digests.digest_batch(batch) for batch in batches]
        self._compare(step, found)
        self.numbered = all(isinstance(batch, int) for batch in batches)
        self.record = {
            "step": step,
            "digests": list(found),
            "before": dict(before),
            "after": dict(after),
            "loop": self._loop,
        }
        self._expected = self.record

    def position(self, step: int, loop: int) -> dict[str, int] | None:
        """Return this rank's own position in the data at ``step`` of ``loop``; None if the record does not show it.

        The position is that of the earlier process of this rank.
        """
        known = self._expected
        if known is None or known.get("loop") != loop or known["step"] not in (step, step - 1):
            return None
        return dict(known["before"] if known["step"] == step else known["after"])

    def forget(self) -> None:
        """Drop the record, because the script has left its loop before the block of the step that was drawn.

        The next loop draws another batch for that step.
        """
        self.record = self._expected = None

    def reread(self, step: int, feed: Feed, load: Callable[[Feed], Sequence[Any]]) -> bool:
        """When a loop begins at ``step``, read the batches of the previous step and compare them, if this is possible.

        Args:
            step: the step at which this process begins.
            feed: the feed of the loop.
            load: draws the batches of one step from the feed.

        Returns:
            True if the batches were read: the position of the feed is then after them.

        Raises:
            DataError: the batches differ from those drawn before.
        """
        known = self._expected
        if (
            known is None
            or self._digests is None
            or known["step"] != step - 1
            or known.get("loop", self._loop) != self._loop  # its loader may be another one
            or feed.local_state() is not None
        ):
            return False
        feed.seek(known["before"])
        self._compare(step - 1, [self._digests.digest_batch(batch) for batch in load(feed)])
        return True

    def _compare(self, step: int, found: Sequence[int]) -> None:
        known = self._expected
        if known is None or known["step"] != step or list(known["digests"]) == list(found):
            return
        raise another_batch(self._rank, self._loader, f"step {step}")


def another_batch(rank: int, loader: Any, place: str) -> DataError:
    """Return the error for a ``loader`` that gives this rank another batch for ``place`` (in words) than before."""
    loader, *further = loaders_of(loader)
    sampler = type(getattr(loader, "sampler", None)).__name__
    # torch gives the second one to the loader of an IterableDataset.
    is_stream = sampler in ("NoneType", "_InfiniteConstantSampler")
    name = f"the {type(loader).__name__}{'' if is_stream else f' with a {sampler}'}"
    if further:
        name += ", or another loader of the loop,"
    cause = "its order or its samples depend on the process, or have changed: "
    repair = (
        "a stream has to give the same samples each time that it is read, so shuffle it with a fixed seed"
        if is_stream
        else "give the loader a sampler that draws by epoch, shuffle a dataset with a fixed seed"
    )
    return DataError(
        f"rank {rank}: {name} gives another batch for {place} than it gave there before",
        hint=f"{cause}{repair}, seed by index what a dataset draws at random, and keep its files. "
        "A loader that begins at a position from a checkpoint of the script counts it twice: remove that code. "
        "session(verify_data=False) leaves out this check, and continues with other samples",
    )
