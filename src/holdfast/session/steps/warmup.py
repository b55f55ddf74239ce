"""Rehearsals of a spare before it is called: runs of the script's own block without effect on the job."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.frameworks.common.adapter import Feed, GroupAdapter
from holdfast.session.steps.accumulation import AccumulatingFeed
from holdfast.session.steps.batches import Batches
from holdfast.session.steps.step import Step, StepRunner


def rehearsals(adapter: GroupAdapter, blocks: StepRunner, feed: Feed | None) -> Iterator[Step]:
    """Yield steps that are never committed. After these steps, kernels and buffers exist when the spare is called.

    Unlike the rehearsal of a newcomer, these steps include the update, which allocates the memory of the optimizer. The
    state of the survivors later replaces all values that the update changes.

    Args:
        adapter: the framework.
        blocks: runs the blocks.
        feed: the batches of any rank; None if the block draws its own. If the feed cannot go back after a draw, no
            step is yielded. The process then rehearses after it is called, like a newcomer.
    """
    if feed is not None and not feed.repeatable:
        return
    batches = Batches(adapter)
    batches.put([None if feed is None else feed.draw()])
    again = settled = False
    while not settled:
        # Run once more when all is built: the allocator uses other memory in the first run than in later runs.
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
