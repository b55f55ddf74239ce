"""The plan of one recovery: the decided step, the verdict of the ladder, and the values that follow from them.

Invariants:
1. A plan is made once per generation, recorded before a member receives an order from it, and never changed.
2. Everything else that depends on the decision is computed from the plan.
"""

from __future__ import annotations

import msgspec

from holdfast.core.decide.decision import Decision
from holdfast.core.decide.stop_policy import STOP_CODE, LadderVerdict
from holdfast.core.ids import memory_name
from holdfast.exit_codes import Exit

STAY = -1


class RecoveryPlan(msgspec.Struct, frozen=True):
    """The decision and the verdict of the ladder for one generation."""

    decided: Decision
    verdict: LadderVerdict

    @property
    def takes_kept(self) -> bool:
        """True if replacements load the state that the lost ranks left in shared memory."""
        return self.verdict.action == "replace_from_memory" and not self.verdict.replays

    @property
    def rewind(self) -> int:
        """The step whose state in memory the survivors go back to; ``STAY`` if they stay at the decided step."""
        step = self.verdict.memory_step
        return step if self.takes_kept and step != self.decided.step else STAY

    @property
    def resume(self) -> str:
        """Name of the states in memory from which all ranks start again; empty if they start from a checkpoint."""
        from_memory = self.verdict.action == "restart_from_memory"
        return memory_name(self.verdict.memory_step) if from_memory else ""

    def end(self, *, library: bool) -> tuple[Exit, str] | None:
        """Return exit code and reason if this plan ends the run; None if ranks start again or are replaced.

        Args:
            library: the processes belong to another launcher, and only that launcher can start them.
        """
        verdict = self.verdict
        if verdict.stops:
            return STOP_CODE[verdict.action], verdict.reason
        if verdict.action == "requeue":
            return Exit.REQUEUE, verdict.reason
        if library and verdict.action != "restart_from_memory":
            return Exit.FAILED, verdict.reason
        return None
