"""What a spare does before it is called: the script's own block, on a batch that does not count."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.frameworks.common.adapter import Feed, GroupAdapter
from holdfast.session.steps.accumulation import AccumulatingFeed
from holdfast.session.steps.batches import Batches
from holdfast.session.steps.step import Step, StepRunner


def rehearsals(adapter: GroupAdapter, blocks: StepRunner, feed: Feed | None) -> Iterator[Step]:
    """Steps that never count, on a batch of any rank: what they build and compile is there at the call.

    With the update, which a newcomer never rehearses: the survivors' state replaces all that it changes, and finds
    the memory of the optimizer's in place.

    Nothing is drawn from a loader that could tell later: then the rehearsal comes after the call, as for a newcomer.
    """
    if feed is not None and not feed.repeatable:
        return
    batches = Batches(adapter)
    batches.put([None if feed is None else feed.draw()])
    again = settled = False
    while not settled:
        # Once more when all is built: memory that was used once comes from elsewhere than later.
        settled = again and not adapter.rehearse()
        step = Step(blocks, 0, rehearsal=True, scrap=True)
        if feed is not None and batches.spoiled(0):
            batches.put([feed.draw()])
        step.batch, step.again = (
            batches.give(0),
            True,
        )  # what comes before the block is the job's, and was done there
        step.batches = len(step.batch) if isinstance(feed, AccumulatingFeed) else None
        yield step
        if not step.entered or step.idle:
            return  # a batch that is skipped builds nothing: what is missing is rehearsed after the call
        again = True
