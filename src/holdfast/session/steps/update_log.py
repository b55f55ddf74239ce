"""The update log of a session: the gradients of each update since the newest state in the memory tier.

Theory. Before a rank votes for a step, it copies the gradients that the optimizer is about to use, and the settings of
the optimizer's groups, into shared memory that outlives the process (``store/shared_memory/update_log.py``). The
replacement of a lost rank loads the newest state from the memory tier (the *kept state*) and makes the later updates
again. It then has the boxes that no other rank holds. All other state comes from the other ranks. See
docs/design/0032-gradient-log.md.

To *foretell* an update is to make it in advance on a copy of the state, and to compare it with the real update.

Invariants:
1. The update of a step is in the log before the rank enters the vote of the step.
2. An update since the newest kept state is never overwritten.
3. The log is used only after one of its updates was foretold with the same bits as the real update. The log is
   removed as soon as a change of the state is found that no update has made.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from pathlib import Path

from holdfast.errors import CheckpointInvalid, StateError
from holdfast.frameworks.common.adapter import StateAdapter
from holdfast.frameworks.common.optional_abilities import LogsUpdates, Updates
from holdfast.store.shared_memory.update_log import UpdateLog, open_updates, reachable
from holdfast.text import plural

log = logging.getLogger("holdfast")

ENTRIES_MAX = 64
ENTRIES_OF_AUTO = 8
SHARE = 0.01
"""Largest fraction of the run time for the log and its kept states, if the user gave no interval."""
MEASURED = 32  # updates between two checks of that fraction
PROOFS, PROVE_EVERY = 2, 1000
"""The first ``PROOFS`` updates of a process are foretold, and after them one in ``PROVE_EVERY``."""


class UpdateRecord:
    """The update log of one rank.

    Args:
        adapter: the framework.
        every: steps between two kept states; if below 1, the memory tier decides.

    Attributes:
        why_not: the reason why nothing is logged. If it is empty, updates are logged whenever some box of this rank
            has no other holder.
    """

    def __init__(self, adapter: StateAdapter, every: int) -> None:
        self.why_not = ""
        self._entries = min(every, ENTRIES_MAX) if every > 0 else ENTRIES_OF_AUTO
        self._measures = every < 1
        self._adapter = adapter
        self._updates: Updates | None = adapter.updates if isinstance(adapter, LogsUpdates) else None
        self._directory: Path | None = None
        self._log: UpdateLog | None = None
        # True: this rank is the only holder of some box, or the layouts are not known yet. False: no log is needed.
        self._wanted = True
        self._base: int | None = None  # step of the newest kept state
        self._changed_at = -1  # newest kept step at which the script itself had changed weights
        self._foretold = -1  # step of the update that was foretold
        self._proofs = 0
        self._noted = 0
        self._cost_s = 0.0  # time for noted updates and kept states since ``_since_s``
        self._since_s = 0.0

    def know(self, directory: Path | None, rank: int) -> None:
        """Open the log of ``rank`` in the shared memory at ``directory``. Without a directory, nothing is logged."""
        self._directory = directory
        if self._updates is None:
            self.why_not = "this framework logs no updates"
        elif self._adapter.world_size == 1:
            self.why_not = "there is no other rank that could continue"
        self._wanted = directory is not None and not self.why_not
        self._log = (
            UpdateLog(directory, rank, self._entries) if directory is not None and self._wanted else None
        )

    # ------------------------------------------------------------------ in training

    def allow(self, alone: Collection[str]) -> str:
        """Decide whether to log updates, when the layouts of all ranks are known.

        Args:
            alone: names of the tensors of which this rank is the only holder of some box.

        Returns:
            The reason why nothing is logged; empty if updates are logged, or need not be.
        """
        if self._log is None or self._updates is None:
            return self.why_not
        was_wanted, self._wanted = self._wanted, bool(alone)
        if alone and not was_wanted:
            self._base = None  # changes were not recorded until now: the log begins at the next kept state
        strange = sorted(fqn for fqn in alone if not self._updates.rebuilds(fqn))
        if not alone:
            self._log.remove()
            self._updates.rest()
        elif reason := self._updates.why_not():
            self._stop(reason, tell=False)
        elif strange:
            self._stop(f"{strange[0]} is neither a weight nor state of the optimizer", tell=False)
        return self.why_not

    def start(self, step: int, *, replayed: bool = False) -> None:
        """Begin the log at ``step``.

        Args:
            replayed: this process has just made the updates of the log again, so the log is not removed.
        """
        self._foretold, self._changed_at, self._since_s = -1, -1, 0.0
        if self._log is not None:
            if replayed:
                self._log.truncate(step)
            else:
                self._log.remove()
        if not replayed:
            self._base = None
        if self._updates is not None and self._wanted:
            self._updates.settle()

    def kept(self, step: int, cost_s: float) -> None:
        """Record that the state of ``step`` is in the memory tier; the copy took ``cost_s`` seconds."""
        self._base = step
        self._cost_s += cost_s
        if self._updates is not None and self._wanted:
            self._settle(step, self._updates)

    def full(self, step: int) -> bool:
        """Return True if the log has no room for the update of ``step``: the state of ``step`` must be kept first."""
        return (
            self._log is not None
            and self._wanted
            and self._base is not None
            and step >= self._base + self._entries
        )

    def note(self, step: int) -> None:
        """Log the update of ``step``, before its vote."""
        if self._log is None or self._updates is None or self._base is None or not self._wanted:
            return
        began_s = time.monotonic()
        try:
            self._look_back(step, self._log, self._updates)
            if self._base is not None and step < self._base + self._entries:
                self._append(step, self._log, self._updates)
        except StateError as error:
            self._stop(error.message)
        self._measure(began_s)

    def _look_back(self, step: int, updates_log: UpdateLog, updates: Updates) -> None:
        """Check the previous update: compare its result with the foretold one, and find changes by the script itself.

        Raises:
            StateError: the results differ, or the script has changed state that the log cannot reproduce.
        """
        foretold, self._foretold = self._foretold, -1
        if not updates.undisturbed() and step == self._base:  # no update was logged since the state was kept
            updates_log.truncate(step)
            self._base = None
            self._settle(step, updates)
        elif not updates.undisturbed():
            raise StateError(
                f"the script changed weights or state of the optimizer itself before step {step}"
            )
        if foretold >= 0 and foretold == step - 1:
            if name := updates.as_foretold():
                raise StateError(f"the update of step {foretold} cannot be made again: {name} differs")
            self._proofs += 1
            updates_log.prove()

    def _settle(self, step: int, updates: Updates) -> None:
        if not updates.undisturbed():
            self._changed_at = step
        updates.settle()

    def _append(self, step: int, updates_log: UpdateLog, updates: Updates) -> None:
        """Log the update of ``step``. If a check is due, also foretell it: make it on a copy of the state.

        Raises:
            StateError: the update cannot be logged or foretold.
        """
        taken = updates.take(step)
        updates_log.append(taken)
        if taken.gradients and (self._proofs < PROOFS or step % PROVE_EVERY == 0):
            assert self._directory is not None
            try:
                with open_updates(self._directory, self._adapter.rank, step, step + 1) as found:
                    updates.foretell(found[0])
            except CheckpointInvalid as error:
                raise StateError(error.message) from error
            self._foretold = step

    def _measure(self, began_s: float) -> None:
        """Add the time since ``began_s`` to the cost of the log.

        If the user gave no interval, remove a log that takes more than the fraction ``SHARE`` of the run time.
        """
        now_s = time.monotonic()
        if not self._since_s or self._foretold >= 0:
            self._noted, self._cost_s, self._since_s = 0, 0.0, now_s
            return
        self._noted += 1
        self._cost_s += now_s - began_s
        share = self._cost_s / max(now_s - self._since_s, 1e-9)
        if self._noted % MEASURED == 0 and self._measures and share > SHARE:
            self._stop(f"a log takes {share:.1%} of the time; with --memory-every N it may")

    def give_way(self) -> bool:
        """Remove the log to free shared memory for kept states. Return False if there is no log."""
        if self._log is None:
            return False
        self._stop("shared memory has no room for it")
        return True

    def _stop(self, reason: str, *, tell: bool = True) -> None:
        had, self._log = self._log, None
        self.why_not = reason
        if had is not None:
            had.remove()
        if tell:
            log.log(
                logging.WARNING if self._adapter.rank == 0 else logging.DEBUG,
                "holdfast: gradients are not logged any longer: %s; a lost worker costs the steps since its state in "
                "memory, done again",
                reason,
            )

    # ------------------------------------------------------------------ after a loss

    def require_undisturbed(self, step: int) -> None:
        """Check that only updates have changed this rank's weights and optimizer state at ``step``.

        A state that is made again from a log would lack a change by the script.

        Raises:
            StateError: the script has changed weights or state of the optimizer.
        """
        if self._updates is not None and (self._changed_at == step or not self._updates.undisturbed()):
            raise StateError(
                f"the script has changed weights or state of the optimizer itself at step {step}"
            )

    def base_of(self, step: int, states: Collection[int]) -> int:
        """Return the step of the kept state from which the log leads to ``step``.

        Args:
            step: the step to reach.
            states: steps of the kept states; the newest suitable one is returned.

        Returns:
            ``step`` itself if its state is kept, or if no state is suitable: another node may have that state.
        """
        if self._directory is None or step in states:
            return step
        rank = self._adapter.rank
        return max((s for s in states if step in reachable(self._directory, rank, (s,))), default=step)

    def replay(self, base: int, step: int, moved: Callable[[int], object]) -> None:
        """Make the updates from step ``base`` to step ``step`` again, on the state of ``base`` in this process.

        Args:
            base, step: the first and the resulting number of updates.
            moved: called with 1 after each update, to show progress to the controller.

        Raises:
            CheckpointInvalid: an update is missing or damaged. The log is then removed.
        """
        if self._directory is None or self._updates is None:
            raise CheckpointInvalid("this process has no log of updates")
        try:
            with open_updates(self._directory, self._adapter.rank, base, step) as updates:
                for update in updates:
                    self._updates.replay((update,))
                    moved(1)
        except CheckpointInvalid:
            self.forget()
            raise
        self._base = base
        if base < step:
            log.info("holdfast: %s made again from memory, from step %d", plural(step - base, "update"), base)

    def forget(self) -> None:
        """Remove the log, because it is damaged or does not belong to the present state."""
        if self._log is not None:
            self._log.remove()

    def close(self) -> None:
        """Remove the log at the end of the session."""
        self.forget()
