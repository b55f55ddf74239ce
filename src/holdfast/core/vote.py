"""The vote: what every rank says before an update, and how the sum is read.

Theory. One int64 SUM all-reduce carries everything that the job must agree on. A SUM cannot compare values,
so the step number travels as (s, s^2): by Cauchy-Schwarz ``n * sum(s^2) == (sum s)^2`` holds exactly when all
n values are equal. All who see the reduction complete see the same sum, so they read the same tally.

Invariants:
1. ``passed`` implies that every rank of the group contributed once, said its collectives were sound, and was
   at the
   same step.
2. The sum cannot overflow: steps are compared modulo 2**20, so up to 2**22 ranks fit into 63 bits.
"""

from __future__ import annotations

import msgspec

from holdfast.errors import InternalError

STEP_MODULUS = 1 << 20
WORLD_SIZE_MAX = 1 << 22
FIELDS = ("count", "unsound", "exit", "save", "due", "busy", "nonfinite", "step", "step_squared")
VECTOR_LENGTH = len(FIELDS)


class Ballot(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank says about step ``step``."""

    step: int
    unsound: bool = False  # a collective of this rank broke: its gradients are worth nothing
    exit: bool = False  # asked to leave after this step
    save: bool = False  # asks for a checkpoint after this step
    due: bool = False  # its policy says that a periodic one is due after this step
    busy: bool = False  # its save before is still being written: another one now would hold up the step
    nonfinite: bool = False  # its gradients hold inf or nan

    def encode(self) -> list[int]:
        """As the vector that is summed over all ranks; int64, shape [VECTOR_LENGTH]."""
        residue = self.step % STEP_MODULUS
        flags = (self.unsound, self.exit, self.save, self.due, self.busy, self.nonfinite)
        return [1, *(int(flag) for flag in flags), residue, residue * residue]


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """What the job says: each flag is set when any rank set it, and counts only when ``passed``; ``reason`` says why
    not."""

    passed: bool
    exit: bool = False
    save: bool = False
    due: bool = False
    busy: bool = False
    nonfinite: bool = False
    reason: str = ""

    @staticmethod
    def read(vector: list[int], world_size: int) -> Tally:
        """Read the summed ``vector`` of a group of ``world_size`` ranks.

        Raises:
            InternalError: the vector has a wrong length.
        """
        if len(vector) != VECTOR_LENGTH:
            raise InternalError(f"a vote of {len(vector)} words, expected {VECTOR_LENGTH}")
        count, unsound, leave, save, due, busy, nonfinite, total, squares = vector
        if count != world_size:
            return Tally(passed=False, reason=f"{count} of {world_size} ranks voted")
        if unsound != 0:
            return Tally(passed=False, reason=f"{unsound} of {world_size} ranks saw a collective break")
        if world_size * squares != total * total:
            return Tally(passed=False, reason="the ranks are at different steps")
        return Tally(
            passed=True, exit=leave > 0, save=save > 0, due=due > 0, busy=busy > 0, nonfinite=nonfinite > 0
        )
