"""The loaded state, from the load to the loop over steps in which the process continues the job.

Theory. A process that continues a job runs the script from its top. The code before the job's loop (before
``s.epochs(N)``, and at the start of the open epoch) runs again, and the loaded state already includes its effect.
When the loop begins, learning rates, schedules, buffers and the user's state are restored, as after an aborted block.
Weights and optimizer state are not, because copies of them would double the memory. Some scripts write weights in
that code: a clustering sets prototypes at the start of an epoch, or a pretrained file is loaded after the session was
entered. This would change the weights a second time. All ranks would make the same error, so no comparison of the
ranks would show it. So the digests of the loaded tensors are compared where an epoch or the loop begins.

Invariant: a process enters the loop of the job with the weights and the optimizer state that it has loaded.
"""

from __future__ import annotations

from holdfast.errors import StepError
from holdfast.frameworks.common.adapter import Adapter
from holdfast.frameworks.common.optional_abilities import ComparesCopies
from holdfast.session.steps.block_proof import difference
from holdfast.store.layouts.box import Extent


class LoadedState:
    """The loaded state of one session.

    Args:
        adapter: the framework. If it cannot digest its state, weights are not compared.
    """

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._digests: dict[str, int] = {}  # empty: nothing is loaded, or the job has made steps since
        self._copied = False  # state that the code before the loop may change is copied

    def loaded(self) -> None:
        """Take digests of the weights and the optimizer state, which this process has just loaded."""
        self._digests = self._digests_now()

    def copy(self, step: int) -> None:
        """Before the script runs code again, copy the state of ``step`` for the loop, if there is no copy yet."""
        if not self._copied:
            self._copied = True
            self._adapter.begin(step)

    def begins_turn(self, step: int) -> None:
        """Check the state of ``step`` at the start of an epoch or phase in which the job has not opened a loop.

        Raises:
            StepError: the code before this turn has written loaded tensors.
        """
        self._check(step, "between the session's begin and this epoch")

    def opens_loop(self, step: int, *, again: bool) -> None:
        """Restore those values of the state of ``step`` that the code before the loop has changed.

        Check the other values.

        Args:
            again: the job has opened this loop before, so the code before the loop has run again.

        Raises:
            StepError: the code before the loop has written loaded tensors.
        """
        if self._copied:
            self._copied = False
            self._adapter.abort()
        if again:
            self._check(step, "before this loop over steps")
        self._digests = {}

    def _check(self, step: int, where: str) -> None:
        loaded, self._digests = self._digests, {}
        if loaded and (changed := difference(loaded, self._digests_now())):
            raise StepError(
                f"step {step}: this process continues the job, and the code {where} has run again and has changed "
                f"{changed} of the loaded state",
                hint="write weights before the session, or under `if s.new_epoch:`, from values that a second run "
                "finds unchanged (those in state=). The same command then continues at this step; "
                "session(verify_block=0) leaves out this check",
            )

    def _digests_now(self) -> dict[str, int]:
        adapter = self._adapter
        if not isinstance(adapter, ComparesCopies):
            return {}
        collected = adapter.collect()
        boxes: dict[str, list[Extent]] = {}
        for each in collected.layout(adapter.rank, adapter.world_size).tensors:
            if adapter.compares(each.fqn):
                boxes.setdefault(each.fqn, []).append(Extent(each.fqn, each.box, 0, each.size_bytes))
        return {fqn: adapter.digest(collected, extents) for fqn, extents in boxes.items()}
