"""Silent corruption: copies of the state that ranks hold in common are compared, a slice at every step.

Theory. Between two updates the state of all holders of a box must be the same, bit for bit. Each vote carries one word
that is zero when all slices of this turn agree (``core/vote.py``, ``store/copies.py``), so after ``every`` steps all of
the state was compared, without a message more. Before the state goes anywhere (a checkpoint, a newcomer) all of it is
compared at once. What differs is never trusted again: no rank updates, saves or gives away after such a vote, and each
tells the controller the digests of what it holds, which names the odd one out.

Invariants:
1. All ranks call :meth:`Verifier.agree` in the same order and at the same steps of a generation.
2. ``agree`` returns True only when all copies were equal, or nothing can be compared.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from holdfast.adapters.base import Adapter, Collected, ComparesCopies
from holdfast.core.ids import NO_GENERATION, Generation
from holdfast.core.sightings import CopyDigest, ranks_text
from holdfast.core.vote import Ballot, Tally
from holdfast.errors import StateError
from holdfast.session.rank import Rank
from holdfast.store.copies import Copies, Extent, Group, runs
from holdfast.store.layout import Catalogue

log = logging.getLogger("holdfast")

Slices = Sequence[tuple[Group, Sequence[Extent]]]


class Verifier:
    """Compares the copies of one session.

    Args:
        rank, adapter: of the session.
        every: steps within which all of the state is compared; 0: never.
    """

    def __init__(self, rank: Rank, adapter: Adapter, every: int) -> None:
        self._rank = rank
        self._adapter = adapter
        self._every = every
        self._copies: Copies | None = None
        self._version = -1
        self._collected: Collected | None = None
        self._slices: Slices = ()  # of the last vote
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
        if fresh or self._collected is None or step % self._every == 0:
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
        """Compare the whole state between two steps, with all ranks; None: this rank has none to compare.

        Returns: False when copies differ: the controller was told, and orders what follows.

        Raises:
            PeerLost: the vote broke.
            StateError: the ranks do not stand at the same place.
        """
        here = (self._rank.machine.generation, self._rank.step)
        if not self.active or self._agreed == here:
            return True
        self._refresh()
        if collected is not None:
            self._drop_unknown(collected)
        plan = digest = 0
        if collected is not None and self._copies is not None:
            self._collected, self._slices = collected, self._copies.whole()
            plan, digest = self._copies.plan, self._digest(collected, self._slices)
        ballot = Ballot(step=here[1], between=True, plan=plan, digest=digest)
        tally = Tally.read(self._adapter.vote(ballot.encode()), self._adapter.world_size)
        if tally.differ:
            self.tell(here[1])
            return False
        if not tally.passed:
            raise StateError(f"step {here[1]}: the copies of the state were not compared: {tally.reason}")
        if not tally.compared:
            log.warning("holdfast: step %d: the copies of the state could not be compared", here[1])
        self._agreed = here
        return True

    def tell(self, step: int) -> None:
        """The vote of ``step`` said that copies differ: tell what this rank holds."""
        if self._collected is not None:
            self._rank.copies_differ(step, self.digests(self._collected, self._slices))

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
        return self._compares.digest(collected, extents)

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
        catalogue = Catalogue.from_encoded(layouts)
        self._copies = Copies(catalogue, self._adapter.rank, self._compares.compares, self._every)
        return True
