"""What a spare does before it is called: the script's own block, on a batch that does not count."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast.adapters.base import Adapter
from holdfast.session.step import Blocks, Step


def rehearsals(adapter: Adapter, blocks: Blocks, loader: Any) -> Iterator[Step]:
    """Steps that never count, on a batch of any rank: what they build and compile is there at the call.

    Nothing is drawn from a loader that could tell later: then the rehearsal comes after the call, as for a newcomer.
    """
    feed = None if loader is None else adapter.feed(loader)
    try:
        if feed is not None and not feed.repeatable:
            return
        batch = None if feed is None else feed.draw()
        again = False
        while not again or adapter.rehearse():
            step = Step(blocks, 0, rehearsal=True)
            step.batch, step.again = batch, again
            yield step
            if not step.entered:
                return
            again = True
    finally:
        if feed is not None:
            feed.close()
