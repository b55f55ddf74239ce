"""Rehearsals of a spare before it is called: the script's own block, on a batch that does not count."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.frameworks.common.adapter import Feed, GroupAdapter
from holdfast.session.steps.accumulation import AccumulatingFeed
from holdfast.session.steps.batches import Batches
from holdfast.session.steps.step import Step, StepRunner


def rehearsals(adapter: GroupAdapter, blocks: StepRunner, feed: Feed | None) -> Iterator[Step]:
    """Yield steps that never count, on a batch of any rank, so that their kernels and buffers exist when the spare is
    called.

    Unlike a newcomer's rehearsal they include the update. The state of the survivors replaces everything that the
    update changes, and the memory of the optimizer is then already allocated.

    A loader whose position would change by a draw is not used. The rehearsal then comes after the call, as in a
    newcomer.
    """
    if feed is not None and not feed.repeatable:
        return
    batches = Batches(adapter)
    batches.put([None if feed is None else feed.draw()])
    again = settled = False
    while not settled:
        # Once more when everything is built: the allocator uses other memory in the first run than in later runs.
        settled = again and not adapter.rehearse()
        step = Step(blocks, 0, rehearsal=True, scrap=True)
        if feed is not None and batches.spoiled(0):
            batches.put([feed.draw()])
        step.batch, step.again = batches.give(0), True  # the job has already run the code before the block
        step.batches = len(step.batch) if isinstance(feed, AccumulatingFeed) else None
        yield from blocks.give(step)
        if not step.entered or step.idle:
            return  # the block skipped this batch and built nothing: rehearse after the call
        again = True
