"""The state that a survivor gives to newcomers, if the script runs code before the block of the step.

Theory. When a rank is lost, some ranks may have run the code before the block (a learning rate set from the step, a
recorded score) and others not. A newcomer that will run this code needs the state from before the code. A newcomer that
will not run the code needs the state from after the code. The boxes of one newcomer come from several survivors, so all
survivors must give the same of the two states.

Every rank copies the state that the code may change, before the code runs (``Adapter.remember``). So every survivor can
give the state from before the code. A survivor that waits at its block, or whose block was aborted, has run the code,
and can also give the state from after the code. The controller knows from the offers of all survivors whether every
survivor can give it (``Receive.after_code``). The newcomer takes it only if the lost rank had begun the block, and then
skips the code. In all other cases the newcomer takes the state from before the code, and runs the code.

A survivor runs the code again when its aborted block runs again, on the state from after the code. ``left_blocks.py``
checks that this changes nothing. If the code makes collectives, a newcomer cannot run it alone
(``out_of_step_collectives.py``): all ranks then restart at this step.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.core.worker.position import ScriptEvent
from holdfast.errors import StateError
from holdfast.frameworks.common.adapter import Collected, StateAdapter
from holdfast.session.steps.participant import StepParticipant


class GivenStates(NamedTuple):
    """The states of one survivor for newcomers, with equal names and shapes of the tensors.

    Attributes:
        before: the state from before the code before the block of the step.
        after: the state from after this code; None: this rank may not have run the code to its end.
    """

    before: Collected
    after: Collected | None


class TransferSnapshot:
    """The collector of the states that this rank gives to newcomers."""

    def __init__(self, rank: StepParticipant, adapter: StateAdapter) -> None:
        self._rank = rank
        self._adapter = adapter

    def collect(self, frozen: bool) -> GivenStates:
        """Return the states to give to newcomers.

        Args:
            frozen: take the states of the start of an aborted block.

        Raises:
            StateError: the code before the block has changed the names or shapes of the tensors. The script is then
                recorded as one that does not return to its loop, so that the next decision restarts all ranks.
        """
        rank, adapter = self._rank, self._adapter
        at_block = rank.script.gives(aborted=frozen) == "now"
        if rank.script.by_framework:
            now = adapter.collect(frozen=frozen)
            return GivenStates(now, now if at_block else None)
        before = adapter.collect(frozen=frozen, before=rank.step)
        if not at_block:
            return GivenStates(before, None)
        after = adapter.collect(frozen=frozen)
        layouts = [each.layout(adapter.rank, adapter.world_size).tensors for each in (before, after)]
        if layouts[0] != layouts[1]:
            rank.moved(ScriptEvent.STRAYED)
            raise StateError(
                f"the code before the block of step {rank.step} has changed the names or shapes of tensors: all ranks "
                "start again at that step"
            )
        return GivenStates(before, after)
