"""The state that a survivor gives to newcomers, if the script runs code before the block of the step.

Theory. When a rank is lost, some ranks may have run the code before the block (a step of a schedule, a recorded score)
and others not. A newcomer that will run this code needs the state from before the code. A newcomer that will not run
the code needs the state from after the code. A newcomer skips the code only if the lost rank had begun the block *and*
the survivors give a state from after the code. A survivor that waits at its block has run the code, and gives the state
from after the code. A survivor that still runs the code, or has not yet got the step from its loop, gives the state
from before the code.

The boxes of one newcomer come from several survivors, so they could come from two different states. Every rank
therefore copies the state that the code may change, before the code runs (``Adapter.remember``). A survivor that has
run the code compares its state with the copies. If the code has changed the state, this survivor does not give its
state. All ranks then restart at this step from the state before the code, and run the code again.
"""

from __future__ import annotations

import xxhash

from holdfast.core.worker.position import ScriptEvent
from holdfast.errors import StateError
from holdfast.frameworks.common.adapter import Collected, StateAdapter
from holdfast.frameworks.common.optional_abilities import ComparesCopies
from holdfast.frameworks.common.state_tree import Plain
from holdfast.session.steps.participant import StepParticipant
from holdfast.store.format.json_values import encode_values
from holdfast.store.layouts.layout import TensorMeta


class TransferSnapshot:
    """The collector of the state that this rank gives to newcomers."""

    def __init__(self, rank: StepParticipant, adapter: StateAdapter) -> None:
        self._rank = rank
        self._adapter = adapter
        self._compares = adapter if isinstance(adapter, ComparesCopies) else None

    def collect(self, frozen: bool) -> tuple[Collected, bool]:
        """Return the state to give to newcomers.

        Args:
            frozen: take the state of the start of an aborted block.

        Returns:
            The state, and whether it includes the effect of the code before the block of the step.

        Raises:
            StateError: the script has changed the state before the block. The script is then recorded as one that does
                not return to its loop, so that the next decision restarts all ranks.
        """
        rank, adapter = self._rank, self._adapter
        at_block = rank.script.gives(aborted=frozen) == "now"
        if rank.script.by_framework:
            return adapter.collect(frozen=frozen), at_block
        before = adapter.collect(frozen=frozen, before=rank.step)
        if not at_block:
            return before, at_block
        now = adapter.collect(frozen=frozen)
        if changed := self._changed(before, now):
            rank.moved(ScriptEvent.STRAYED)
            raise StateError(
                f"the code before the block of step {rank.step} has changed {changed}: "
                f"all ranks start again from step {rank.step}",
            )
        return now, at_block

    def _changed(self, one: Collected, other: Collected) -> str:
        """Return the name of the first part that differs, of what a script may change before a block; empty: none does.

        These parts are plain values, optimizer tensors of one element, tensors of the user's state, and buffers.
        """
        if name := _changed_value(one.values, other.values, "values"):
            return name
        layouts = [each.layout(self._adapter.rank, self._adapter.world_size) for each in (one, other)]
        if layouts[0].tensors != layouts[1].tensors:
            return "the names or shapes of the tensors"
        for meta in filter(self._may_change, layouts[0].tensors):
            views = [xxhash.xxh3_128_digest(each.view(meta.fqn, meta.box)) for each in (one, other)]
            if views[0] != views[1]:
                return meta.fqn
        return ""

    def _may_change(self, meta: TensorMeta) -> bool:
        if meta.fqn.startswith("optimizer."):
            return meta.box.numel == 1
        is_buffer = self._compares is not None and not self._compares.compares(meta.fqn)
        return meta.fqn.startswith("state.") or is_buffer


def _changed_value(one: Plain, other: Plain, name: str) -> str:
    """Return the dotted name of the first value that differs between two trees of plain values; empty: none does."""
    if encode_values(one) == encode_values(other):
        return ""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return next(
            filter(None, (_changed_value(one[key], other[key], f"{name}.{key}") for key in one)), name
        )
    return name
