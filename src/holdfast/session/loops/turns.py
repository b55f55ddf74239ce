"""The turns of epochs and phases: which turns the script runs, and when a turn is finished.

Theory. The code after the loop over steps in an epoch (an evaluation, a file of the epoch) belongs to the epoch. An
epoch is finished when all ranks have run that code. Only then the next epoch begins. All ranks agree on the end of the
epoch with one vote. Until the vote, a rank saves or gives the state of the end of the loop, from copies that were made
at that time. If a rank is lost before the vote, a newcomer runs the code after the loop again, and the other ranks wait
at the end of the epoch. After the vote no rank runs that code again.

A vote may complete on one rank and break on another. Then the controller decides whether the turn is finished. Each
rank answers the fence with its known number of finished turns. The highest number is right, because the rank with that
number has seen the votes of all ranks. The numbers are in ``Settled.turns``, and the decision is in ``Settle.turns``.

``break`` out of a part ends that part for the job. A generator that is closed cannot distinguish ``break`` from an
exception. So the ranks agree on the end of the part when the script next calls the session. After an exception the
script makes no further call.

Invariants:
1. All ranks of a generation end the same turns at the same steps.
2. Until the ranks agree on the end of a turn, a saved or given state is from before the code after the turn's loop.
3. A process whose loaded state has another number of finished turns than the ranks of the job never joins them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from holdfast.core.worker.position import ScriptEvent
from holdfast.core.worker.vote import Ballot
from holdfast.errors import PeerLost, UsageError
from holdfast.frameworks.common.adapter import StateAdapter
from holdfast.frameworks.common.optional_abilities import KnowsWeights
from holdfast.session.checkpoints.after_block import AfterBlock
from holdfast.session.loops.loop import Loops
from holdfast.session.loops.loop_bounds import compare_turns
from holdfast.session.loops.turn_position import ScriptPart
from holdfast.session.steps.participant import StepParticipant
from holdfast.session.steps.voting import VoteCaster
from holdfast.session.variables.update_variables import UpdateVariables

log = logging.getLogger("holdfast")


class Turns:
    """The epochs and phases of one session, and the agreement of all ranks on the end of each turn.

    Args:
        rank: protocol state of this rank.
        adapter: the framework.
        loops: the loops over steps.
        votes: casts the votes of this rank.
        after_block: the work after a block.
        variables: the check of the script's variables.
    """

    def __init__(
        self,
        rank: StepParticipant,
        adapter: StateAdapter,
        loops: Loops,
        votes: VoteCaster,
        after_block: AfterBlock,
        variables: UpdateVariables,
    ) -> None:
        self._rank = rank
        self._adapter = adapter
        self._loops = loops
        self._votes = votes
        self._after_block = after_block
        self._variables = variables

    def run(self, kind: str, turns: int) -> Iterator[int]:
        """Yield the numbers of the turns of a part that the job has not finished.

        Args:
            kind: ``epochs``, or ``phase`` with its name.
            turns: total number of turns of the part.

        Raises:
            UsageError: a resumed script counts only the epochs that are left, or the ranks have different parts.
        """
        self.close()
        walk = self._loops.walk
        part = walk.enter(kind, turns)
        compare_turns(self._rank.client, self._adapter, part.way, kind, turns)
        if part.turns < turns and kind == "epochs" and self._adapter.rank == 0:
            log.info(
                "holdfast: no epoch is left to do: the job has left them after %d of %d", part.done, turns
            )
        self._compare_with_plan(part, turns)
        if part.done >= part.turns:
            self._variables.passes_over(joins=self._rank.joining)
        for turn in range(part.done, part.turns):
            self._begin(part)
            try:
                yield turn
            except GeneratorExit:
                part.closed = True
                raise
            self.close()
            self._end(part)
        walk.leave(part)
        self._pass_over()

    def _compare_with_plan(self, part: ScriptPart, turns: int) -> None:
        """Check that the number of turns in the script is not smaller than before this start of the job.

        Raises:
            UsageError: the script seems to count only the epochs that are left.
        """
        if turns >= part.planned:
            return
        what = (
            f"s.epochs({turns}) was s.epochs({part.planned}) before, and {part.done} of these epochs are over"
        )
        if (
            turns >= part.planned - part.done
        ):  # N - start_epoch, by the session or by an older file of the script
            raise UsageError(
                f"{what}: the script seems to leave out the epochs that are over, as the session does",
                hint="give the number of all epochs of the job at each start: s.epochs(N), and not "
                "s.epochs(N - start_epoch). A job that is to end earlier leaves the loop with break",
            )
        if self._adapter.rank == 0:
            log.warning(
                "holdfast: %s: if fewer epochs are not meant, give the number of the whole job, also after a restart",
                what,
            )

    def close(self) -> None:
        """End the parts that the script has left early. Called when the script next calls the session."""
        self._loops.require_whole()
        walk = self._loops.walk
        while (part := walk.left) is not None:
            self._end(part)
            walk.leave(part)

    def _begin(self, part: ScriptPart) -> None:
        rank, walk = self._rank, self._loops.walk
        rank.script.require(ScriptEvent.LOOP_AHEAD)  # raise before any state is copied
        if self._after_block.exit_agreed:
            raise SystemExit(0)
        step = walk.begin(part, rank.step)
        if not self._has_opened_loop():
            self._loops.loaded.begins_turn(rank.step)
        self._pass_over()
        self._loops.note_turns()
        self._adapter.between(step, 0, again=True)
        self._adapter.remember(rank.step, whole=True)
        rank.moved(ScriptEvent.LOOP_AHEAD)

    def _pass_over(self) -> None:
        """If the job has opened a later loop, note that the effects of the code before that loop must be undone."""
        if self._has_opened_loop():
            self._loops.pass_over()

    def _has_opened_loop(self) -> bool:
        """Return whether the job has opened the next loop over steps of the script, or a later one."""
        return bool(self._loops.place["loop"] >= self._loops.walk.loops)

    def _end(self, part: ScriptPart) -> None:
        """Wait until all ranks have finished the open turn of ``part``.

        Raises:
            SystemExit: all ranks have agreed to leave the job.
        """
        rank = self._rank
        if self._after_block.exit_agreed:
            raise SystemExit(0)
        rank.end_epoch()  # for a loop that the script has left early
        if self._loops.strays:
            rank.moved(ScriptEvent.STRAYED)
        while not self._is_done():
            pass
        self._loops.walk.end(part, rank.step)
        self._loops.note_turns()
        self._adapter.remember(rank.step, whole=True)
        self._loops.renew()
        rank.moved(ScriptEvent.TURN_DONE)

    def _is_done(self) -> bool:
        """Vote on the end of the open turn. Return True if all ranks have finished the turn, False after a recovery."""
        rank = self._rank
        rank.join()  # a newcomer has run the code after the loop before it joins
        rank.moved(ScriptEvent.TURN_ENDED)
        known = rank.turns
        try:
            tally = self._votes.cast(Ballot(step=rank.step, between=True))
            if tally.passed and rank.pass_turn():
                return True
            if not tally.passed:
                rank.fault_seen(f"at the end of a turn after step {rank.step}: {tally.reason}")
        except PeerLost:
            pass
        rank.await_fence()
        if rank.await_turns() > known:
            return True
        if not isinstance(self._adapter, KnowsWeights) or self._adapter.holds_weights():
            rank.moved(ScriptEvent.RETURNED)  # otherwise the state of the end of the loop is gone
        rank.await_resume()
        return False
