"""The memory tier of a session: this rank's state of every N-th step, in shared memory that outlives the process.

Theory. If only one rank holds a box, the loss of that rank is the loss of the box. So each rank copies its whole
state (tensors, plain values, data position) into the run's shared memory (``store/shared_memory/memory_slots.py``).
Such a copy is called a *kept state*. It is made before the status page shows the step as committed. So the process
that replaces the rank finds the state of exactly that step. With N above 1, after a loss all ranks go back to the
newest step that every rank has in the tier, and run the later steps again. The surviving processes do this without a
restart.

Without an N (``AUTO``), the tier is on if some box has only one holder. A rank can then afford a copy if the last copy
took less than the fraction ``SHARE`` of the time since that copy. So only cheap copies are made at every step. After a
recovery the next state is kept at any cost, because a process that has joined keeps no earlier one. Each rank votes
whether it can afford a copy (``core/worker/vote.py``). All ranks keep the state of a step if all can.

Invariants:
1. All ranks keep the states of the same steps.
2. READY(s) on the status page means that s steps are committed. If the state of step s is kept, the page shows
   READY(s) only when that state is in memory. Changes that the script makes after the block belong to this state.
   They are added (the state is *amended*) when the script asks for the next step (``after_block.py``). From then on
   the kept state is *whole*. With several nodes only whole states are reported, given and loaded. On one node, a
   state that is not whole is also loaded if no other rank has amended its state.
3. A lack of shared memory ends the tier with a warning, and never the training.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from holdfast.core.ids import NO_GENERATION, NO_VERSION, Generation
from holdfast.core.protocol.status_page import Word
from holdfast.errors import CheckpointInvalid, StateError
from holdfast.frameworks.common.adapter import Collected, StateAdapter
from holdfast.frameworks.common.optional_abilities import CountsWrites
from holdfast.session.checkpoints.resume import Resumed, refuse_another_model
from holdfast.session.steps.participant import StepParticipant
from holdfast.session.steps.update_log import ENTRIES_MAX, UpdateRecord
from holdfast.store.format.json_values import decode_mapping, encode_values
from holdfast.store.layouts.layout import DTYPE_SIZE_BYTES, TensorMeta
from holdfast.store.layouts.layout_completion import catalogue_of
from holdfast.store.shared_memory.memory_slots import Slots, StoredState, open_kept, was_amended
from holdfast.text import plural

log = logging.getLogger("holdfast")

AUTO = -1
SHARE = 0.005
"""Largest fraction of the run time for copies into memory, if the user gave no interval."""

Values = Callable[[Collected, int], Mapping[str, object]]


class Stamp(NamedTuple):
    """A fingerprint of the state: a different stamp shows that the state has changed.

    Attributes:
        values: the plain values, encoded.
        writes: a count of writes per tensor; empty if the framework does not count writes.
    """

    values: bytes
    writes: tuple[int, ...]


class _Copy(NamedTuple):
    """The newest copy: the generation and the time at which it was made, and the duration of the copying."""

    generation: Generation
    at_s: float
    cost_s: float


class MemoryTier:
    """The memory tier of one rank.

    Args:
        rank: protocol state of this rank, with the layouts of all ranks.
        adapter: the framework.
        directory: the directory of the run's shared memory; None if no agent outlives this process.
        every: steps between two kept states; 0 if no states are kept, AUTO to keep states as often as copies are
            cheap.
        values: returns the plain values common to all ranks, given the collected state and its step.
        locals_: returns the rank-local values.
        pull: function (rank, step) that fetches a kept state from another node, and returns False if no node has it.
            None if the run has one node.
    """

    def __init__(
        self,
        rank: StepParticipant,
        adapter: StateAdapter,
        directory: Path | None,
        every: int,
        values: Values,
        locals_: Callable[[], Mapping[str, object]],
        pull: Callable[[int, int], bool] | None = None,
    ) -> None:
        self._pull = pull
        self._rank = rank
        self._version = NO_VERSION  # version of the layouts that were checked last
        self._alone = False  # True: some box of the job has only one holder
        self._said = False
        self._newest = _Copy(NO_GENERATION, time.monotonic(), 0.0)
        self._adapter = adapter
        self._directory = directory
        self._every = every if directory is not None else 0
        self._values = values
        self._locals = locals_
        self._slots: Slots | None = None
        self._record = UpdateRecord(adapter, every)
        self._replayed = -1  # step whose state this process has made again by updates
        self._stamped: Stamp | None = None  # stamp of the state that was kept when the last block ended
        self.know_rank()

    def know_rank(self) -> None:
        """Open the shared memory of this rank. A spare calls this method again when it gets its rank."""
        self._slots = None if self._directory is None else Slots(self._directory, self._adapter.rank)
        self._record.know(self._directory if self.on else None, self._adapter.rank)

    @property
    def on(self) -> bool:
        """True if states are kept, or may be kept when the layouts of all ranks are known."""
        return self._every != 0

    def steps(self) -> tuple[int, ...]:
        """Return the steps of this rank's kept states; with several nodes, only of whole ones."""
        return () if self._slots is None else self._slots.steps(whole=self._pull is not None)

    def start(self, step: int) -> None:
        """Begin at ``step``, or go back to ``step``. Drop the kept states of all other steps.

        If states are kept at a fixed interval and the state of ``step`` is not kept yet, keep that state now.
        """
        if self._slots is None:
            return
        self._stamped = None
        replayed, self._replayed = self._replayed == step, -1
        self._record.start(step, replayed=replayed)
        if replayed:
            return  # the other ranks still keep the earlier state, from which this one was made by updates
        self._slots.keep_only(step)
        if step in self._slots.steps():
            self._record.kept(step, 0.0)
        elif self._every > 0:
            self._keep(step)
            self._slots.finish()

    def due(self, step: int) -> bool:
        """Return whether this rank votes to keep its state of ``step``: a copy is due or, with AUTO, affordable.

        AUTO means that no interval is given. With several nodes, the previous kept state must first have arrived on
        another node.

        Raises: StateError: the layouts of the ranks contradict each other.
        """
        if not self._said or (self.on and self._rank.catalogue_version > self._version):
            self._look()
        if self._every > 0:
            return step % self._every == 0 and self._arrived()
        newest = self._newest
        affordable = time.monotonic() - newest.at_s >= newest.cost_s / SHARE or self._record.full(step)
        # A process that has joined keeps no state of an earlier step, so none of this rank's states helps another loss.
        joined = newest.generation != self._rank.machine.generation
        return self._every == AUTO and self._alone and (affordable or joined) and self._arrived()

    def _arrived(self) -> bool:
        client = self._rank.client
        if self._pull is None or client is None or self._slots is None:
            return True
        newest = self._slots.newest()
        return newest is None or client.page[Word.ARRIVED] == newest.digest

    def committing(self, step: int, agreed: bool) -> None:
        """Keep the state of ``step`` if it is due, before the step is shown as committed.

        Args:
            agreed: all ranks have voted to keep their states.
        """
        by_number = self._every > 0 and self._pull is None  # needs no vote
        if step % self._every == 0 if by_number else agreed:
            self._stamped = self._keep(step)

    def foresee(self, step: int) -> None:
        """Log the gradients of the update of ``step`` before its vote, so that the update can be made again."""
        if self.on:
            self._record.note(step)

    def amend(self, step: int) -> None:
        """Amend the kept state of ``step`` by the changes that the script has made after its last block.

        They include the position of the next loop, if the script has left its loop by ``break``.
        """
        kept, self._stamped = self._stamped, None
        if kept is None or self._slots is None:
            return
        began_s = time.monotonic()
        same = kept == self._stamp(self._adapter.collect(), step)
        self._newest = self._newest._replace(cost_s=self._newest.cost_s + time.monotonic() - began_s)
        if not same:
            self._keep(step, amended=True)
        self._slots.finish()

    def renew(self, step: int) -> None:
        """Replace the kept state of ``step``, if any, after the end of a turn or a new loop has changed the state."""
        if self._slots is not None and step in self._slots.steps():
            self._keep(step, amended=True)
            self._slots.finish()

    def _stamp(self, collected: Collected, step: int) -> Stamp:
        values = encode_values(dict(self._values(collected, step)))
        return Stamp(values, collected.writes() if isinstance(collected, CountsWrites) else ())

    def _look(self) -> None:
        """When newer layouts of all ranks are known, find out whether some box has only one holder.

        Raises: StateError: the layouts contradict each other.
        """
        rank = self._rank
        if rank.client is None or rank.catalogue_version == self._version:
            return
        self._version, layouts = rank.catalogue_version, rank.layouts
        try:
            catalogue = catalogue_of(layouts)
        except StateError as error:
            raise StateError(
                f"step {rank.step}: no rank could save this state, or give it to a replacement: {error.message}",
                hint=error.hint
                or "ranks that hold different parts of a model give them different names, those of the whole model, "
                "or declare parts of one tensor: holdfast.torch.declare",
            ) from error
        self._alone = any(
            len(who) == 1 for tensors in catalogue.kinds.values() for _, who in catalogue.boxes(tensors[0])
        )
        own = [(t, box) for t, box, who in catalogue.held_by(self._adapter.rank) if len(who) == 1]
        unlogged = self._record.allow({tensor.fqn for tensor, _ in own})
        if self._version.vote and not self._said:  # the first layouts lack what the first update creates
            self._said = True
            size_bytes = sum(box.numel * DTYPE_SIZE_BYTES[tensor.dtype] for tensor, box in own)
            log.log(
                logging.INFO if self._adapter.rank == 0 else logging.DEBUG,
                "holdfast: %s",
                cost_of_a_loss(self._alone, size_bytes, self._every, unlogged),
            )

    def _keep(self, step: int, *, amended: bool = False) -> Stamp | None:
        assert self._slots is not None
        began_s = time.monotonic()
        try:
            stamp = self._copy(self._slots, step, amended=amended)
        except StateError as error:
            if self._record.give_way():
                return self._keep(step, amended=amended)
            log.warning("holdfast: no state is kept in memory any more: %s", error)
            self._every, stamp = 0, None
            self._slots.remove()
        now_s = time.monotonic()
        self._newest = _Copy(self._rank.machine.generation, now_s, now_s - began_s)
        if stamp is not None:
            self._record.kept(step, self._newest.cost_s)
        return stamp

    def _copy(self, slots: Slots, step: int, *, amended: bool) -> Stamp:
        """Copy the state of ``step`` into a slot, and return its stamp. Raises: StateError: memory has no room."""
        collected = self._adapter.collect()
        stamp = self._stamp(collected, step)
        slots.keep(
            step,
            collected,
            collected.layout(self._adapter.rank, self._adapter.world_size),
            stamp.values,
            encode_values(dict(self._locals()), "locals"),
            amended=amended,
        )
        return stamp

    def verify(self, step: int) -> None:
        """Check this rank's kept state of ``step``.

        Raises:
            CheckpointInvalid: the state is missing, or is damaged and then dropped.
        """
        with self._open(step):
            return

    def require_replayable(self, step: int) -> None:
        """Check that only optimizer updates have changed this rank's weights before ``step``. Raises: StateError."""
        self._record.require_undisturbed(step)

    def replay(self, step: int) -> Collected:
        """Load the newest kept state from which the gradient log leads to ``step``. Make the later updates again.

        Returns:
            The state. Weights and optimizer state are those of ``step``; all other values are those of the kept state.

        Raises:
            CheckpointInvalid: a state or an update is missing or damaged.
            CheckpointMismatch: the state is of another model.
        """
        base = self._record.base_of(step, self._slots.steps() if self._slots is not None else ())
        try:
            self.load(base)
        except CheckpointInvalid:
            self._record.forget()
            raise
        self._record.replay(base, step, self._moved)
        self._replayed = step
        return self._adapter.collect()

    def load(self, step: int, turns: int | None = None) -> Resumed:
        """Load the kept state of ``step`` into this rank.

        Args:
            turns: number of epochs and phases that the whole job has finished; None if it is not known.

        Raises:
            CheckpointInvalid: the state is missing, damaged, or has another number of finished turns.
            CheckpointMismatch: the state is of another model.
        """
        with self._open(step) as kept:
            if kept.world != self._adapter.world_size:
                raise CheckpointInvalid(f"{kept.path.name} is of a job of {plural(kept.world, 'rank')}")
            self._require_whole(kept)
            values = decode_mapping(kept.values, "values in memory")
            found = Resumed(
                kept.path, step, values["session"], decode_mapping(kept.local, "locals in memory")
            )
            # The replaced process was lost after the vote on the end of a turn, and before it copied its state.
            if turns not in (None, found.turns):
                assert self._slots is not None
                self._slots.forget(step)
                raise CheckpointInvalid(
                    f"{kept.path.name}, step {step}: copied after {plural(found.turns, 'epoch')} or phases, "
                    f"and the job has ended {turns}"
                )
            catalogue = kept.catalogue()
            restore = self._adapter.restore(catalogue, values)
            buffers = restore.buffers()
            refuse_another_model(catalogue, (meta for meta, _ in buffers), f"in {kept.path.name}")
            for meta, data in buffers:
                if len(data):
                    np.copyto(np.frombuffer(data, np.uint8), np.frombuffer(self._view(kept, meta), np.uint8))
                    self._moved(len(data))
            restore.finish()
            return found

    def _moved(self, size_bytes: int) -> None:
        if self._rank.client is not None:
            self._rank.client.moved(size_bytes)

    def _view(self, kept: StoredState, meta: TensorMeta) -> memoryview:
        """Return the bytes of one box of a kept state. If the box is missing, drop the kept state: it is useless."""
        assert self._slots is not None
        try:
            return kept.view(meta.fqn, meta.box)
        except CheckpointInvalid:
            self._slots.forget(kept.step)
            raise

    def _require_whole(self, kept: StoredState) -> None:
        """Check that the state ``kept`` includes the changes that the script has made after the block.

        On one node, these changes may be missing if no other rank has amended its kept state.

        Raises:
            CheckpointInvalid: the changes are missing. The kept state is dropped. All ranks go back to an earlier
                kept state.
        """
        assert self._directory is not None and self._slots is not None
        others = set(range(kept.world)) - {self._adapter.rank}
        if kept.whole:
            return
        if self._pull is not None or any(was_amended(self._directory, r, kept.step) for r in sorted(others)):
            self._slots.forget(kept.step)
            raise CheckpointInvalid(
                f"{kept.path.name}, step {kept.step}: lacks the changes that the script makes after the block"
            )

    def _open(self, step: int) -> AbstractContextManager[StoredState]:
        if self._directory is None:
            raise CheckpointInvalid("this process has no shared memory that outlives it")
        rank = self._adapter.rank  # a spare gets its rank late
        if self._pull is not None and step not in self.steps():
            self._pull(rank, step)
        return open_kept(self._directory, rank, step)

    def close(self) -> None:
        """Remove the kept states at the end of the session."""
        self._record.close()
        if self._slots is not None:
            self._slots.remove()


