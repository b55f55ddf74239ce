"""Comparison of the batches that a rank draws with those that the process before it drew at the same position.

Theory. A replacement, and each rank after a restart, goes to its position in the data. The loader decides whether the
same samples are there. They are not if the order of the loader depends on how often this process has iterated it, or if
the dataset was changed meanwhile. The job would then silently train on other data. So each rank keeps a digest of the
batches of the step that it drew last, with the number of the step and the data position before it. The digest is one of
its rank-local values: it is on the status page from the begin of the block, and in each checkpoint. The next process
compares. If it runs that step again, it draws the batches again. If it starts after that step, it reads the batches
only for the comparison; its feed is then after them, as it has to be. A batch that is drawn again because its block has
changed it is also compared.

Invariants:
1. A difference raises an error before the block of the next step begins.
2. Nothing is compared for a job of another size, whose ranks draw other batches. If only the loader knows its position
   (``local_state``), it cannot be sent back, and only the step in flight is compared.

The digest is of a sample of each tensor (``frameworks/torch/data/batch_digest.py``). It detects other batches, but may
miss one flipped pixel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast.errors import DataError
from holdfast.frameworks.common.adapter import Feed
from holdfast.frameworks.common.optional_abilities import DigestsBatches
from holdfast.frameworks.common.state_tree import Plain


class Drawn:
    """The comparison of the batches that one rank draws with the batches that were drawn before at the same position.

    Args:
        adapter: digests a batch, where it can.
        rank: the rank of this process.
        verify: False: nothing is compared.

    Attributes:
        record: digests of the batches that were drawn last, for the local values of this rank; None: not known.
    """

    def __init__(self, adapter: object, rank: int, *, verify: bool) -> None:
        self.record: dict[str, Plain] | None = None
        self._digests = adapter if verify and isinstance(adapter, DigestsBatches) else None
        self._rank = rank
        self._expected: Mapping[str, Any] | None = None
        self._loader: Any = None

    def begin(self, loader: Any) -> None:
        """Set the loader from which batches are drawn from now on; it is named in messages."""
        self._loader = loader

    def stand_at(self, record: Plain) -> None:
        """Take over the record of the process before this one; None: another job, or it is not known."""
        self.record = self._expected = record if isinstance(record, dict) else None

    def drew(self, step: int, batches: Sequence[Any], before: Mapping[str, int]) -> None:
        """Record the batches of a step. Raises: DataError: other batches were drawn for this step before."""
        if self._digests is None:
            return
        found = [self._digests.digest_batch(batch) for batch in batches]
        self._compare(step, found)
        self.record = {"step": step, "digests": list(found), "before": dict(before)}
        self._expected = self.record

    def reread(self, step: int, feed: Feed, load: Callable[[Feed], Sequence[Any]]) -> bool:
        """Read the batches of the step before ``step`` at the begin of a loop, if they can be compared.

        Returns:
            True if they were read; the position of the feed is then after them.

        Raises:
            DataError: the batches differ from those drawn before.
        """
        known = self._expected
        if (
            known is None
            or self._digests is None
            or known["step"] != step - 1
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
    """Return the error of a loader that gives this rank another batch at ``place`` than before."""
    sampler = getattr(loader, "sampler", None)
    name = f"the {type(loader).__name__}{'' if sampler is None else f' with a {type(sampler).__name__}'}"
    return DataError(
        f"rank {rank}: {name} gives another batch for {place} than it gave there before",
        hint="its order or its samples depend on the process, or have changed: give the loader a sampler that draws by "
        "epoch, seed by index what a dataset draws at random, shuffle a dataset with a fixed seed, and keep its files; "
        "verify_data=False leaves out this check",
    )
