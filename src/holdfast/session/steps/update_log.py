"""The update log of a session: what each update since the newest kept state was made from.

Theory. Before a rank votes for a step, it copies the gradients that the optimizer is about to use, and the settings of
its groups, into shared memory that outlives the process (``store/shared_memory/update_log.py``). When it is lost, the
process in its place takes the state that the memory tier has, makes the updates since again, and has the shards that
no other rank holds; everything else the others give it. docs/design/0032-gradient-log.md.

Invariants:
1. The update of a step is in the log before its vote is entered.
2. An update that the newest kept state needs is never overwritten.
3. The log counts for nothing before an update was made again from it with the same bits, and is removed as soon as
   something was seen that it does not hold.
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
"""Of the time, for the log and the states that it asks for, where no interval was given."""
MEASURED = 32  # updates, before that is judged
PROOFS, PROVE_EVERY = 2, 1000
"""So many of the first updates of a process, and one in so many, are foretold."""


class UpdateRecord:
    """One rank's part.

    Args:
        adapter: the framework.
        every: steps between two kept states; below 1: the tier decides.

    Attributes:
        why_not: nothing is logged, for this reason; empty: it is, where some box has one holder.
    """

    def __init__(self, adapter: StateAdapter, every: int) -> None:
        self.why_not = ""
        self._entries = min(every, ENTRIES_MAX) if every > 0 else ENTRIES_OF_AUTO
        self._measures = every < 1
        self._adapter = adapter
        self._updates: Updates | None = adapter.updates if isinstance(adapter, LogsUpdates) else None
        self._directory: Path | None = None
        self._log: UpdateLog | None = None
        self._wanted = True  # as far as is known, some box has one holder
        self._base: int | None = None  # step of the newest kept state
        self._changed_at = (
            -1
        )  # the newest step at which the script changed weights itself and a state was kept
        self._foretold = -1  # the update of this step was made on a copy
        self._proofs = 0
        self._noted = 0
        self._cost_s = 0.0  # of the updates noted, and the states kept, since ...
        self._since_s = 0.0

    def know(self, directory: Path | None, rank: int) -> None:
        """Where the log lies."""
        self._directory = directory
        if self._updates is None:
            self.why_not = "this framework logs no updates"
        elif self._adapter.world_size == 1:
            self.why_not = "there is no other rank that could go on"
        on = directory is not None and not self.why_not
        self._log = UpdateLog(directory, rank, self._entries) if directory is not None and on else None

    # ------------------------------------------------------------------ in training

    def allow(self, alone: Collection[str]) -> str:
        """The layouts of all ranks are known, and of these tensors a box has one holder: why there is no log."""
        if self._log is None or self._updates is None:
            return self.why_not
        self._wanted = bool(alone)
        strange = sorted(fqn for fqn in alone if not self._updates.rebuilds(fqn))
        if not alone:
            self._log.remove()
        elif reason := self._updates.why_not():
            self._stop(reason, tell=False)
        elif strange:
            self._stop(f"{strange[0]} is neither a weight nor state of the optimizer", tell=False)
        return self.why_not

    def start(self, step: int, *, replayed: bool = False) -> None:
        """The session stands at ``step``; ``replayed``: what was logged before it was made again here."""
        self._foretold, self._changed_at, self._since_s = -1, -1, 0.0
        if self._log is not None:
            if replayed:
                self._log.truncate(step)
            else:
                self._log.remove()
        if not replayed:
            self._base = None
        if self._updates is not None:
            self._updates.settle()

    def kept(self, step: int, cost_s: float) -> None:
        """The state of ``step`` is in memory; the copy took ``cost_s``."""
        self._base = step
        self._cost_s += cost_s
        if self._updates is not None:
            self._settle(step, self._updates)

    def full(self, step: int) -> bool:
        """No update after that of ``step`` - 1 fits in: the state of ``step`` is to be kept."""
        return (
            self._log is not None
            and self._wanted
            and self._base is not None
            and step >= self._base + self._entries
        )

    def note(self, step: int) -> None:
        """The update of ``step`` is about to be voted for."""
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
        """Raises: StateError: there is something that the log does not hold."""
        foretold, self._foretold = self._foretold, -1
        if (
            not updates.undisturbed() and step == self._base
        ):  # before the first update since the state was kept
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
        """Raises: StateError."""
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
        """A log that takes too much of the time ends, unless it was asked for."""
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
        """There is too little memory for states: the log leaves its own to them. False: it has none."""
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
        """Raises: StateError: a state made again from a log of another rank would lack what the script did here."""
        if self._updates is not None and (self._changed_at == step or not self._updates.undisturbed()):
            raise StateError(
                f"the script has changed weights or state of the optimizer itself at step {step}"
            )

    def base_of(self, step: int, states: Collection[int]) -> int:
        """The newest of ``states`` from which the log leads to ``step``; ``step`` itself where there is none, as
        another node may have that state."""
        if self._directory is None or step in states:
            return step
        rank = self._adapter.rank
        return max((s for s in states if step in reachable(self._directory, rank, (s,))), default=step)

    def replay(self, base: int, step: int, moved: Callable[[int], object]) -> None:
        """This process has the state of ``base``: make the updates up to ``step`` again.

        Args:
            moved: called after each of them: the controller waits for the rest.

        Raises:
            CheckpointInvalid: one is not there or damaged; then the log is gone.
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
        """What is logged is damaged, or does not fit: it counts no longer."""
        if self._log is not None:
            self._log.remove()

    def close(self) -> None:
        """The session has ended in order."""
        self.forget()
