"""The random generators of the script, and the check that they continue with the job.

Theory. A game of a library has a generator of its own, deep inside of its objects. It draws rarely, for example where a
game ends. If a script keeps the other values of the game in ``s.own`` and not the generator, a replacement continues
with the generator of a start: the numbers that it draws are other ones, and no variable of the script shows that. So
the states of all generators are read. A generator has *moved* if its state is not that with which this process has
entered its first loop.

The script may keep a generator in any way, for example as a text, and may put it back in the block. So nothing is
compared before a fault. A process that continues the job compares the generators that had moved in an earlier process
of its rank. It refuses a generator that has the state of a start in two places: where the process enters its first
loop, and at its first update. If the first block draws from such a generator, the check of the block finds it.

A generator that has moved only outside of blocks may serve a log. So a warning names it, and it is not refused.

Invariant: a script is neither refused nor warned before a fault or a resume.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from holdfast.errors import StepError
from holdfast.frameworks.common.optional_abilities import FindsGenerators
from holdfast.runtime.worker.script_frames import variables_of_script
from holdfast.session.variables.deciding_variables import VARIABLES_MAX
from holdfast.session.variables.search_defects import warns_of_defects

log = logging.getLogger("holdfast")

KEY = "generators"
"""Key of the rank-local values for the generators that have moved."""
GENERATORS_MAX = 64
IN_BLOCK, OUTSIDE = "block", "outside"
_CAUSE = (
    "This process continues the job, and has the state with which the script begins: the numbers that it draws are not "
    "those of the lost process"
)
_HINT = (
    "keep the generator: in session(state={'name': generator}) if all ranks draw alike, otherwise its state in s.own "
    "(generator.bit_generator.state, with the other values of a game), put back at the start of the block"
)


class HiddenGenerators:
    """The random generators of one rank's script that the session neither has nor seeds.

    Args:
        source: the adapter; None if it cannot find generators, or nothing is checked.
    """

    def __init__(self, source: FindsGenerators | None) -> None:
        self._source = source
        self._entered = False
        self._generators: Mapping[str, object] = {}
        self._begin: Mapping[str, int] = {}  # the states where this process has entered its first loop
        self._still: set[str] = set()  # those that have not moved in a block of this process
        self._last: Mapping[str, int] = {}  # the states of these, as they were read last
        # By place (in a block, or outside): the states with which the process that moved them had entered its loop.
        self._moved: Mapping[str, Mapping[str, int]] = {IN_BLOCK: {}, OUTSIDE: {}}
        # Those of the loaded state, until a step is committed. Check runs of this process may move others.
        self._before: Mapping[str, Mapping[str, int]] = {}
        self._looked = False  # at an update of the open block
        self._told = False

    def stand_at(self, local: Mapping[str, Any]) -> None:
        """Take over the generators that had moved from the rank-local values of the loaded state."""
        kept = local.get(KEY, {})
        self._moved = {place: dict(kept.get(place, {})) for place in (IN_BLOCK, OUTSIDE)}
        self._before = self._moved

    def of_rank(self) -> dict[str, Any]:
        """Return the rank-local values: the generators that have moved. The result is empty if there are none."""
        moved = {place: dict(names) for place, names in self._moved.items() if names}
        return {KEY: moved} if moved else {}

    def enters_loop(self) -> None:
        """Read the states of the script's generators where this process enters its first loop."""
        if self._source is None or self._entered:
            return
        self._entered = True
        with warns_of_defects(
            "random generators of the script that a new process begins again are not noticed"
        ):
            found = self._source.generators(variables_of_script())
            self._generators = dict(islice(found.items(), GENERATORS_MAX))
            self._begin = self._last = self._states(self._generators)
            self._still = set(self._begin)

    def opens(self) -> None:
        """Record that a block begins."""
        self._looked = False
        self._note(OUTSIDE)

    def look(self) -> None:
        """Read the states at the first update of a block.

        Raises:
            StepError: this process continues the job, and a generator that blocks draw from has begun again.
        """
        if self._looked:
            return
        if self._before:
            self._compare()
        self._looked = True
        self._note(IN_BLOCK)

    def committed(self) -> None:
        """Record that a step is committed: the block may also draw after its update."""
        self._note(IN_BLOCK)
        self._before = {}

    def _states(self, names: Iterable[str]) -> dict[str, int]:
        """Return digests of the present states of generators, by name."""
        if self._source is None:
            return {}
        return {name: self._source.state_of_generator(self._generators[name]) for name in names}

    def _note(self, place: str) -> None:
        """Record the generators that have moved since they were read last. ``place``: where the script has been."""
        before, self._last = self._last, self._states(self._still)
        moved = {name for name, state in self._last.items() if state != before[name]}
        if not moved:
            return
        in_block, outside = self._moved[IN_BLOCK], self._moved[OUTSIDE]
        begin = {name: outside.get(name, self._begin[name]) for name in moved - in_block.keys()}
        if place == IN_BLOCK:
            self._still -= moved
            in_block, outside = {**in_block, **begin}, {n: outside[n] for n in outside.keys() - moved}
        else:
            outside = {**outside, **begin}
        self._moved = {IN_BLOCK: in_block, OUTSIDE: outside}

    def _compare(self) -> None:
        """Compare the generators that had moved in the earlier process of this rank with their states at a start.

        The script may have put another generator in the place of one, so only those that it still holds count.
        """
        again = {
            place: {name for name, then in names.items() if self._begin.get(name) == then}
            for place, names in self._before.items()
        }
        names = set[str]().union(*again.values())
        if self._source is None or not names:
            return
        held = set(map(id, self._source.generators(variables_of_script()).values()))
        here = self._states(name for name in names if id(self._generators[name]) in held)
        in_block, outside = (
            ", ".join(sorted(n for n in again[place] if here.get(n) == self._begin[n])[:VARIABLES_MAX])
            for place in (IN_BLOCK, OUTSIDE)
        )
        if in_block:
            raise StepError(
                f"blocks draw from random generators that have begun again: {in_block}. {_CAUSE}",
                hint=f"{_HINT}; session(verify_block=0) leaves out this check",
            )
        if outside and not self._told:
            self._told = True
            log.warning(
                "holdfast: random generators have begun again: %s. %s. If the training depends on them: %s",
                outside,
                _CAUSE,
                _HINT,
            )
