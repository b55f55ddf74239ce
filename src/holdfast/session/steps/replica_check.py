"""Detection of silent corruption: ranks that hold copies of the same state compare a slice of it at every step.

Theory. Between two updates all holders of a box must have the same bits. Each vote carries one word that is zero when
all holders have equal bits in the slice of this step (``core/worker/vote.py``, ``store/layouts/replica_digests.py``).
So all of the state is compared once in ``every`` steps, without an extra message. After the first updates of a job all
of it is compared at once: ranks whose weights are no copies (a part of the model that is not declared) differ from then
on, and a fault would give a rank the weights of another one. Before the state is saved or given to a newcomer, all of
it is compared at once, by the layouts of that moment. An earlier vote makes sure that all ranks have these layouts. If
copies differ, no rank updates, saves or gives the state after that vote. Each rank then sends the digests of its copies
to the controller, which finds the copy that differs from the others.

Invariants:
1. All ranks call :meth:`Verifier.agree` in the same order and at the same steps of a generation.
2. ``agree`` returns True only if every rank has the same, current layouts of all ranks, and no comparison has found
   copies that differ.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from holdfast.core.ids import NO_GENERATION, NO_VERSION, Generation
from holdfast.core.protocol.health_messages import CopiesDiffer, CopyDigest, ranks_text
from holdfast.core.worker.vote import Ballot
from holdfast.errors import StateError, StepError
from holdfast.frameworks.common.adapter import Collected, StateAdapter
from holdfast.frameworks.common.optional_abilities import ComparesCopies
from holdfast.session.steps.participant import StepParticipant
from holdfast.session.steps.voting import VoteCaster
from holdfast.store.layouts.box import Extent
from holdfast.store.layouts.layout import Catalogue
from holdfast.store.layouts.replica_digests import ReplicaCopies, ReplicaGroup, runs

log = logging.getLogger("holdfast")

ROUNDS_MAX = 3
"""Largest number of rounds, before one save, in which all ranks publish their layouts because a rank lacks some."""

WHOLE_AT = (1, 2)
"""The steps whose votes compare all of the state: weights after the first update, then the optimizer's first state."""

Slices = Sequence[tuple[ReplicaGroup, Sequence[Extent]]]


