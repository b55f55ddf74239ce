"""Gradients with inf or nan that an optimizer is about to use, and the checkpoints of before.

Theory. A loss that is not finite has gradients that are not, and one update with these ruins weights for good. So each
rank looks at its gradients before the vote, which tells all; then all ranks do the same: stop before the update, leave
it out, or warn. From the first such update on every checkpoint holds what came of it, so the newest one before stays,
whatever the retention says. A gradient scaler decides before: what it leaves out does not come here.

Invariants:
1. All ranks of a job do the same at a step.
2. With ``stop`` and ``skip`` no weight ever sees such a gradient.
3. The newest checkpoint of before the first such update is never pruned by the runs that made it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
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
"""In the session's values: the first step whose update used such gradients."""


def checked_mode(value: object) -> NonFinite:
    """What ``session(nonfinite=...)`` may be. Raises: UsageError."""
    for mode in get_args(NonFinite):
        if value == mode:
            return mode  # type: ignore[no-any-return]
    raise UsageError(
        f"session(nonfinite={value!r}): not one of stop, skip, warn, ignore",
        hint='nonfinite="warn" is the default: told once, and the last finite checkpoint stays',
    )


class NonfiniteCheck:
    """Looks at the gradients of one rank.

    Attributes:
        since: the first step whose update used gradients with inf or nan; -1: none did.
    """

    def __init__(self, adapter: GroupAdapter, mode: NonFinite) -> None:
        self.since = -1
        self._mode = mode
        self._first = adapter.rank == 0
        self._gradients = (
            adapter.gradients if isinstance(adapter, SeesGradients) and mode != "ignore" else None
        )
        self._name = ""
        self._left_out = 0
        if self._gradients is not None and mode == "skip":
            self._gradients.may_drop()

    def look(self, optimizer: str) -> bool:
        """The gradients that this optimizer is about to use hold inf or nan here."""
        found = self._gradients.nonfinite(optimizer) if self._gradients is not None else ""
        self._name = found or self._name
        return bool(found)

    def look_within(self, optimizer: str) -> bool:
        """The same for an update inside ``step.update(name)``, made before the vote. Raises: UnsupportedError."""
        if self._mode == "skip":
            raise UnsupportedError(
                'session(nonfinite="skip") with step.update(name): such an update is made before all ranks have agreed',
                hint='nonfinite="stop" or "warn"',
            )
        return self.look(optimizer)

    def read(self, tally: Tally) -> Tally:
        """What the vote means: with ``stop`` it has not passed."""
        if not tally.nonfinite or self._mode != "stop":
            return tally
        return msgspec.structs.replace(tally, passed=False, reason="gradients hold inf or nan")

    def is_unsure(self, tally: Tally) -> bool:
        """The vote broke here: another rank may have found what this one has not, and all others leave the update
        out."""
        return self._mode == "skip" and self._gradients is not None and not tally.nonfinite

    def agreed(self, step: int) -> None:
        """All know that gradients of this step hold inf or nan, and no weight has changed. Raises: NonFiniteError."""
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
                    "holdfast: %s, and training goes on with them; the newest checkpoint up to step %d is finite, and "
                    'stays. session(nonfinite="stop") ends the run before such an update, "skip" leaves it out',
                    what,
                    step,
                )

    def stand_at(self, session: Mapping[str, object]) -> None:
        """The session's values of the state that is trained on with."""
        since = session.get(KEY, -1)
        self.since = since if isinstance(since, int) else -1
        if self.since >= 0 and self._first:
            log.warning(
                "holdfast: this state came of gradients with inf or nan in step %d; to go back before it: "
                'session(resume="DIRECTORY@STEP") with a step up to %d (holdfast ckpt ls DIRECTORY)',
                self.since,
                self.since,
            )

    def values(self) -> dict[str, int]:
        """For a checkpoint."""
        return {KEY: self.since} if self.since >= 0 else {}

    def keeps(self, policy: KeepPolicy) -> KeepPolicy:
        """The same, and the newest checkpoint of before."""

        def kept(valid: Sequence[Validity], age_s: AgeOf) -> set[str]:
            found = policy(valid, age_s)
            before = next((v.path for v in valid if v.step <= self.since), None)
            return found if before is None else found | {before}

        return kept
