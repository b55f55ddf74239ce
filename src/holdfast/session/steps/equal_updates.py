"""The check that a replacement makes the same updates as the other ranks.

Theory. A script may use variables of its own to decide whether a block makes an update ("three blocks since the last
one"), or to set the learning rate. The ranks decide alike because their variables are equal. A replacement begins
with the initial values of these variables, so it may decide otherwise. If ranks hold copies of the weights (DDP), the
comparison of the copies shows this afterwards. If they hold shards (FSDP), nothing shows it. So each ballot
identifies the optimizers that step and their scheduled numbers, and the tally shows whether they are equal on all
ranks. In some jobs the ranks have different tasks, and their updates differ from the first steps on. A rank that has
seen such a vote sets ``uneven`` in its ballots. In this job a difference is then no evidence of an error.

An optimizer that steps after the vote is missing in the ballot of the step, so the next ballot repeats the comparison
and includes it. If the repeated comparison shows a difference, the update has already been made, and no rank saves
the state any more.

The text of the error describes the difference (``update_differences.py``).

The variables that a search in the script's source finds are compared in the same votes (``update_variables.py``),
and so are those in the user's state (``state_variables.py``), in every vote.

Invariants:
1. All ranks come to the same result, because it depends on the tally alone.
2. Nothing is refused without a replacement, or after a rank has seen a difference that was not refused.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from holdfast.core.worker.vote import Ballot, Tally
from holdfast.errors import StepError
from holdfast.frameworks.common.optional_abilities import DescribesUpdates, FindsGenerators
from holdfast.runtime.worker.worker_client import WorkerClient
from holdfast.session.steps.update_differences import Updates, described, difference
from holdfast.session.variables.cut_changes import HINT as HINT_OF_CUT
from holdfast.session.variables.cut_changes import CutChange
from holdfast.session.variables.hidden_generators import HiddenGenerators
from holdfast.session.variables.input_values import InputValues
from holdfast.session.variables.plain_values import identified
from holdfast.session.variables.state_variables import HINT as HINT_OF_STATE
from holdfast.session.variables.state_variables import StateVariables
from holdfast.session.variables.update_variables import HINT, UpdateVariables


class _Updates(NamedTuple):
    """The updates of the block of ``step``.

    Attributes:
        settings: the scheduled settings of each optimizer that has stepped, by the name of the update.
        number: identifies the updates, below STEP_MODULUS; 0 if they are not compared.
    """

    step: int
    settings: Updates
    number: int


class EqualUpdates:
    """The check of one rank's updates against those of the other ranks.

    Args:
        rank: number of this rank. Rank 0 warns.
        source: the adapter, if it can describe updates.
        client: the connection to the agent, over which an error gets the updates of another rank; None if there is no
            agent.
        scaled: a gradient scaler may leave out an update on this rank alone.
        searches: look for variables on which the updates depend.
        generators: the adapter, if it can find the generators of the script.

    Attributes:
        variables: the check of these variables.
        in_state: the check of those variables that are in ``state=``.
        inputs: the check of the variables that the code before a loop sets.
        generators: the check of the random generators of the script.
    """

    def __init__(
        self,
        rank: int,
        source: DescribesUpdates | None,
        client: WorkerClient | None = None,
        *,
        scaled: bool,
        searches: bool,
        generators: FindsGenerators | None = None,
    ) -> None:
        self.variables = UpdateVariables(source, on=searches, warns=rank == 0)
        self.in_state = StateVariables(source)
        self.generators = HiddenGenerators(generators if searches else None)
        self.inputs = InputValues(source if searches else None, self.variables, warns=rank == 0)
        self._rank = rank
        self._source = source
        self._client = client
        self._scaled = scaled
        self._replaces = False  # this process has replaced a lost one
        self._uneven = False  # the ranks have made different updates in a vote that was not refused
        self._cut: CutChange | None = None  # a change that a lost rank would cut off
        self._known: set[str] = set()  # optimizers that have stepped in this process
        self._made: dict[str, Mapping[str, list[float]]] = {}  # in the open block
        # Of the newest vote, and of the step that was committed last.
        self._voted = self._last = _Updates(-1, {}, 0)

    @property
    def has_committed(self) -> bool:
        """True if this process has committed a step."""
        return self._last.step >= 0

    def opens(self) -> None:
        """Record that a block begins."""
        self._made = {}
        self.variables.opens()
        self.generators.opens()
        self.in_state.opens()

    def joins(self) -> None:
        """Record that this process replaces a lost process."""
        self._replaces = True

    def steps(self, optimizer: str, within: str) -> None:
        """Record that ``optimizer`` is about to step, in the update with the name ``within`` (empty: without a name).

        Raises:
            StepError: this process continues the job, and a variable on which the updates depend has its value from
                the start of the script again; or the code after the block changes the training after a collective.
        """
        if optimizer not in self._known:
            self._known.add(optimizer)
            found = self.variables.search(joins=self._replaces)
            self.in_state.add(found.in_state)
            self._cut = self._cut or found.cut
        if self._cut is not None:  # in each run of the first block, because a rehearsal excuses errors
            raise StepError(
                f"the code after the block changes the training ({self._cut.change}) after a collective "
                f"({self._cut.collective}; block at {self._cut.block}). A rank that is lost in the collective would "
                "cut off this change",
                hint=HINT_OF_CUT,
            )
        settings = {} if self._source is None else self._source.scheduled_settings(optimizer)
        self._made[f"{within}/{optimizer}" if within else optimizer] = settings
        self.variables.look(joins=self._replaces)
        self.generators.look()
        self.in_state.look()

    def ballot(self, ballot: Ballot, *, alike: bool) -> Ballot:
        """Return ``ballot`` with the updates of this rank.

        Args:
            ballot: the ballot without them.
            alike: this rank holds a part of every tensor. If all ranks do, each can be given the user's state of any
                other rank, so its values are compared.
        """
        self._voted = _Updates(ballot.step, dict(self._made), self._number())
        return msgspec.structs.replace(
            ballot,
            updates=self._voted.number,
            # A replacement does not know the step before its first one.
            earlier=self._last.number if self._last.step == ballot.step - 1 else 0,
            uneven=self._uneven,
            replaces=self._replaces,
            joins=self._replaces and not self.variables.met,
            again=self.variables.again,
            mixed=self.variables.mixed,
            variables=self.variables.number(),
            user_state=self.in_state.number() if alike else 0,
        )

    def read(self, tally: Tally, step: int) -> None:
        """Record a difference between the updates of the ranks, if this difference is allowed.

        Raises:
            StepError: the difference comes from a replacement. No rank makes the update of the vote.
        """
        if tally.diverged:
            raise StepError(self._described(step, self._made), hint=HINT)
        if tally.began_again and self.variables.again and not tally.mixed:
            self.variables.refuse()
        if tally.began_again:
            raise StepError(
                f"step {step}: the updates depend on variables of the script (here {self.variables.described()}), and "
                f"not all ranks have the same values. {self._cause()}",
                hint=self.variables.hint(),
            )
        if tally.user_state_differs:
            raise StepError(
                f"step {step}: the updates depend on values in session(state={{...}}) that are not the same on all "
                f"ranks (here {self.in_state.described()}). A process that replaces a lost one, or resumes, would get "
                "those of another rank",
                hint=HINT_OF_STATE,
            )
        if tally.diverged_earlier:
            raise StepError(
                f"{self._described(step - 1, self._last.settings)}. A checkpoint of step {step} would hold this "
                "update; no rank saves one now",
                hint=HINT,
            )
        self._uneven = self._uneven or tally.uneven
        if tally.passed:
            self.variables.voted(mixed=tally.mixed)

    def committed(self, *, ended: bool) -> None:
        """Record that the step of the newest vote is committed. Its block has just ended.

        Args:
            ended: an epoch has ended with this step.
        """
        voted = self._voted
        late = len(self._made) > len(voted.settings)
        self._last = voted._replace(settings=self._made, number=self._number()) if late else voted
        self.variables.committed(ended=ended)
        self.generators.committed()

    def _number(self) -> int:
        """Return a number from 1 to STEP_MODULUS - 1 that identifies the updates of the block.

        The result is 0 if they are not compared.
        """
        if self._scaled and not self._made:
            return 0
        parts: list[bytes] = []
        for name in sorted(self._made):
            parts += (
                name.encode(),
                *(array("d", numbers).tobytes() for numbers in self._made[name].values()),
            )
        return identified(*parts)

    def _described(self, step: int, updates: Updates) -> str:
        differs = difference(self._client, self._rank, step, updates, replaces=self._replaces)
        names = self.variables.names()
        because = f"; the updates depend on {names}" if names else ""
        return (
            f"step {step}: this rank {described(updates)}, and not all ranks do the same"
            f"{f' ({differs})' if differs else ''}. {self._cause()}{because}"
        )

    def _cause(self) -> str:
        whose = "this process" if self._replaces else "another process"
        return f"The cause: {whose} has replaced a lost one, and begins with the variables of a start"
