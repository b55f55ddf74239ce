"""The work after a block: the script's code after the block belongs to the step, and so to the saved state of the step.

Theory. A schedule that moves once in an epoch, an average of weights or a count of bad epochs often comes after the
block: ``if step.committed and step.last_in_epoch: scheduler.step()``. A replacement starts at the next step and never
runs this code. The state of a step is therefore complete when the script asks for the next step, not when the block
ends. Saves are made when the script asks for that step. A rank that gives or saves its state after a fault first waits
until then (``core/worker/decision_orders.py``). The copy in the memory tier is made earlier, and is then amended. Only
the save of a graceful exit is made when the block ends, because time may be short. That save is repeated if code after
the block has changed the state or rank-local values.

Invariants:
1. No state is saved or given while the script is between the end of a block and its next step. There are two
   exceptions: a graceful exit, and code after the block that takes longer than ``SCRIPT_TIMEOUT_S``.
"""

from __future__ import annotations

from holdfast.core.protocol.messages import ExitAgreed
from holdfast.core.worker.position import ScriptEvent
from holdfast.core.worker.vote import Tally
from holdfast.errors import PeerLost, StoreWriteError
from holdfast.session.checkpoints.checkpointer import Checkpointer
from holdfast.session.checkpoints.memory_tier import MemoryTier
from holdfast.session.checkpoints.save_schedule import SaveSchedule
from holdfast.session.steps.loop_ends import LoopEnds
from holdfast.session.steps.participant import StepParticipant
from holdfast.session.steps.pause import Pause

EXIT_LINE = "Graceful exit is triggered, stop training"


class AfterBlock:
    """The work that is due when the script asks for the next step after a block: saves, amendments, a pause.

    Args:
        rank: protocol state of this rank.
        pace: the schedule of saves.
        tier: the memory tier of this rank.
        saver: makes the saves.
        pause: makes this rank wait when all ranks have agreed to stop for a moment.
        ends: the meeting of the ranks at the end of a loop.

    Attributes:
        exit_agreed: all ranks have agreed to leave the job.
        exit_sealed: the checkpoint of the agreed exit is sealed.
    """

    def __init__(
        self,
        rank: StepParticipant,
        pace: SaveSchedule,
        tier: MemoryTier,
        saver: Checkpointer,
        pause: Pause,
        ends: LoopEnds,
    ) -> None:
        self.ends = ends
        self.exit_agreed = self.exit_sealed = False
        self._rank = rank
        self._pace = pace
        self._tier = tier
        self._saver = saver
        self._pause = pause
        self._tally: Tally | None = None  # of the step that has just been committed
        self._left_with = ""  # digest of the state that the exit has saved

    def committed(self, tally: Tally) -> None:
        """Keep the requests in ``tally``, the sum of the votes on a step, until the code after its block has run.

        If all ranks have agreed to exit, save at once.
        """
        self._tally = tally
        self.ends.committed()
        if tally.exit:
            self._agree_exit()

    def forget(self) -> None:
        """Drop the requests of the last vote, because the job went to an earlier step. A later vote repeats them."""
        self._tally = None

    def begin(self) -> None:
        """Drop the requests of the last vote when the script begins a loop; the next vote repeats them.

        The script may have left the last loop after a block with ``break``, and changed the state since.
        """
        if not self.exit_agreed:
            self.forget()

    def come_back(self) -> None:
        """Amend the state in the memory tier, and make the saves of the last vote.

        Called when the script has run its code after a block and calls the session again.
        """
        rank = self._rank
        self._tier.amend(rank.step)
        rank.moved(ScriptEvent.RETURNED)
        tally, self._tally = self._tally, None
        if rank.fenced or tally is None:
            return  # the vote after the recovery repeats the requests to save and to leave
        if self.exit_agreed:
            self._amend_exit()
        elif kind := self._pace.agreed(tally, rank.step):
            self._saver.save(kind, wait=False)
        if tally.hold and not self.exit_agreed:
            self._pause.wait()

    # ------------------------------------------------------------------ a graceful exit

    def _agree_exit(self) -> None:
        rank = self._rank
        print(EXIT_LINE, flush=True)  # noqa: T201
        if rank.client is not None:
            rank.client.send(
                ExitAgreed(member_id=rank.member_id, generation=rank.machine.generation, step=rank.step)
            )
        self.exit_agreed = True
        self._left_with = self._saver.digest()
        self._save_exit()

    def _amend_exit(self) -> None:
        """Repeat the save for the exit if code after the block has changed the state on any rank."""
        try:
            same = self._saver.all_say(self._saver.digest() == self._left_with)
        except PeerLost:
            self._rank.await_fence()
            same = True
        if not same:
            self._save_exit()
        self.exit_agreed = not self._rank.fenced

    def _save_exit(self) -> None:
        try:
            self.exit_sealed = self._saver.save("exit", wait=True)
        except StoreWriteError:
            self.exit_sealed = False  # the error is logged and reported, and the exit code shows it
        if self._rank.fenced:
            self.exit_agreed = False
