"""The memory tier around the machines: two slots per rank, as far as the protocol can tell.

A state says which step its parameters really had when it was copied; a copy under way, and a damaged one, cannot be
loaded. What a load gives is compared with what was asked for.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

SLOTS = 2


class State(msgspec.Struct):
    """One slot: ``step`` is what the marker says, ``applied`` what the parameters are."""

    step: int
    applied: int | None
    damaged: bool = False


class Memory:
    """The slots of all ranks. ``every``: steps between two states; 0: nothing is kept."""

    def __init__(self, every: int, on_load: Callable[[int, int, int | None], None]) -> None:
        self.every = every
        self._slots: dict[int, list[State]] = {}
        self._on_load = on_load

    def due(self, step: int) -> bool:
        """A state of ``step`` is to be kept."""
        return self.every > 0 and step % self.every == 0

    def begin(self, rank: int) -> None:
        """A copy begins: the older state is gone."""
        self._slots[rank] = self._slots.get(rank, [])[-(SLOTS - 1) :]

    def commit(self, rank: int, step: int, applied: int | None) -> None:
        """The copy is complete and marked."""
        self._slots[rank] = [*(s for s in self._slots.get(rank, []) if s.step != step), State(step, applied)]

    def steps(self, rank: int) -> tuple[int, ...]:
        """What the markers of one rank say."""
        return tuple(sorted(state.step for state in self._slots.get(rank, [])))

    def damage(self, rank: int) -> None:
        """Flip a bit in each state of a rank."""
        for state in self._slots.get(rank, []):
            state.damaged = True

    def verify(self, rank: int, step: int) -> bool:
        """The state fits its digest; one that does not is dropped."""
        found = [state for state in self._slots.get(rank, []) if state.step == step]
        if found and not found[0].damaged:
            return True
        self._slots[rank] = [state for state in self._slots.get(rank, []) if state.step != step]
        return False

    def load(self, rank: int, step: int) -> int | None:
        """What a process takes from the state of ``step``: the updates that its parameters then hold."""
        found = next(state for state in self._slots[rank] if state.step == step)
        applied = None if found.damaged else found.applied
        self._on_load(rank, step, applied)
        return applied

    def keep_only(self, rank: int, step: int) -> None:
        """The job stands at ``step``: states of other steps do not count."""
        self._slots[rank] = [state for state in self._slots.get(rank, []) if state.step == step]
