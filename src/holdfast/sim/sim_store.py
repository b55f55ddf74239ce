"""Simulated checkpoint store: shares and sealed checkpoints.

A share records the step that its parameters really had when the rank copied them for the save.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from holdfast.core.protocol.layout_messages import Layouts


class SimShare(msgspec.Struct, frozen=True):
    """The share of a checkpoint that one rank wrote.

    Attributes:
        rank: the rank that wrote the share.
        shards: numbers of the boxes in the share; may be empty.
        step: step of the rank's parameters; None if they were being changed at that time, for example by an update.
        wrong: True if a flipped bit has changed the parameters, directly or through gradients.
    """

    rank: int
    shards: tuple[int, ...]
    step: int | None
    wrong: bool = False


class SimSave:
    """One checkpoint directory: its step, the ranks that write to it, and the shares in it."""

    def __init__(self, directory: str, step: int, sources: Sequence[int]) -> None:
        self.directory = directory
        self.step = step
        self.sources = tuple(sources)
        self.shares: dict[int, SimShare] = {}
        self.written: set[int] = set()
        self.sealed = False


class SimStore:
    """All checkpoint directories of a run. In this model a shard is one box, and rank r holds shard ``r % shards``."""

    def __init__(self, shards: int, on_seal: Callable[[SimSave], None]) -> None:
        self.shards = shards
        self.saves: dict[str, SimSave] = {}
        self._sources: Sequence[int] = ()
        self._first: dict[int, int] = {}  # shard -> lowest rank in ``_sources`` that holds it
        self._on_seal = on_seal

    def uncovered(self, layouts: Layouts, sources: tuple[int, ...]) -> str:
        """Return the reason why the ranks ``sources`` do not hold every shard; empty if they hold every shard.

        The controller calls this function. ``layouts`` is not used here.
        """
        missing = sorted(set(range(self.shards)) - {rank % self.shards for rank in sources})
        return f"no living holder of shard(s) {missing}" if missing else ""

    def share_of(self, rank: int, sources: Sequence[int]) -> tuple[int, ...]:
        """Return the shards that ``rank`` writes in a save by the ranks ``sources``.

        The lowest rank in ``sources`` that holds a shard writes that shard.
        """
        shard = rank % self.shards
        if sources is not self._sources:
            self._sources = sources
            self._first = {}
            for source in sources:
                self._first[source % self.shards] = min(source, self._first.get(source % self.shards, source))
        return (shard,) if self._first[shard] == rank else ()

    def write(self, directory: str, step: int, sources: Sequence[int], share: SimShare) -> bool:
        """Add a durable share to a checkpoint, and seal the checkpoint if it is now complete.

        Returns:
            True if the checkpoint is sealed.
        """
        save = self.saves.setdefault(directory, SimSave(directory, step, sources))
        save.shares[share.rank] = share
        save.written.update(share.shards)
        if not save.sealed and self.is_complete(save):
            save.sealed = True
            self._on_seal(save)
        return save.sealed

    def is_complete(self, save: SimSave) -> bool:
        """Return True if every shard of the checkpoint is written."""
        return len(save.written) == self.shards

    def newest_step(self, preferred: str) -> int:
        """Return the step at which a new session resumes.

        The checkpoint in the directory ``preferred`` is used if it is sealed, otherwise the newest sealed checkpoint.
        Without any sealed checkpoint the step is 0.
        """
        save = self.saves.get(preferred)
        if save is not None and save.sealed:
            return save.step
        return max((s.step for s in self.saves.values() if s.sealed), default=0)
