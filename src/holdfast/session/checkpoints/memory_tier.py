"""The memory tier of a session: this rank's state of every N-th step, in shared memory that outlives the process.

Theory. If only one rank holds a box, the loss of that rank is the loss of the box. So each rank copies its whole state
(tensors, plain values, data position) into the run's shared memory (``store/shared_memory/memory_slots.py``). It does
so before it shows the step as committed. The process that replaces the rank then finds the state of exactly that step.
With N above 1 all ranks go back to the newest step that every rank has in the tier, and run the later steps again. The
surviving processes do this without a restart.

Without an N the tier decides on its own. It is on if some box has only one holder. It keeps a state whenever the last
copy took less than ``SHARE`` of the time since: at every step if copies are cheap, otherwise less often. Each rank
votes whether it can afford a copy (``core/worker/vote.py``), and all ranks keep the state if all can.

Invariants:
1. All ranks keep the same steps.
2. If the state of step s is kept, READY(s) is shown only when that state is in memory. Changes that the script makes
   after the block belong to this state, and are added (the state is *amended*) when the script asks for the next step
   (``after_block.py``). From then on the kept state is whole. With several nodes only whole states are reported, given
   and loaded. On one node a rank sees whether another rank has amended its state.
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

from holdfast.core.ids import NO_VERSION
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
from holdfast.store.shared_memory.memory_slots import SLOTS, Slots, StoredState, open_kept, was_amended
from holdfast.text import plural

log = logging.getLogger("holdfast")

AUTO = -1
SHARE = 0.005
"""Largest share of the time for copies into memory, where no interval was given."""

Values = Callable[[Collected, int], Mapping[str, object]]


class Stamp(NamedTuple):
    """A fingerprint of the state: it differs when the state has changed."""

    values: bytes  # the plain values, encoded
    writes: tuple[int, ...]


class MemoryTier:
    """The memory tier of one rank.

    Args:
        rank: knows the layouts of all ranks.
        adapter: the framework.
        directory: the directory of the run's shared memory; None: no agent outlives this process.
        every: steps between two states; 0: nothing is kept; AUTO: see the module.
        values: returns the plain values common to all ranks, given the collected state and its step.
        locals_: returns the plain values of this rank alone.
        pull: with several nodes: fetches the state of a rank and step from another node; False: no node has it.
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
        self._version = NO_VERSION  # of the layouts that were checked last
        self._alone = False  # some box of the job has one holder
        self._said = False
        self._kept_s = time.monotonic()
        self._copies = 0
        self._cost_s = 0.0  # of the last copy
        self._adapter = adapter
        self._directory = directory
        self._every = every if directory is not None else 0
        self._values = values
        self._locals = locals_
        self._slots: Slots | None = None
        self._record = UpdateRecord(adapter, every)
        self._replayed = -1  # step whose state this process made again from an earlier one
        self._stamped: Stamp | None = None  # of the state that was kept when the last block ended
        self.know_rank()

    def know_rank(self) -> None:
        """Open the memory of the adapter's rank: at the start, or when a spare gets its rank."""
        self._slots = None if self._directory is None else Slots(self._directory, self._adapter.rank)
        self._record.know(self._directory if self.on else None, self._adapter.rank)

    @property
    def on(self) -> bool:
        """True if states are kept, or may be when the layouts of all ranks are known."""
        return self._every != 0

    def steps(self) -> tuple[int, ...]:
        """Return the steps whose states are in memory."""
        return () if self._slots is None else self._slots.steps(whole=self._pull is not None)

    def start(self, step: int) -> None:
        """Begin at ``step``: drop the kept states of other steps."""
        if self._slots is None:
            return
        self._stamped = None
        replayed, self._replayed = self._replayed == step, -1
        self._record.start(step, replayed=replayed)
        if replayed:
            return  # the earlier state that it was made from is what the other ranks keep, too
        self._slots.keep_only(step)
        if step in self._slots.steps():
            self._record.kept(step, 0.0)
        elif self._every > 0:
            self._keep(step)
            self._slots.finish()

    def due(self, step: int) -> bool:
        """Return for the ballot whether this rank can afford to keep its state of ``step``.

        With several nodes, another node must first have the state that was kept before.
        """
        if not self._said or (self.on and self._rank.catalogue_version > self._version):
            self._look()
        if self._every > 0:
            return step % self._every == 0 and self._arrived()
        affordable = time.monotonic() - self._kept_s >= self._cost_s / SHARE or self._record.full(step)
        return self._every == AUTO and self._alone and affordable and self._arrived()

    def _arrived(self) -> bool:
        client = self._rank.client
        if self._pull is None or client is None or self._slots is None:
            return True
        newest = self._slots.newest()
        return newest is None or client.page[Word.ARRIVED] == newest.digest

    def committing(self, step: int, agreed: bool) -> None:
        """Keep the state of ``step`` if it is due, before the step is shown as committed.

        Args:
            agreed: all ranks can afford it.
        """
        by_number = self._every > 0 and self._pull is None  # needs no vote
        if step % self._every == 0 if by_number else agreed:
            self._stamped = self._keep(step)

    def foresee(self, step: int) -> None:
        """Log the update of ``step`` before its vote: the log must outlive this process."""
        if self.on:
            self._record.note(step)

    def amend(self, step: int) -> None:
        """Add the changes that the script has made after its last block to the kept state of ``step``.

        This includes the position of the next loop, if the script has left its loop by ``break``.
        """
        kept, self._stamped = self._stamped, None
        if kept is None or self._slots is None:
            return
        began_s = time.monotonic()
        same = kept == self._stamp(self._adapter.collect(), step)
        self._cost_s += time.monotonic() - began_s
        if not same:
            self._keep(step, amended=True)
        self._slots.finish()

    def renew(self, step: int) -> None:
        """Replace the kept state of ``step`` after the end of a turn, or the begin of a loop, has changed it."""
        if self._slots is not None and step in self._slots.steps():
            self._keep(step, amended=True)
            self._slots.finish()

    def _stamp(self, collected: Collected, step: int) -> Stamp:
        values = encode_values(dict(self._values(collected, step)))
        return Stamp(values, collected.writes() if isinstance(collected, CountsWrites) else ())

    def _look(self) -> None:
        """Find out whether some box has only one holder, when newer layouts of all ranks have come."""
        rank = self._rank
        if rank.client is None or rank.catalogue_version == self._version:
            return
        self._version, layouts = rank.catalogue_version, rank.layouts
        try:
            catalogue = catalogue_of(layouts)
        except StateError as error:
            log.warning("holdfast: what a loss costs is not known: %s", error)  # a save would fail, too
            self._alone, self._said = False, True
            return
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
        self._kept_s = time.monotonic()
        self._copies += 1
        if self._copies > SLOTS:  # the first copies also allocate the memory
            self._cost_s = self._kept_s - began_s
        if stamp is not None:
            self._record.kept(step, self._cost_s)
        return stamp

    def _copy(self, slots: Slots, step: int, *, amended: bool) -> Stamp:
        """Copy the state into a slot. Raises: StateError."""
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
        """Check the kept state of ``step``. A damaged state is dropped.

        Raises:
            CheckpointInvalid: the state is missing or damaged.
        """
        with self._open(step):
            return

    def require_replayable(self, step: int) -> None:
        """Check that nothing but updates has changed this rank's weights at ``step``. Raises: StateError."""
        self._record.require_undisturbed(step)

    def replay(self, step: int) -> Collected:
        """Load the newest kept state from which the log leads to ``step``, and make the later updates again.

        Returns:
            The state: weights and optimizer state of ``step``, everything else of the kept state.

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
            turns: number of epochs and phases that the whole job has finished; None: not known.

        Raises:
            CheckpointInvalid: the state is missing, damaged, or of another number of turns. This rank is unchanged.
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
        """Return the bytes of one box. Drop a state that lacks it, so that the next decision does not count on that."""
        assert self._slots is not None
        try:
            return kept.view(meta.fqn, meta.box)
        except CheckpointInvalid:
            self._slots.forget(kept.step)
            raise

    def _require_whole(self, kept: StoredState) -> None:
        """Refuse a kept state that lacks the changes after its block, while other ranks may have amended theirs.

        Raises:
            CheckpointInvalid: the kept state lacks the changes. It is dropped, and all ranks go back further.
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
    """Return in words what the loss of one worker costs.

    Args:
        alone: some box of the state has only one holder.
        size_bytes: size of the boxes that only this rank holds.
        every: as for :class:`MemoryTier`.
        unlogged: why the later updates are not logged; empty: they are logged; None: not known.
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
