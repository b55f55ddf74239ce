"""The state that a survivor gives to newcomers when the script runs code before the block of a step.

Theory. When a rank is lost, some ranks may have run the code before the block (a learning rate set from the step, a
recorded score) and others not. A newcomer that will run this code needs the state from before the code. A newcomer that
will not run the code needs the state from after the code. The boxes of one newcomer come from several survivors, so all
survivors must give the same of the two states.

Every rank copies the state that the code may change, before the code runs (``Adapter.remember``). So every survivor
can give the state from before the code, and it gives this state. A survivor that waits at its block, or whose block
was aborted, compares its present state with the copies. If they are equal, the given state is also the state from
after the code. Only then may the newcomer skip the code, and it does so if the lost rank had begun the block. In all
other cases the newcomer runs the code. The state from after the code would not do for a newcomer: a pass in training
mode changes buffers by the data of its rank.

A survivor runs the code again when its aborted block runs again, on the state from after the code. ``left_blocks.py``
checks that this changes nothing. If the code makes collectives, a newcomer cannot run it alone
(``out_of_step_collectives.py``): all ranks then restart at this step.
"""

from __future__ import annotations

import xxhash

from holdfast.core.worker.position import ScriptEvent
from holdfast.errors import StateError
from holdfast.frameworks.common.adapter import Collected, StateAdapter
from holdfast.frameworks.common.optional_abilities import ComparesCopies
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
            The state, and whether it also is the state from after the code before the block of the step.

        Raises:
            StateError: the code before the block has changed the names or shapes of the tensors, so that newcomers
                and survivors would have other tensors. The script then counts as one that does not return to its
                loop. So the next decision restarts all ranks.
        """
        rank, adapter = self._rank, self._adapter
        at_block = rank.script.gives(aborted=frozen) == "now"
        if rank.script.by_framework:
            return adapter.collect(frozen=frozen), at_block
        before = adapter.collect(frozen=frozen, before=rank.step)
        if not at_block:
            return before, at_block
        now = adapter.collect(frozen=frozen)
        layouts = [each.layout(adapter.rank, adapter.world_size).tensors for each in (before, now)]
        if layouts[0] != layouts[1]:
            rank.moved(ScriptEvent.STRAYED)
            raise StateError(
                f"the code before the block of step {rank.step} has changed the names or shapes of tensors: all ranks "
                "start again at that step"
            )
        return before, encode_values(before.values) == encode_values(now.values) and not any(
            _digest(before, meta) != _digest(now, meta) for meta in layouts[0] if self._may_change(meta)
        )

    def _may_change(self, meta: TensorMeta) -> bool:
        if meta.fqn.startswith("optimizer."):
            return meta.box.numel == 1
        is_buffer = self._compares is not None and not self._compares.compares(meta.fqn)
        return meta.fqn.startswith("state.") or is_buffer


def _digest(state: Collected, meta: TensorMeta) -> bytes:
    return xxhash.xxh3_128_digest(state.view(meta.fqn, meta.box))
