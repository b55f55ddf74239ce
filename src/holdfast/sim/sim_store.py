"""The checkpoint store around the machines, as far as the protocol can tell.

It knows shares and sealed checkpoints; a share says which step its parameters really had when it was written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from holdfast.core.protocol.layout_messages import Layouts


class SimShare(msgspec.Struct, frozen=True):
    """What one rank wrote: shards, and the step its parameters had (None: in the middle of an update); ``wrong``:
    a flipped bit is in them, or what it did to the gradients."""

    rank: int
    shards: tuple[int, ...]
    step: int | None
    wrong: bool = False


class SimSave:
    """One checkpoint directory."""

    def __init__(self, directory: str, step: int, sources: Sequence[int]) -> None:
        self.directory = directory
        self.step = step
        self.sources = tuple(sources)
        self.shares: dict[int, SimShare] = {}
        self.written: set[int] = set()
        self.sealed = False


class SimStore:
    """All checkpoint directories. Rank r holds shard ``r % shards``; a shard is one box."""

    def __init__(self, shards: int, on_seal: Callable[[SimSave], None]) -> None:
        self.shards = shards
        self.saves: dict[str, SimSave] = {}
        self._sources: Sequence[int] = ()
        self._first: dict[int, int] = {}  # shard -> its first holder among these sources
        self._on_seal = on_seal

    def uncovered(self, layouts: Layouts, sources: tuple[int, ...]) -> str:
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

    def write(self, directory: str, step: int, sources: Sequence[int], share: SimShare) -> bool:
        """A share is durable. True when this one sealed the checkpoint, or found it sealed."""
        save = self.saves.setdefault(directory, SimSave(directory, step, sources))
        save.shares[share.rank] = share
        save.written.update(share.shards)
        if not save.sealed and self.is_complete(save):
            save.sealed = True
            self._on_seal(save)
        return save.sealed

    def is_complete(self, save: SimSave) -> bool:
        """Return True if every shard is written."""
        return len(save.written) == self.shards

    def newest_step(self, preferred: str) -> int:
        """Step that a new session resumes at: the preferred directory if it is sealed, else the newest; 0:
        none."""
        save = self.saves.get(preferred)
        if save is not None and save.sealed:
            return save.step
        return max((s.step for s in self.saves.values() if s.sealed), default=0)
