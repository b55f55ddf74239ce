"""The check that a replacement makes the same updates as the other ranks.

Theory. A script may decide by variables of its own whether a block makes an update ("three blocks since the last one"),
or with which learning rate. The ranks decide alike because their variables are equal. A replacement begins with the
variables of a start, so it may decide otherwise. If ranks hold copies of the weights (DDP), the comparison of the
copies shows this afterwards. If they hold shards (FSDP), nothing shows it. So each ballot identifies the optimizers
that step and their scheduled numbers, and the tally shows whether they are equal on all ranks. The ranks of some jobs
have different tasks: then they differ from the first steps on. A rank that has seen such a vote says so in its ballots,
and a difference is no evidence in this job.

An optimizer that steps after the vote is part of the next ballot. Its update has been made then, so no rank saves its
state.

After a restart of all ranks, and in a resumed job, all ranks begin with the variables of a start, so no vote shows that
the job makes other updates. No vote shows another loss. A warning at the first update therefore names such variables.

Invariants:
1. All ranks come to the same result, because it depends on the tally alone.
2. Nothing is refused without a replacement, or after a rank has seen a difference that was not refused.
"""

from __future__ import annotations

import logging
import zlib
from array import array
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from holdfast.core.worker.vote import STEP_MODULUS, Ballot, Tally
from holdfast.errors import StepError
from holdfast.frameworks.common.optional_abilities import HasScheduledNumbers
from holdfast.runtime.worker.script_frames import variables_of_script
from holdfast.session.steps.deciding_variables import (
    Places,
    deciding_variables,
    described,
    places_in_script,
)

log = logging.getLogger("holdfast")

_HINT = (
    "keep what decides about an update in session(state={...}) (a dict that the code changes after "
    "`if step.committed:`), or compute it from step.number"
)


class _Updates(NamedTuple):
    """The updates of the block of ``step``.

    Attributes:
        numbers: the scheduled numbers of each optimizer that has stepped, by the name of the update.
        number: identifies the updates, below STEP_MODULUS; 0: they are not compared.
    """

    step: int
    numbers: Mapping[str, list[float]]
    number: int


class EqualUpdates:
    """The check of one rank's updates against those of the other ranks.

    Args:
        rank: number of this rank. Rank 0 warns.
        source: the adapter, if it can read the scheduled numbers of optimizers.
        scaled: a gradient scaler may leave out an update on this rank alone.
    """

    def __init__(self, rank: int, source: HasScheduledNumbers | None, *, scaled: bool) -> None:
        self._first = rank == 0
        self._source = source
        self._scaled = scaled
        self._replaces = False  # this process has replaced a lost one
        self._uneven = False  # the ranks have made different updates in a vote that was not refused
        self._places: dict[str, Places] = {}  # of the first step of each optimizer in the script
        self._made: dict[str, list[float]] = {}  # in the open block
        self._voted = self._last = _Updates(
            -1, {}, 0
        )  # of the newest vote, and of the step that was committed last

    def opens(self) -> None:
        """Record that a block begins."""
        self._made = {}

    def joins(self) -> None:
        """Record that this process replaces a lost one."""
        self._replaces = True

    def steps(self, optimizer: str, within: str) -> None:
        """Record that ``optimizer`` is about to step, in the update with the name ``within`` (empty: without a name).

        At its first step in this process, warn of variables that decide about it.
        """
        if optimizer not in self._places:
            self._begins(optimizer)
        numbers = [] if self._source is None else self._source.scheduled_numbers(optimizer)
        self._made[f"{within}/{optimizer}" if within else optimizer] = numbers

    def _begins(self, optimizer: str) -> None:
        places = self._places[optimizer] = places_in_script()
        if self._replaces or not self._first or not places:
            return  # the other ranks wait for a replacement
        variables = variables_of_script()
        names = [name for name in deciding_variables(places, update=True) if _is_plain(name, variables)]
        if names:
            log.warning(
                "holdfast: the updates depend on %s (%s), and a process that joins or resumes begins with the value "
                "of a start: %s",
                ", ".join(names),
                described(places),
                _HINT,
            )

    def ballot(self, ballot: Ballot) -> Ballot:
        """Return ``ballot`` with the updates of this rank."""
        self._voted = _Updates(ballot.step, dict(self._made), self._number())
        return msgspec.structs.replace(
            ballot,
            updates=self._voted.number,
            # A replacement does not know the step before its first one.
            earlier=self._last.number if self._last.step == ballot.step - 1 else 0,
            uneven=self._uneven,
            replaces=self._replaces,
        )

    def read(self, tally: Tally, step: int) -> None:
        """Remember a difference between the updates of ranks that is not refused.

        Raises:
            StepError: the difference comes from a replacement. No rank makes the update of the vote.
        """
        if tally.diverged:
            raise StepError(f"step {step}: {self._described(self._made)}", hint=_HINT)
        if tally.diverged_earlier:
            raise StepError(
                f"step {step - 1}: {self._described(self._last.numbers)}. A checkpoint of step {step} would hold this "
                "update; no rank saves one now",
                hint=_HINT,
            )
        self._uneven = self._uneven or tally.uneven

    def committed(self) -> None:
        """Record that the step of the newest vote, whose block has just ended, is committed."""
        voted = self._voted
        late = len(self._made) > len(voted.numbers)
        self._last = voted._replace(numbers=self._made, number=self._number()) if late else voted

    def _number(self) -> int:
        """Return a number from 1 to STEP_MODULUS - 1 that identifies the updates of the block; 0: not compared."""
        if self._scaled and not self._made:
            return 0
        found = 0
        for name in sorted(self._made):
            found = zlib.crc32(array("d", self._made[name]).tobytes(), zlib.crc32(name.encode(), found))
        return found % (STEP_MODULUS - 1) + 1

    def _described(self, updates: Mapping[str, list[float]]) -> str:
        steps = [f"{name!r}{f' (lr {numbers[0]:g})' if numbers else ''}" for name, numbers in updates.items()]
        does = f"steps {', '.join(steps)}" if steps else "makes no update"
        whose = "this process" if self._replaces else "another process"
        names = {
            name: None
            for places in self._places.values()
            if places
            for name in deciding_variables(places, update=True)
        }
        because = f"; the updates depend on {', '.join(names)}" if names else ""
        return (
            f"this rank {does}, and not all ranks do the same. The cause: {whose} has replaced a lost one, and begins "
            f"with the variables of a start{because}"
        )


def _is_plain(name: str, variables: Mapping[str, object]) -> bool:
    """Return whether the variable, or attribute of a variable, has a bool, number or string as its value.

    Other values may be state of the session.
    """
    owner, _, attribute = name.partition(".")
    value = variables.get(owner)
    return isinstance(getattr(value, attribute, None) if attribute else value, bool | int | float | str)
