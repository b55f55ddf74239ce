"""Behind the block of a step: what the script does there belongs to the step, and is a part of what is kept of it.

Theory. A schedule that moves once in an epoch, an average of weights, a count of bad epochs often stand behind the
block: ``if step.committed and step.last_in_epoch: scheduler.step()``. Who comes into the job later begins with the
next step and does not run this code. So the state of a step is whole when the script asks for the next one, and not
when its block ends. Saves are made then; who serves the state or saves it for a fault waits for the script
(``checkpointer.py``); what the memory tier has by then is brought up to date. Only the save of a graceful exit is made
when the block ends, as time may be short, and once more where the script has changed something since.

Invariants:
1. No state is saved or given away while the script is between the end of a block and its next step, as far as that does
   not take longer than ``SCRIPT_TIMEOUT_S``.
"""

from __future__ import annotations

import xxhash

from holdfast.core.protocol.messages import ExitAgreed
from holdfast.core.worker.position import ScriptEvent
from holdfast.core.worker.vote import Tally
from holdfast.errors import PeerLost, StoreWriteError
from holdfast.frameworks.common.adapter import StateAdapter
from holdfast.session.checkpoints.checkpointer import Checkpointer
from holdfast.session.checkpoints.memory_tier import MemoryTier
from holdfast.session.checkpoints.save_schedule import SaveSchedule
from holdfast.session.steps.participant import StepParticipant
from holdfast.session.steps.pause import Pause
from holdfast.store.format.json_values import encode_values

EXIT_LINE = "Graceful exit is triggered, stop training"


class AfterBlock:
    """What is done when the script is back from behind a block.

    Args:
        rank, adapter, pace, tier, saver, pause: of the session.

    Attributes:
        exit_agreed: all ranks leave.
        exit_sealed: and the checkpoint of that is there.
    """

    def __init__(
        self,
        rank: StepParticipant,
        adapter: StateAdapter,
        pace: SaveSchedule,
        tier: MemoryTier,
        saver: Checkpointer,
        pause: Pause,
    ) -> None:
        self.exit_agreed = self.exit_sealed = False
        self._rank = rank
        self._adapter = adapter
        self._pace = pace
        self._tier = tier
        self._saver = saver
        self._pause = pause
        self._tally: Tally | None = None  # of the step that has just been committed
        self._left_with = ""  # digest of what was saved for the exit

    def committed(self, tally: Tally) -> None:
        """A block has ended: what its vote asked for is done when the script is back, or now, where time is short."""
        self._tally = tally
        if tally.exit:
            self._agree_exit()

    def forget(self) -> None:
        """The job has gone back: what the last vote asked for is asked again."""
        self._tally = None

    def begin(self) -> None:
        """The script begins a loop. It may have left the one before from behind a block, with ``break``.

        What it has done since is not of that step: what its vote asked for is asked again by the next one.
        """
        if not self.exit_agreed:
            self.forget()

    def come_back(self) -> None:
        """The script asks for the next step, or comes into a loop, or the session ends."""
        rank = self._rank
        self._tier.amend(rank.step)
        rank.moved(ScriptEvent.RETURNED)
        tally, self._tally = self._tally, None
        if rank.fenced or tally is None:
            return  # what the vote said of saving and leaving is asked again after the recovery
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
        self._left_with = self._digest()
        self._save_exit()

    def _amend_exit(self) -> None:
        """Save once more when the script of any rank has changed something behind the block."""
        try:
            same = self._saver.all_say(self._digest() == self._left_with)
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
            self.exit_sealed = False  # logged and reported; the exit code says it
        if self._rank.fenced:
            self.exit_agreed = False

    def _digest(self) -> str:
        """Of the whole state."""
        collected = self._adapter.collect()
        total = xxhash.xxh3_128(encode_values(collected.values))
        for meta in collected.layout(self._adapter.rank, self._adapter.world_size).tensors:
            total.update(collected.view(meta.fqn, meta.box))
        return total.hexdigest()
