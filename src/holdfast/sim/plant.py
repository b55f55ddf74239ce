"""The world around the machines: the vote's all-reduce and the checkpoint store, as far as the protocol can
tell.

A vote completes when every rank of the generation has entered it; each rank hears of it on its own, and a
rank that has not heard yet when a peer dies may see it break instead: that is where doubt comes from. The
store knows shares and sealed checkpoints; a share says which step its parameters really had when it was
written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from holdfast.core.ids import Generation, MemberId
from holdfast.core.messages import SaveOrder
from holdfast.core.vote import Ballot, Tally


class Round:
    """One vote of one generation."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.ballots: dict[MemberId, Ballot] = {}
        self.waiting: set[MemberId] = set()
        self.tally: Tally | None = None

    def enter(self, member_id: MemberId, ballot: Ballot) -> bool:
        """One more ballot; True when it was the last one."""
        self.ballots[member_id] = ballot
        self.waiting.add(member_id)
        if len(self.ballots) < self.world_size:
            return False
        vectors = [b.encode() for b in self.ballots.values()]
        self.tally = Tally.read([sum(column) for column in zip(*vectors, strict=True)], self.world_size)
        return True


class Group:
    """The collectives of one generation."""

    def __init__(self, generation: Generation, world_size: int) -> None:
        self.generation = generation
        self.world_size = world_size
        self.broken = False
        self.members: set[MemberId] = set()
        self.rounds: dict[int, Round] = {}

    def round(self, step: int) -> Round:
        """The vote of ``step``."""
        return self.rounds.setdefault(step, Round(self.world_size))


class Share(msgspec.Struct, frozen=True):
    """What one rank wrote: shards, and the step its parameters had (None: in the middle of an update)."""

    rank: int
    shards: tuple[int, ...]
    step: int | None


class Save:
    """One checkpoint directory."""

    def __init__(self, directory: str, step: int, sources: Sequence[int]) -> None:
        self.directory = directory
        self.step = step
        self.sources = tuple(sources)
        self.shares: dict[int, Share] = {}
        self.written: set[int] = set()
        self.sealed = False


class Store:
    """All checkpoint directories. Rank r holds shard ``r % shards``; a shard is one box."""

    def __init__(self, shards: int, on_seal: Callable[[Save], None]) -> None:
        self.shards = shards
        self.saves: dict[str, Save] = {}
        self._sources: Sequence[int] = ()
        self._first: dict[int, int] = {}  # shard -> its first holder among these sources
        self._on_seal = on_seal

    def uncovered(self, layouts: Mapping[str, bytes], sources: tuple[int, ...]) -> str:
        """Planner of the controller: why ``sources`` do not cover every shard."""
        missing = sorted(set(range(self.shards)) - {rank % self.shards for rank in sources})
        return f"no living holder of shard(s) {missing}" if missing else ""

    def share_of(self, rank: int, sources: Sequence[int]) -> tuple[int, ...]:
        """What ``rank`` writes: a shard is written by its first holder among the sources."""
        shard = rank % self.shards
        if sources is not self._sources:
            self._sources = sources
            self._first = {}
            for source in sources:
                self._first[source % self.shards] = min(source, self._first.get(source % self.shards, source))
        return (shard,) if self._first[shard] == rank else ()

    def write(self, directory: str, step: int, sources: Sequence[int], share: Share) -> bool:
        """A share is durable. True when this one sealed the checkpoint, or found it sealed."""
        save = self.saves.setdefault(directory, Save(directory, step, sources))
        save.shares[share.rank] = share
        save.written.update(share.shards)
        if not save.sealed and self.is_complete(save):
            save.sealed = True
            self._on_seal(save)
        return save.sealed

    def is_complete(self, save: Save) -> bool:
        """Every shard is there."""
        return len(save.written) == self.shards

    def newest_step(self, preferred: str) -> int:
        """Step that a new session resumes at: the preferred directory if it is sealed, else the newest; 0:
        none."""
        save = self.saves.get(preferred)
        if save is not None and save.sealed:
            return save.step
        return max((s.step for s in self.saves.values() if s.sealed), default=0)


def sources_of(order: SaveOrder | None, world_size: int) -> tuple[int, ...]:
    """Writers of an order; without one (a periodic save) every rank."""
    return order.sources if order is not None else tuple(range(world_size))
