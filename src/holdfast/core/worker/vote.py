"""The vote before an update: the ballot of each rank, and the tally read from the sum of all ballots.

Theory. One int64 SUM all-reduce carries everything that the job must agree on. A SUM cannot compare values, so the step
number travels as (s, s^2): by Cauchy-Schwarz ``n * sum(s^2) == (sum s)^2`` holds exactly when all n values are equal.
All ranks on which the reduction completes get the same sum, so they read the same tally.

One more word compares all copies of the state, for any number of copies. Each holder of a copy adds its digest times a
factor. The factors of all holders of one copy add up to zero (``store/layouts/replica_digests.py``). So the word is
zero modulo 2**64 if all copies are equal. If copies differ, the word is zero with a probability of only 2**-64. The
word counts only if the digests of all ranks cover the same data (``Ballot.plan``).

The updates of a step are compared like the steps, as a number and its square, among the ranks that give a number. Ranks
may differ by design. So a difference is an error only if the job has a replacement and no rank has seen a difference
before (``session/steps/equal_updates.py``). An optimizer that steps after the vote is compared in the next vote.
Variables of the script are compared in the same way when a replacement votes for the first time, and those in the
user's state in every vote.

Invariants:
1. ``passed`` implies that every rank of the group contributed once, reported sound collectives, and was at the same
   step.
2. No sum that is compared can overflow: steps are compared modulo 2**20, so up to 2**22 ranks fit into 63 bits. The
   word of the digests wraps on purpose.
3. A vote does not pass if copies are unequal, or if a replacement is about to make other updates. Copies that an
   earlier update of a replacement has made unequal are an exception: all ranks raise an error after the vote.
"""

from __future__ import annotations

import msgspec

from holdfast.errors import InternalError
from holdfast.text import plural

STEP_MODULUS = 1 << 20
WORLD_SIZE_MAX = 1 << 22
DIGEST_MODULUS = 1 << 64
FIELDS = (
    *("count", "unsound", "exit", "save", "due", "busy", "nonfinite", "keep", "moved", "hold"),
    *("replaces", "uneven", "step", "step_squared"),
    *("updating", "updates", "updates_squared", "updated_earlier", "earlier", "earlier_squared"),
    *("joins", "again", "mixed", "known", "variables", "variables_squared"),
    *("has_user_state", "user_state", "user_state_squared", "plan", "plan_squared", "digest"),
)
VECTOR_LENGTH = len(FIELDS)


