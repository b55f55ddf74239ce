"""The layout of DDP's buckets: which gradients are summed together, equal on all ranks and in each process of a rank.

Theory. DDP sets the final layout of its buckets after its first backward passes, in the order in which the gradients
were complete. The layout decides the order of the sums, so a process that joins or resumes needs the layout of the
undisturbed run before its first block with peers. Ranks with different layouts would add gradients of different
parameters. A process gets the layout from the first of these sources that has it:

1. its own first passes, in a job that begins;
2. the state that it has loaded: each save and each transfer holds the layout (:meth:`BucketLayouts.values`);
3. a rehearsal: the block runs without peers, and DDP records the order of the gradients;
4. another rank: at the first block with peers after each reset, all ranks compare their layouts
   (:meth:`BucketLayouts.agree`). If they differ, all take that of the lowest rank with the most known layouts.

A block may raise an exception in a rehearsal, because it checks the result of a collective. The rehearsal is then
given up, and source 4 is left. If no rank knows the layout, all ranks use the one that follows from the order of the
parameters. The sums are then right, but their last bits may differ from those of an undisturbed run, and a warning is
logged. With ``static_graph`` a new process cannot train without a rehearsal: DDP makes one collective more in the
first pass, so the exception ends the script.

Invariants:
1. After :meth:`BucketLayouts.agree`, DDP does not set a known layout again. So the layout stays that of the first
   passes.
2. The calls of :meth:`BucketLayouts.agree` that communicate are at the same blocks on all ranks. Each one follows a
   reset of the wrappers, which all ranks make (a new generation), or an event that is the same on all ranks.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch.distributed as dist
import xxhash
from torch.nn.parallel import DistributedDataParallel

from holdfast.frameworks.common.state_tree import Plain
from holdfast.frameworks.torch import private_api
from holdfast.frameworks.torch.comm.lasting_results import lasting_results
from holdfast.frameworks.torch.private_api import Buckets
from holdfast.frameworks.torch.state.wrapper_reset import forget_pass, rehearsals_needed
from holdfast.runtime.node.shm_allreduce import sum_in_votes

log = logging.getLogger("holdfast")

REHEARSALS_MAX = 3
_DIGEST_BITS = 24  # the sum of the squares of these digests over all ranks is exact


class _Offer(NamedTuple):
    """The layouts of one rank, described by four numbers.

    Attributes:
        group: digest of the ranks that have copies of the same modules.
        digest: digest of the layouts.
        known: number of modules whose layout is known.
        length: number of ints that describe the layouts.
    """

    group: int
    digest: int
    known: int
    length: int


class BucketLayouts:
    """The layouts of the buckets of all DDP modules of a session.

    Args:
        wrappers: the DDP modules.
        world_size: number of ranks of the job.
    """

    def __init__(self, wrappers: Sequence[DistributedDataParallel], world_size: int) -> None:
        self._wrappers = wrappers
        self._world_size = world_size
        self._known: list[Buckets | None] = [None] * len(wrappers)
        self._loaded: list[Any] = []  # of the state that this process has loaded
        # The reducer gives out its tensor under a lock that a backward pass holds for long. A thread that waits for it
        # has the GIL, and the pass needs the GIL for its hooks. So the tensor is taken here, before any pass.
        self._used = [private_api.used_parameters(each) if each.static_graph else None for each in wrappers]
        for used in self._used:
            if used is not None:
                lasting_results().add(used)
        self._agreed = False
        self._rehearsals = 0
        self._settled = world_size == 1  # this loop over steps needs no further rehearsal
        self._broken = False  # an exception has left a rehearsal of this loop

    # ------------------------------------------------------------------ values of the state

    def values(self) -> Plain:
        """Return the known layouts as a plain value, one entry for each DDP module."""
        found: list[Plain] = []
        for wrapper, layout, used in zip(self._wrappers, self._known, self._used, strict=True):
            counted: dict[str, Plain] = {} if used is None else {"used": used.tolist()}
            found.append(None if layout is None else {"of": form_of(wrapper), "buckets": layout, **counted})
        return found

    def load(self, values: Any) -> None:
        """Keep the layouts of a loaded state, for :meth:`needs_rehearsal`; None if the state has no layouts."""
        self._loaded = values if isinstance(values, list) else []
        for wrapper, used, kept in zip(self._wrappers, self._used, self._loaded, strict=False):
            if used is not None and isinstance(kept, dict) and kept.get("of") == form_of(wrapper):
                lasting_results().add(used, kept.get("used", ()))

    # ------------------------------------------------------------------ rehearsals

    @property
    def unready(self) -> int:
        """Number of DDP modules that have yet to build their final buckets."""
        return sum(map(rehearsals_needed, self._wrappers))

    @property
    def static(self) -> bool:
        """True if DDP needs several passes to build the buckets of a module, and counts them (``static_graph``)."""
        return any(used is not None for used in self._used)

    def begin_loop(self) -> None:
        """Forget the rehearsals of the last loop over steps, because the next one may train other modules."""
        self._settled, self._rehearsals, self._broken = self._world_size == 1, 0, False

    def needs_rehearsal(self, *, looped: bool) -> bool:
        """Return True if the next block must be a rehearsal, because there is no other source of the final layouts.

        Args:
            looped: this process is in loopback, so it has made no pass with peers.
        """
        if self._settled:
            return False
        if self.unready and not looped:
            self._agreed = False
            self.build()
        if self.unready and self._rehearsals < REHEARSALS_MAX and not self._take_loaded():
            return True
        self._settled = True
        return False

    def rehearsed(self, *, computed: bool) -> None:
        """Build the buckets of the modules that a rehearsal has used.

        If the rehearsal had gradients and still no bucket could be built, no further rehearsal is made in this loop.
        An exception is ``static_graph``, which needs several passes.
        """
        self._rehearsals += computed  # a block that skipped its batch was no rehearsal
        before = self.unready
        self.build()
        if self._broken:
            self.forget()
        if computed and not self.static and self.unready == before:
            self._rehearsals = REHEARSALS_MAX

    def give_up(self) -> bool:
        """Make no further rehearsal in this loop, because an exception of the block has ended this rehearsal.

        Returns:
            False if this process cannot train without a rehearsal. With ``static_graph`` the first pass makes other
            collectives than the passes of the peers.
        """
        if not all(map(private_api.has_made_first_pass, self._wrappers)):
            return False
        self._settled = self._broken = True
        return True

    def build(self) -> None:
        """Build the buckets from the passes that DDP has recorded, without peers and without a further pass."""
        for n, wrapper in enumerate(self._wrappers):
            if rehearsals_needed(wrapper):
                try:
                    self._known[n] = private_api.rebuild_buckets(wrapper) or self._known[n]
                except RuntimeError:
                    continue  # a parameter had no gradient in the last pass; the next forward pass reports it

    def note_built(self) -> None:
        """Read the layouts that DDP has built on its own."""
        for n, wrapper in enumerate(self._wrappers):
            if self._known[n] is None and private_api.has_rebuilt_buckets(wrapper):
                self._known[n] = private_api.logged_buckets(wrapper)

    def _take_loaded(self) -> bool:
        """Build the buckets as in the loaded state. Return True if no DDP module is left without its buckets.

        With ``static_graph`` a rehearsal is made in any case, in which DDP counts its first passes.
        """
        if self.static or len(self._loaded) != len(self._wrappers):
            return False
        for n, (wrapper, kept) in enumerate(zip(self._wrappers, self._loaded, strict=True)):
            if rehearsals_needed(wrapper) and isinstance(kept, dict) and kept.get("of") == form_of(wrapper):
                self._known[n] = private_api.rebuild_buckets(wrapper, kept["buckets"])
        self.forget()
        return not self.unready

    # ------------------------------------------------------------------ resets

    def reset(self) -> None:
        """Record that the wrappers were reset, so that DDP would set a layout again."""
        self._agreed = False

    def forget(self) -> None:
        """Reset the reducers: they keep their buckets and count their passes from zero, as after an abort.

        After :meth:`agree` they get the known layouts again: the other ranks do not compare theirs a second time.
        """
        for wrapper in self._wrappers:
            forget_pass(wrapper)
        if self._agreed:
            self._set_known()

    def _set_known(self) -> None:
        for n, (wrapper, layout) in enumerate(zip(self._wrappers, self._known, strict=True)):
            if layout is not None:
                self._known[n] = private_api.rebuild_buckets(wrapper, layout)

    # ------------------------------------------------------------------ agreement

    def agree(self, rank: int, *, partial: bool, vote: Callable[[list[int]], list[int]]) -> None:
        """Make the layouts equal on all ranks, before a block with peers. All ranks call it.

        Args:
            rank: rank of this process.
            partial: this rank holds a part of a copy of the model, so the layouts of other ranks differ.
            vote: returns the sum of a vector over all ranks.

        Raises:
            PeerLost: a rank is lost.
        """
        if self._agreed:
            return
        self.note_built()
        digest = self._digest()
        unready, partials, once, squares = vote([self.unready, int(partial), digest, digest * digest])
        # The squares have this sum only if all digests are equal.
        equal = unready == 0 if partials else once * once == squares * self._world_size
        if not equal:
            self._exchange(rank, vote)
        reordered = [] in self._known
        self._set_known()
        if reordered or (self._broken and self.unready and not self.static):
            log.warning(
                "holdfast: the block cannot run without peers, and no rank knows DDP's final buckets: the sums of the "
                "gradients have another order, and their last bits may differ from those of an undisturbed run"
            )
        self._agreed, self._broken = True, False

    def _exchange(self, rank: int, vote: Callable[[list[int]], list[int]]) -> None:
        """Take the layouts of another rank, in each group of ranks whose layouts differ. All ranks call it."""
        ranks = {tuple(dist.get_process_group_ranks(each.process_group)) for each in self._wrappers}
        words = _encode(self._known)
        known = sum(layout is not None for layout in self._known)
        mine = _Offer(_digest(sorted(ranks)), self._digest(), known, len(words))
        size = len(mine)
        slots = [0] * (size * self._world_size)
        slots[rank * size : (rank + 1) * size] = mine
        sums = sum_in_votes(slots, vote)
        offers = [_Offer(*sums[at : at + size]) for at in range(0, len(sums), size)]
        for group in dict.fromkeys(offer.group for offer in offers):
            own = [(offer, n) for n, offer in enumerate(offers) if offer.group == group]
            best, source = max(own, key=lambda each: (each[0].known, -each[1]))
            if len({offer.digest for offer, _ in own}) == 1:
                continue
            told = sum_in_votes(words if rank == source else [0] * best.length, vote)
            if mine.group == group:
                self._known = _decode(told) if best.known else [[] for _ in self._wrappers]

    def _digest(self) -> int:
        """Return a digest of the layouts, and of which modules have them."""
        ready = [private_api.has_rebuilt_buckets(wrapper) for wrapper in self._wrappers]
        return _digest([self._known, ready])


def form_of(wrapper: DistributedDataParallel) -> str:
    """Return a digest of the parameters of a DDP module and the limits of its buckets, which a layout must fit."""
    parameters = [
        (name, list(p.shape), str(p.dtype)) for name, p in wrapper.named_parameters() if p.requires_grad
    ]
    form = json.dumps([private_api.bucket_limits(wrapper), parameters])
    return str(xxhash.xxh3_64_hexdigest(form.encode()))


def _digest(value: object) -> int:
    return int(xxhash.xxh3_64_intdigest(json.dumps(value).encode())) >> (64 - _DIGEST_BITS)


def _encode(layouts: Sequence[Buckets | None]) -> list[int]:
    """Return layouts as ints: for each one its number of buckets (0: not known), their sizes, and their contents."""
    words: list[int] = []
    for layout in layouts:
        buckets = layout or []
        words += [len(buckets), *map(len, buckets), *chain.from_iterable(buckets)]
    return words


def _decode(words: Sequence[int]) -> list[Buckets | None]:
    """Return the layouts that :func:`_encode` has encoded."""
    rest = iter(words)
    layouts: list[Buckets | None] = []
    for count in rest:
        sizes = list(islice(rest, count))
        layouts.append([list(islice(rest, size)) for size in sizes] or None)
    return layouts