class Verifier:
    """The comparison of this rank's state with the copies on other ranks.

    Args:
        rank: protocol state of this rank.
        adapter: the framework.
        votes: casts the votes of this rank.
        every: number of steps in which all of the state is compared once; 0 means never.
    """

    def __init__(self, rank: StepParticipant, adapter: StateAdapter, votes: VoteCaster, every: int) -> None:
        self._votes = votes
        self._rank = rank
        self._adapter = adapter
        self._every = every
        self._copies: ReplicaCopies | None = None
        self._version = NO_VERSION
        self._unlike = False  # ranks hold different tensors under one name
        self._collected: Collected | None = None
        self._slices: Slices = ()  # of the last vote
        self._voted = -1  # step of the last vote; when the step runs again, the state may be in other tensors
        self._agreed: tuple[Generation, int] = (NO_GENERATION, -1)
        several = every > 0 and adapter.world_size > 1 and rank.client is not None
        self._compares = adapter if several and isinstance(adapter, ComparesCopies) else None

    @property
    def active(self) -> bool:
        """True if copies are compared now, or will be compared as soon as the layouts of the other ranks are known."""
        return self._compares is not None

    @property
    def complete(self) -> bool:
        """True if the layouts of the other ranks are known, and this rank holds a part of every tensor in them."""
        return self._copies is not None and self._copies.complete

    def slice(self, step: int) -> tuple[int, int]:
        """Return, for the ballot of ``step``, the number of the comparison plan and the digest of this step's slice.

        The plan divides the state into slices. Both are 0 while the layouts of the other ranks are not known.
        """
        if not self.active:
            return 0, 0
        fresh = self._refresh()
        again, self._voted = step == self._voted, step
        if fresh or again or self._collected is None or step % self._every == 0:
            self._collected = self._adapter.collect()  # an optimizer may have replaced its tensors
            self._drop_unknown(self._collected)
        if self._copies is None:
            return 0, 0
        self._slices = self._copies.whole() if step in WHOLE_AT else self._copies.turn(step)
        return self._copies.plan, self._digest(self._collected, self._slices)

    def forget(self) -> None:
        """Drop the references to the tensors of the state, because the state was replaced."""
        self._collected = None

    def agree(self, collected: Collected | None) -> bool:
        """Vote until all ranks have all layouts and have compared all copies, before the state is saved or given.

        Args:
            collected: the state of this rank, whose layout was published (``VoteCaster.tell``). None if this rank
                cannot read its state, so the call raises StateError on all ranks.

        Returns:
            True if no copy differs. False if copies differ. This rank has then sent the digests of its copies to the
            controller, which orders a return to an earlier, compared state. The state must not be saved or given.

        Raises:
            PeerLost: the vote broke.
            StateError: the ranks are not at the same step, or a rank cannot read its state or lacks layouts.
        """
        if self._rank.client is None:
            return True
        here = (self._rank.machine.generation, self._rank.step)
        tally = self._votes.cast(Ballot(step=here[1], between=True, save=collected is None))
        compares = owed = self.active and self._agreed != here
        rounds = 0
        while tally.passed and not tally.save and (tally.moved or owed) and rounds < ROUNDS_MAX:
            if tally.moved:
                self._votes.await_catalogue()  # a rank that does not get them sets `moved` in the next vote
            tally = self._votes.cast(self._said(here[1], collected, compares))
            owed, rounds = False, rounds + 1
        if tally.differ:
            self.tell(here[1])
            return False
        if not tally.passed:
            raise StateError(f"step {here[1]}: the ranks do not agree: {tally.reason}")
        if tally.save or tally.moved:
            why = "a rank cannot read its state" if tally.save else "a rank lacks layouts of other ranks"
            raise StateError(f"step {here[1]}: {why}", hint="see the logs of the other ranks for the reason")
        if compares and not tally.compared:
            log.warning("holdfast: step %d: the copies of the state could not be compared", here[1])
        self._agreed = here if compares else self._agreed
        return True

    def _said(self, step: int, collected: Collected | None, compares: bool) -> Ballot:
        """Return this rank's ballot.

        If the state is unreadable, cast a vote that stops all ranks, and raise StateError.
        """
        try:
            return self._comparing(step, collected, compares)
        except StateError:
            self._votes.cast(Ballot(step=step, between=True, save=True))
            raise

    def _comparing(self, step: int, collected: Collected | None, compares: bool) -> Ballot:
        """Return this rank's ballot, with the digest of all its copies if ``compares`` is set and layouts are known."""
        said = Ballot(step=step, between=True, save=collected is None)
        if collected is None or not compares:
            return said
        self._refresh()
        self._drop_unknown(collected)
        if self._copies is None:
            return said
        self._collected, self._slices = collected, self._copies.whole()
        digest = self._digest(collected, self._slices)
        return msgspec.structs.replace(said, plan=self._copies.plan, digest=digest)

    def tell(self, step: int) -> None:
        """Send the digests of this rank's copies to the controller, because the vote of ``step`` showed a difference.

        Raises:
            StepError: no block has ever communicated, so the ranks of the script train separate models.
        """
        if self._compares is not None and self._compares.trains_alone:
            raise StepError(
                f"step {step}: each of {self._adapter.world_size} ranks trains alone: their weights differ, and no "
                "block has communicated",
                hint="wrap the model: torch.nn.parallel.DistributedDataParallel(model), or fully_shard(model)",
            )
        if self._collected is not None:
            rank, copies = self._rank, self.digests(self._collected, self._slices)
            if rank.client is not None:
                generation = rank.machine.generation
                rank.client.send(
                    CopiesDiffer(member_id=rank.member_id, generation=generation, step=step, copies=copies)
                )

    def digests(self, collected: Collected, slices: Slices | None = None) -> tuple[CopyDigest, ...]:
        """Return the digests of ``slices`` of the state, with tensor names and holders.

        Args:
            collected: the state.
            slices: the parts of the state to digest; None means all state of which other ranks hold copies.
        """
        if slices is None:
            self._refresh()
            self._drop_unknown(collected)
            slices = () if self._copies is None else self._copies.whole()
        return tuple(
            CopyDigest(ranks_text(group.holders), name, self._hash(collected, part))
            for group, extents in slices
            for name, part in runs(extents)
        )

    def _digest(self, collected: Collected, slices: Slices) -> int:
        return sum(group.factor * self._hash(collected, extents) for group, extents in slices)

    def _hash(self, collected: Collected, extents: Sequence[Extent]) -> int:
        assert self._compares is not None
        digest = self._compares.digest(collected, extents)
        if self._rank.fenced and self._rank.client is not None:
            self._rank.client.moved(sum(extent.size_bytes for extent in extents))
        return digest

    def _drop_unknown(self, collected: Collected) -> None:
        """Stop comparing if the known layouts, for example from an earlier start, name tensors that this rank lacks."""
        if self._copies is None:
            return
        layout = collected.layout(self._adapter.rank, self._adapter.world_size)
        held = {(tensor.fqn, tensor.box) for tensor in layout.tensors}
        if any((e.fqn, e.box) not in held for group in self._copies.groups for e in group.extents):
            self._copies = None

    def _refresh(self) -> bool:
        """Take over the newest layouts of all ranks. Return True if they are newer than the previous layouts."""
        rank = self._rank
        assert self._compares is not None
        with rank.changed:
            version, layouts = rank.catalogue_version, rank.layouts
        if version == self._version or not layouts:
            return False
        self._version = version
        self._collected = None  # it belongs to the earlier layouts: the next vote collects again
        try:
            catalogue = Catalogue.from_encoded(layouts)
        except StateError as error:
            self._copies = None
            if not self._unlike:
                log.warning("holdfast: nothing is compared, and nothing could be saved: %s", error.message)
            self._unlike = True
            return True
        self._unlike = False
        self._copies = ReplicaCopies(catalogue, self._adapter.rank, self._compares.compares, self._every)
        return True