class Ballot(msgspec.Struct, frozen=True, kw_only=True):
    """The ballot of one rank in the vote of ``step``. With ``between``, it is for a vote just before that step."""

    step: int
    unsound: bool = False  # a collective of this rank broke: its gradients must not be used
    exit: bool = False  # requests that all ranks leave after this step
    # Requests a checkpoint after this step; in a vote between two steps: the rank could not write its share of one.
    save: bool = False
    due: bool = False  # its policy requests a periodic checkpoint after this step
    busy: bool = False  # its previous save is still being written: another save now would delay the step
    nonfinite: bool = False  # its gradients hold inf or nan
    keep: bool = False  # it can afford to keep its state in memory after this step
    moved: bool = False  # its layout differs from the published one, or not all layouts were published
    hold: bool = False  # requests that all ranks stop after this step, for a change of seats
    replaces: bool = False  # its process has replaced a lost one
    uneven: bool = False  # it has seen a passed vote in which the ranks made different updates
    updates: int = (
        0  # identifies the optimizers that step before or directly after the vote, below STEP_MODULUS
    )
    earlier: int = 0  # identifies those that stepped in the step before, below STEP_MODULUS; 0: not compared
    joins: bool = False  # its process has replaced a lost one, and votes for the first time
    again: bool = False  # it joins, and one of ``variables`` has its first value of the job again
    mixed: bool = False  # it has seen a passed vote in which ``variables`` were not equal
    # Identifies the values of the script's variables on which the updates depend, below STEP_MODULUS; 0: not compared.
    variables: int = 0
    # Identifies the values in ``state=`` on which the updates depend, below STEP_MODULUS; 0: not compared.
    user_state: int = 0
    plan: int = 0  # identifies the data that ``digest`` covers, below STEP_MODULUS; 0: nothing is compared
    digest: int = 0  # sum of the digests of its copies times its factors, any integer
    between: bool = False  # this vote is between the last step and ``step``, not the vote of a step

    def encode(self) -> list[int]:
        """Return the ballot as the vector that is summed over all ranks; int64, shape [VECTOR_LENGTH]."""
        residue = (2 * self.step + self.between) % STEP_MODULUS
        flags = (
            *(self.unsound, self.exit, self.save, self.due, self.busy),
            *(self.nonfinite, self.keep, self.moved, self.hold, self.replaces, self.uneven),
        )
        digest = (self.digest + DIGEST_MODULUS // 2) % DIGEST_MODULUS - DIGEST_MODULUS // 2
        return [
            *(1, *(int(flag) for flag in flags), residue, residue * residue),
            *_counted(self.updates),
            *_counted(self.earlier),
            *(int(self.joins), int(self.again), int(self.mixed)),
            *_counted(self.variables),
            *_counted(self.user_state),
            *(self.plan, self.plan * self.plan, digest),
        ]


def _counted(number: int) -> tuple[int, int, int]:
    """Return the three words by which a number of some ranks is compared: 1 if it is given (not 0), it, its square."""
    return int(number > 0), number, number * number


def all_equal(count: int, total: int, squares: int) -> bool:
    """Return True if all of ``count`` summed numbers were equal (by Cauchy-Schwarz).

    Args:
        count: how many numbers were summed.
        total, squares: the sum of the numbers, and the sum of their squares.

    Example:
        ``all_equal(2, 3 + 3, 9 + 9)`` is True.
    """
    return count * squares == total * total


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a vote. A flag without a comment is set if any rank set it. Flags count only if ``passed``.

    ``reason``: why the vote did not pass; empty if it passed.
    """

    passed: bool
    exit: bool = False
    save: bool = False
    due: bool = False
    busy: bool = False
    nonfinite: bool = False
    keep: bool = False  # all ranks set ``keep``
    # All ranks publish their layouts under the name of this vote (``layout_agreement.py``).
    moved: bool = False
    hold: bool = False  # all ranks stop after this step
    compared: bool = False  # all ranks compared their copies, and all are equal
    differ: bool = False  # copies of the state differ between ranks; then ``passed`` is False
    uneven: bool = False  # the ranks make different updates in this step, or made them in the step before
    diverged: bool = False  # they do so in this step because of a replacement; then ``passed`` is False
    # They did so in the step before because of a replacement, so the state of that step is wrong.
    diverged_earlier: bool = False
    mixed: bool = False  # the script's variables on which the updates depend are not equal
    # They are so because a replacement joins, or all ranks are replacements and begin with them again; then ``passed``
    # is False.
    began_again: bool = False
    # Values in ``state=`` on which the updates depend differ between ranks; then ``passed`` is False.
    user_state_differs: bool = False
    reason: str = ""

    @property
    def explained(self) -> bool:
        """True if this vote did not pass, and a separate error or report names the cause."""
        causes = (self.differ, self.nonfinite, self.diverged, self.began_again, self.user_state_differs)
        return not self.passed and any(causes)

    @staticmethod
    def read(vector: list[int], world_size: int) -> Tally:
        """Return the tally of ``vector``, the sum of the encoded ballots of a group of ``world_size`` ranks.

        Raises:
            InternalError: the vector has a wrong length.
        """
        if len(vector) != VECTOR_LENGTH:
            raise InternalError(f"a vote of {len(vector)} words, expected {VECTOR_LENGTH}")
        said = dict(zip(FIELDS, vector, strict=True))
        count, unsound, plan = said["count"], said["unsound"], said["plan"]
        if count != world_size:
            return Tally(passed=False, reason=f"{count} of {plural(world_size, 'rank')} voted")
        if unsound != 0:
            return Tally(
                passed=False, reason=f"{unsound} of {plural(world_size, 'rank')} saw a collective break"
            )
        if not all_equal(world_size, said["step"], said["step_squared"]):
            return Tally(passed=False, reason="the ranks are at different steps")
        compared = plan > 0 and all_equal(world_size, plan, said["plan_squared"])
        differs_now = not all_equal(said["updating"], said["updates"], said["updates_squared"])
        differed = not all_equal(said["updated_earlier"], said["earlier"], said["earlier_squared"])
        mixed = not all_equal(said["known"], said["variables"], said["variables_squared"])
        replaced = said["replaces"] > 0 and said["uneven"] == 0
        # First: such an update with a name is made ahead of the vote, and has made the copies unequal.
        if differs_now and replaced and not differed:
            reason = "a replacement makes other updates than the other ranks"
            return Tally(passed=False, uneven=True, diverged=True, reason=reason)
        if mixed and said["joins"] > 0 and said["mixed"] == 0:
            reason = "a replacement begins with other variables of the script than the other ranks have"
            return Tally(passed=False, mixed=True, began_again=True, reason=reason)
        # No rank has the variables of the job: the last one that had them was lost before this vote.
        if said["joins"] == world_size and said["again"] > 0:
            reason = "all ranks are replacements, and begin with the variables of a start"
            return Tally(passed=False, began_again=True, reason=reason)
        if not all_equal(said["has_user_state"], said["user_state"], said["user_state_squared"]):
            reason = "values in state= on which the updates depend differ between ranks"
            return Tally(passed=False, user_state_differs=True, reason=reason)
        diverged_earlier = differed and replaced
        if compared and said["digest"] % DIGEST_MODULUS != 0 and not diverged_earlier:
            return Tally(passed=False, differ=True, reason="copies of the state differ between ranks")
        return Tally(
            passed=True,
            exit=said["exit"] > 0,
            save=said["save"] > 0,
            due=said["due"] > 0,
            busy=said["busy"] > 0,
            nonfinite=said["nonfinite"] > 0,
            keep=said["keep"] == world_size,
            moved=said["moved"] > 0,
            hold=said["hold"] > 0,
            compared=compared,
            uneven=differs_now or differed,
            diverged_earlier=diverged_earlier,
            mixed=mixed,
        )
