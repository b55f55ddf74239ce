"""What a survivor gives to newcomers, at a step before whose block the script does something.

Theory. What stands before a block (a schedule that goes on there, a score that is noted) may be done by some ranks and
not yet by others when one is lost, and a newcomer that does it has to have the state of before, one that does not that
of after. A survivor that has come to its block has done it: the newcomer need not, if the rank in whose place it comes
had begun the block. But boxes come from several survivors, and where such code changes what ``Adapter.remember`` copies
they may be of two states. So who has changed something does not give it: all start again at this step, from the state
of before. One that is still there, or was not given the step, gives that as well, and the newcomer does it, too.
"""

from __future__ import annotations

import xxhash

from holdfast.core.worker.position import ScriptEvent
from holdfast.errors import StateError
from holdfast.frameworks.common.adapter import Collected, StateAdapter
from holdfast.session.steps.participant import StepParticipant
from holdfast.store.format.json_values import encode_values


class TransferSnapshot:
    """The state to give."""

    def __init__(self, rank: StepParticipant, adapter: StateAdapter) -> None:
        self._rank = rank
        self._adapter = adapter

    def collect(self, frozen: bool) -> tuple[Collected, bool]:
        """The state, at the start of an aborted block when ``frozen``.

        Returns:
            It, and whether what stands before the block of the step is done here.

        Raises:
            StateError: the script has changed it before the block; told, for a decision that starts all again.
        """
        rank, adapter = self._rank, self._adapter
        at_block = rank.script.gives(aborted=frozen) == "now"
        if rank.script.by_framework:
            return adapter.collect(frozen=frozen), at_block
        before = adapter.collect(frozen=frozen, before=rank.step)
        if not at_block:
            return before, at_block
        now = adapter.collect(frozen=frozen)
        if self._differ(before, now):
            rank.moved(ScriptEvent.STRAYED)
            raise StateError(
                f"the script has changed it before the block of step {rank.step}: all ranks start again there"
            )
        return now, at_block

    def _differ(self, one: Collected, other: Collected) -> bool:
        """In what a script may change there: plain values, single numbers of optimizers, its own tensors."""
        if encode_values(one.values) != encode_values(other.values):
            return True
        layouts = [each.layout(self._adapter.rank, self._adapter.world_size) for each in (one, other)]
        if layouts[0].tensors != layouts[1].tensors:
            return True
        return any(
            xxhash.xxh3_128_digest(one.view(meta.fqn, meta.box))
            != xxhash.xxh3_128_digest(other.view(meta.fqn, meta.box))
            for meta in layouts[0].tensors
            if meta.fqn.startswith("state.") or (meta.fqn.startswith("optimizer.") and meta.box.numel == 1)
        )
