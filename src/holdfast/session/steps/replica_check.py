"""Silent corruption: copies of the state that ranks hold in common are compared, a slice at every step.

Theory. Between two updates the state of all holders of a box must be the same, bit for bit. Each vote carries one word
that is zero when all slices of this turn agree (``core/worker/vote.py``, ``store/layouts/replica_digests.py``), so
after ``every`` steps all of the state was compared, without a message more. Before the state goes anywhere (a
checkpoint, a newcomer) all of it is compared at once, by the layouts of that moment: a vote before makes sure that all
ranks have them. What differs is never trusted again: no rank updates, saves or gives away after such a vote, and each
tells the controller the digests of what it holds, which names the odd one out.

Invariants:
1. All ranks call :meth:`Verifier.agree` in the same order and at the same steps of a generation.
2. ``agree`` returns True only when all copies were equal, or nothing can be compared, and every rank has the same,
   present layouts of all.
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
from holdfast.store.layouts.layout import Catalogue
from holdfast.store.layouts.replica_digests import Extent, ReplicaCopies, ReplicaGroup, runs

log = logging.getLogger("holdfast")

ROUNDS_MAX = 3
"""Times that all ranks tell what they hold before one save, where it does not come to one of them."""

Slices = Sequence[tuple[ReplicaGroup, Sequence[Extent]]]


class Verifier:
    """Compares the copies of one session.

    Args:
        rank, adapter, votes: of the session.
        every: steps within which all of the state is compared; 0: never.
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
        self._voted = -1  # its step: when it is tried again, what was put back may be other tensors
        self._agreed: tuple[Generation, int] = (NO_GENERATION, -1)
        several = every > 0 and adapter.world_size > 1 and rank.client is not None
        self._compares = adapter if several and isinstance(adapter, ComparesCopies) else None

    @property
    def active(self) -> bool:
        """There is something to compare, or will be when the layouts of the others are known."""
        return self._compares is not None

    def slice(self, step: int) -> tuple[int, int]:
        """For the ballot of ``step``: plan and digest; (0, 0) while the layouts of the others are not known."""
        if not self.active:
            return 0, 0
        fresh = self._refresh()
        again, self._voted = step == self._voted, step
        if fresh or again or self._collected is None or step % self._every == 0:
            self._collected = self._adapter.collect()  # an optimizer may have put other tensors there
            self._drop_unknown(self._collected)
        if self._copies is None:
            return 0, 0
        self._slices = self._copies.turn(step)
        return self._copies.plan, self._digest(self._collected, self._slices)

    def forget(self) -> None:
        """The state was replaced: tensors that were collected before may be nobody's any more."""
        self._collected = None

    def agree(self, collected: Collected | None) -> bool:
        """Before state goes anywhere, between two steps: all ranks know what each holds now, and copies are equal.

        Args:
            collected: what this rank holds, and has published (``VoteCaster.tell``); None: not known, no rank goes on.

        Returns: False when copies differ: the controller was told, and orders what follows.

        Raises:
            PeerLost: the vote broke.
            StateError: the ranks do not stand at the same place, or one of them cannot go on.
        """
        if self._rank.client is None:
            return True
        here = (self._rank.machine.generation, self._rank.step)
        tally = self._votes.cast(Ballot(step=here[1], between=True, save=collected is None))
        compares = owed = self.active and self._agreed != here
        rounds = 0
        while tally.passed and not tally.save and (tally.moved or owed) and rounds < ROUNDS_MAX:
            if tally.moved:
                self._votes.await_catalogue()  # to whom it does not come says in the next vote that it moved
            tally = self._votes.cast(self._said(here[1], collected, compares))
            owed, rounds = False, rounds + 1
        if tally.differ:
            self.tell(here[1])
            return False
        if not tally.passed:
            raise StateError(f"step {here[1]}: the ranks are not at one: {tally.reason}")
        if tally.save or tally.moved:
            why = "a rank cannot say what it holds" if tally.save else "the layouts of all ranks did not come"
            raise StateError(f"step {here[1]}: {why}", hint="the log of another rank may say why")
        if compares and not tally.compared:
            log.warning("holdfast: step %d: the copies of the state could not be compared", here[1])
        self._agreed = here if compares else self._agreed
        return True

    def _said(self, step: int, collected: Collected | None, compares: bool) -> Ballot:
        """The vote of this rank; one that cannot read its state says so before it raises: the others wait for it."""
        try:
            return self._comparing(step, collected, compares)
        except StateError:
            self._votes.cast(Ballot(step=step, between=True, save=True))
            raise

    def _comparing(self, step: int, collected: Collected | None, compares: bool) -> Ballot:
        """The vote on the copies of the whole state, if there are any."""
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
        """The vote of ``step`` said that copies differ: tell what this rank holds.

        Raises:
            StepError: nothing has made them equal: no damage, but a script whose ranks train alone.
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
        """Digests of ``slices`` (None: of all that others hold too), each with its name."""
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
            self._rank.client.moved(sum(extent.stop - extent.start for extent in extents))
        return digest

    def _drop_unknown(self, collected: Collected) -> None:
        """Layouts of an earlier start may name what is not there yet: nothing is compared by them."""
        if self._copies is None:
            return
        layout = collected.layout(self._adapter.rank, self._adapter.world_size)
        held = {(tensor.fqn, tensor.box) for tensor in layout.tensors}
        if any((e.fqn, e.box) not in held for group in self._copies.groups for e in group.extents):
            self._copies = None

    def _refresh(self) -> bool:
        """Take over the newest layouts of all ranks; True when there are new ones."""
        rank = self._rank
        assert self._compares is not None
        with rank.changed:
            version, layouts = rank.catalogue_version, rank.layouts
        if version == self._version or not layouts:
            return False
        self._version = version
        self._collected = None  # of the layouts before: whoever asked for these, the next vote collects anew
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
