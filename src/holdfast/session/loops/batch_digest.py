"""What a rank draws is what the process before it drew: compared, not assumed.

Theory. A replacement, and each rank after a restart, goes to a place in the data by position. Whether the same samples
lie there is up to the loader: one whose order depends on how often this process has iterated it, or a dataset that was
changed meanwhile, gives others, and the job would train on without a word. So each rank keeps a digest of the batches
of the step that it drew last, with the number of the step and the place before it, among its local values: on the
status page from the begin of the block on, and in each checkpoint. The next process compares. It draws the batches of
that step again, or it is behind that step: then it reads them for the comparison alone, and its feed is behind them, as
it has to be. A batch that is drawn again because its block has changed it is compared, too.

Invariants:
1. A difference is an error before the block of the next step begins.
2. Nothing is compared for a job of another size, whose ranks draw other batches. Where the loader alone knows its place
   (``local_state``) it cannot be sent back: only the step that was in flight is compared.

The digest is of a sample of each tensor (``frameworks/torch/data/batch_digest.py``): other batches are found, one
flipped pixel may not be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast.errors import DataError
from holdfast.frameworks.common.adapter import Feed
from holdfast.frameworks.common.optional_abilities import DigestsBatches
from holdfast.frameworks.common.state_tree import Plain


class Drawn:
    """The batches that one rank draws.

    Args:
        adapter: digests a batch, where it can.
        rank: of this process.
        verify: compare; else nothing is done.

    Attributes:
        record: of the batch that was drawn last, for the local values of this rank; None: nothing is known.
    """

    def __init__(self, adapter: object, rank: int, *, verify: bool) -> None:
        self.record: dict[str, Plain] | None = None
        self._digests = adapter if verify and isinstance(adapter, DigestsBatches) else None
        self._rank = rank
        self._expected: Mapping[str, Any] | None = None
        self._loader: Any = None

    def begin(self, loader: Any) -> None:
        """Of this loader, batches are drawn from now on; for messages."""
        self._loader = loader

    def stand_at(self, record: Plain) -> None:
        """What the process before this one has drawn; None: another job, or it is not known."""
        self.record = self._expected = record if isinstance(record, dict) else None

    def drew(self, step: int, batches: Sequence[Any], before: Mapping[str, int]) -> None:
        """The batches of a step. Raises: DataError: they are not those that were drawn for it before."""
        if self._digests is None:
            return
        found = [self._digests.digest_batch(batch) for batch in batches]
        self._compare(step, found)
        self.record = {"step": step, "digests": list(found), "before": dict(before)}
        self._expected = self.record

    def reread(self, step: int, feed: Feed, load: Callable[[Feed], Sequence[Any]]) -> bool:
        """At the begin of a loop, ``step`` comes next: read the batch before it, if that can be compared.

        Returns: it was read, and the feed is behind it.

        Raises:
            DataError: it is another one.
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
    """The error of a loader that gives this rank another batch for ``place`` than before."""
    sampler = getattr(loader, "sampler", None)
    name = f"the {type(loader).__name__}{'' if sampler is None else f' with a {type(sampler).__name__}'}"
    return DataError(
        f"rank {rank}: {name} gives another batch for {place} than it gave there before",
        hint="its order or its samples depend on the process, or have changed: give the loader a sampler that draws by "
        "epoch, seed by index what a dataset draws at random, shuffle a dataset with a fixed seed, and keep its files; "
        "verify_data=False leaves out this check",
    )
