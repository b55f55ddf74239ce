"""The checks of the next block after a block whose run did not count: a fault aborted it, or an exception ended it.

Theory. An exception may leave a block. If the script catches this exception and continues, the step of the block is
missing.

A fault aborts the open block. The state from the start of the block is restored. It includes the effect of the code
before the block. Then the loop gives the same step again. So the script runs the code before the block a second time.
A learning rate that is computed from the number of the step keeps its value. A schedule that the code moves would
move twice. This would happen on all ranks, so no comparison of the ranks would show it. Code that runs at every step
is checked with the first block (``block_proof.py``). Code that runs at some steps only (``if step.number % 500 ==
0:``) is checked here, after each fault.

Invariant: a block begins again with the state with which its aborted run began.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from holdfast.errors import ImpureBlockError, StepError
from holdfast.frameworks.common.optional_abilities import ProvesBlocks
from holdfast.session.steps.block_proof import difference

if TYPE_CHECKING:
    from holdfast.session.steps.step import Step

NO_RUN = (-1, 0)


class LeftBlocks:
    """The checks of one session.

    Args:
        adapter: the framework. If it cannot digest the state from which a block starts, no state is compared.
        on: compare states.
    """

    def __init__(self, adapter: object, *, on: bool) -> None:
        self._adapter = adapter if on and isinstance(adapter, ProvesBlocks) else None
        self._aborted = NO_RUN  # step, and index of the block in that step
        self._restored: Mapping[str, int] = {}
        self._ended = ""  # the exception by which the script left a block, in words

    def ended(self, step: Step, error: BaseException) -> None:
        """Record that ``error`` has ended the block of ``step``."""
        self._ended = f"step {step.number} was left by a {type(error).__name__}"

    def aborted(self, step: Step) -> None:
        """Take digests of the state from the start of the block of ``step``, which an abort has just restored."""
        if self._adapter is not None:
            self._aborted, self._restored = (step.number, step.part), self._adapter.found()

    def begin(self, step: Step) -> None:
        """Check that the block of ``step`` may begin.

        Raises:
            StepError: the script has caught the exception that ended an earlier block.
            ImpureBlockError: this block was aborted, and the code before it has changed the state when it ran again.
        """
        if self._ended:
            raise StepError(
                f"{self._ended} that the script caught", hint="catch it inside the block, or leave the loop"
            )
        aborted, self._aborted = self._aborted, NO_RUN
        if self._adapter is None or not step.again or aborted != (step.number, step.part):
            return
        if changed := difference(self._restored, self._adapter.found()):
            raise ImpureBlockError(
                f"step {step.number}: the code before the block has run again after a fault, and has changed "
                f"{changed} a second time",
                hint="write `and not step.again` into the condition of code before a block that moves a schedule or "
                "counts; session(verify_block=0) leaves out this check. The same command then continues at this step",
            )