def cost_of_a_loss(alone: bool, size_bytes: int, every: int, unlogged: str | None = None) -> str:
    """Return a sentence for the log about the cost of losing one worker.

    Args:
        alone: some box of the state has only one holder.
        size_bytes: size of the boxes that only this rank holds.
        every: steps between two kept states; 0 if no states are kept, AUTO to keep states as often as time allows.
        unlogged: why updates since the kept state are not logged; empty if they are logged, None if it is not known.
    """
    if not alone:
        return "every part of the state is on 2 ranks or more: a lost worker costs no step"
    where = f"a part of the state lies with one rank alone (here {size_bytes / 1e6:,.1f} MB)"
    if every == 0:
        return f"{where}: a lost worker costs the steps since the last checkpoint (--memory-every is 0)"
    often = (
        f"as often as {SHARE:.1%} of the time allows" if every == AUTO else f"every {plural(every, 'step')}"
    )
    again = "at most the step that it died in" if every == 1 else f"at most {every} steps, done again"
    again = "the steps since, done again" if every == AUTO else again
    if unlogged is None:
        return (
            f"{where}: kept in memory {often}; a lost worker costs no step, or, where the log of rank 0 says that no "
            f"gradients are logged, {again}"
        )
    if not unlogged and every > ENTRIES_MAX:
        since = f"the gradients of the first {ENTRIES_MAX} steps since"
        return (
            f"{where}: kept in memory {often}, with {since}: a lost worker costs no step, and later {again}"
        )
    if not unlogged:
        return f"{where}: kept in memory {often}, with the gradients since: a lost worker costs no step"
    return f"{where}: kept in memory {often}; a lost worker costs {again}, as no gradients are logged: {unlogged}"
