"""The check for gradients with inf or nan, and the protection of the last checkpoint before an update with them.

Theory. A loss that is not finite has gradients that are not finite. One update with such gradients ruins the weights
permanently. So each rank checks its gradients before the vote, and the vote carries the result to all ranks. All
ranks then act in the same way: they stop before the update, leave out the update, or warn. Every checkpoint after the
first such update is affected. Therefore the newest checkpoint before that update is kept, even if the retention
policy would remove it. A gradient scaler acts earlier: an update that the scaler leaves out is not checked.

Invariants:
1. All ranks of a job take the same action at a step.
2. With ``stop`` and ``skip`` no weight is ever updated with such a gradient.
3. A run that made such an update, and each run that continues it, never prunes the newest checkpoint before the update.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

import msgspec

from holdfast.core.worker.vote import Tally
from holdfast.errors import NonFiniteError, UnsupportedError, UsageError
from holdfast.frameworks.common.adapter import GroupAdapter
from holdfast.frameworks.common.optional_abilities import SeesGradients
from holdfast.store.manage.retention import AgeOf, KeepPolicy
from holdfast.store.read.validation import Validity

log = logging.getLogger("holdfast")
NonFinite = Literal["stop", "skip", "warn", "ignore"]
KEY = "nonfinite_step"
"""Key, in the session's plain values, of the first step whose update used gradients with inf or nan."""


def checked_mode(value: object) -> NonFinite:
    """Return the argument ``nonfinite`` of a session after a check. Raises: UsageError: it is not a known mode."""
    for mode in get_args(NonFinite):
        if value == mode:
            return mode  # type: ignore[no-any-return]
    raise UsageError(
        f"session(nonfinite={value!r}): not one of stop, skip, warn, ignore",
        hint='nonfinite="warn" is the default: one warning, and the last finite checkpoint stays',
    )


class NonfiniteCheck:
    """The check of one rank's gradients for inf and nan.

    Args:
        adapter: the framework. If it cannot read gradients, nothing is checked.
        mode: the action: ``stop``, ``skip``, ``warn`` or ``ignore``.

    Attributes:
        since: the first step whose update used gradients with inf or nan; -1 if none did.
    """

    def __init__(self, adapter: GroupAdapter, mode: NonFinite) -> None:
        self.since = -1
        self._mode = mode
        self._first = adapter.rank == 0
        self._gradients = (
            adapter.gradients if isinstance(adapter, SeesGradients) and mode != "ignore" else None
        )
        self._name = ""
        self._result: Callable[[], str] | None = None  # of the check that was begun last
        self._left_out = 0
        if self._gradients is not None and mode == "skip":
            self._gradients.may_drop()

    def begin(self, optimizer: str) -> None:
        """Queue the check on the device, without a wait, for the gradients that ``optimizer`` is about to use."""
        self._result = None if self._gradients is None else self._gradients.begin_check(optimizer)

    def end(self) -> bool:
        """Wait for the check that was begun. Return whether the gradients hold inf or nan on this rank."""
        found = "" if self._result is None else self._result()
        self._result = None
        self._name = found or self._name
        return bool(found)

    def look_within(self, optimizer: str) -> bool:
        """Return the result of the check for an update inside ``step.update(name)``. This update comes before the vote.

        Raises:
            UnsupportedError: the mode is ``skip``, which needs the vote before the update.
        """
        if self._mode == "skip":
            raise UnsupportedError(
                'session(nonfinite="skip") with step.update(name): such an update is made before all ranks have agreed',
                hint='nonfinite="stop" or "warn"',
            )
        self.begin(optimizer)
        return self.end()

    def read(self, tally: Tally) -> Tally:
        """Return ``tally``. In mode ``stop``, mark the tally as not passed if gradients of any rank hold inf or nan."""
        if not tally.nonfinite or self._mode != "stop":
            return tally
        return msgspec.structs.replace(tally, passed=False, reason="gradients hold inf or nan")

    def is_unsure(self, tally: Tally) -> bool:
        """Return whether the other ranks may leave out the update of a step whose vote broke on this rank.

        They may do this in mode ``skip``: another rank may have found inf or nan, and this rank did not receive the
        result.
        """
        return self._mode == "skip" and self._gradients is not None and not tally.nonfinite

    def agreed(self, step: int) -> None:
        """Act on inf or nan in the gradients of ``step``: stop, leave out the update, or warn.

        Called after the vote has shown this to all ranks, and before any weight changes.

        Raises:
            NonFiniteError: the mode is ``stop``.
        """
        where = f" (first in {self._name})" if self._name else " on another rank"
        what = f"step {step}: the gradients hold inf or nan{where}"
        self._name = ""
        if self._mode == "stop":
            raise NonFiniteError(
                f"{what}; no weight has changed",
                hint="look at the loss and the batch of this step, clip gradients or lower the learning rate; "
                'session(nonfinite="skip") leaves such updates out',
            )
        if self._mode == "skip" and self._gradients is not None:
            self._gradients.drop()
            self._left_out += 1
            if self._first and self._left_out & (self._left_out - 1) == 0:
                log.warning("holdfast: %s: this update is left out, %d so far", what, self._left_out)
        elif self.since < 0:
            self.since = step
            if self._first:
                log.warning(
                    "holdfast: %s, and training continues with them; the newest checkpoint up to step %d is finite, "
                    'and stays. session(nonfinite="stop") ends the run before such an update, "skip" leaves it out',
                    what,
                    step,
                )

    def stand_at(self, session: Mapping[str, object]) -> None:
        """Take over :attr:`since` from ``session``, the loaded plain values. Warn if an update used inf or nan."""
        since = session.get(KEY, -1)
        self.since = since if isinstance(since, int) else -1
        if self.since >= 0 and self._first:
            log.warning(
                "holdfast: this state was computed from gradients with inf or nan in step %d; to go back before it: "
                'session(resume="DIRECTORY@STEP") with a step up to %d (holdfast ckpt ls DIRECTORY)',
                self.since,
                self.since,
            )

    def values(self) -> dict[str, int]:
        """Return :attr:`since` under ``KEY``, for a checkpoint; empty if no update used gradients with inf or nan."""
        return {KEY: self.since} if self.since >= 0 else {}

    def keeps(self, policy: KeepPolicy) -> KeepPolicy:
        """Return ``policy``, extended by the rule to keep the newest checkpoint up to step :attr:`since`."""

        def kept(valid: Sequence[Validity], age_s: AgeOf) -> set[str]:
            found = policy(valid, age_s)
            before = next((v.path for v in valid if v.step <= self.since), None)
            return found if before is None else found | {before}

        return kept
