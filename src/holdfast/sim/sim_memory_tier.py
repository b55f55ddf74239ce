"""Simulated memory tier: two slots per rank, each for one copy of the rank's state.

A slot records the number of updates that the parameters really had when they were copied. An unfinished or damaged copy
cannot be loaded. Each load is compared with the request. With a gradient log, each rank records the input of an update
before it votes. A state and the logged updates after it give the state of a later step.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from holdfast.core.protocol.messages import Receive

SLOTS = 2


class SlotState(msgspec.Struct):
    """One slot. ``step`` is the step in its marker; ``applied`` is the number of updates that its parameters hold."""

    step: int
    applied: int | None
    damaged: bool = False


class Memory:
    """The slots of all ranks. ``every`` is the number of steps between two kept states; 0: none is kept."""

    logs = False  # True: the gradient log of updates is kept, too

    def __init__(self, every: int, on_load: Callable[[int, int, int | None], None]) -> None:
        self.every = every
        self._slots: dict[int, list[SlotState]] = {}
        # Rank -> step -> number of updates that the parameters held before the step
        self._updates: dict[int, dict[int, int | None]] = {}
        self._on_load = on_load

    def due(self, step: int) -> bool:
        """Return True if the state of ``step`` shall be kept."""
        return self.every > 0 and step % self.every == 0

    def begin(self, rank: int) -> None:
        """Drop all states of a rank but the newest, to make room for a new copy."""
        self._slots[rank] = self._slots.get(rank, [])[-(SLOTS - 1) :]

    def commit(self, rank: int, step: int, applied: int | None) -> None:
        """Record that the copy of ``step`` is complete."""
        self._slots[rank] = [
            *(s for s in self._slots.get(rank, []) if s.step != step),
            SlotState(step, applied),
        ]

    def steps(self, rank: int) -> tuple[int, ...]:
        """Return the steps whose states a rank keeps, in order."""
        return tuple(sorted(state.step for state in self._slots.get(rank, [])))

    def damage(self, rank: int) -> None:
        """Flip a bit in each state of a rank."""
        for state in self._slots.get(rank, []):
            state.damaged = True

    def verify(self, rank: int, step: int) -> bool:
        """Return True if the state of ``step`` matches its digest. Drop a state that does not."""
        found = [state for state in self._slots.get(rank, []) if state.step == step]
        if found and not found[0].damaged:
            return True
        self._slots[rank] = [state for state in self._slots.get(rank, []) if state.step != step]
        return False

    def load(self, rank: int, step: int) -> int | None:
        """Load the state of ``step``. Return the number of updates that it holds, or None if it is damaged."""
        found = next(state for state in self._slots[rank] if state.step == step)
        applied = None if found.damaged else found.applied
        self._on_load(rank, step, applied)
        return applied

    def note(self, rank: int, step: int, applied: int | None) -> None:
        """Log the input of the update of ``step`` before the vote. The log holds the updates since the newest state."""
        if self.logs and self.every:
            held = self._updates.setdefault(rank, {})
            held[step] = applied
            held.pop(step - self.every, None)

    def replays(self, rank: int) -> tuple[int, ...]:
        """Return the steps that can be reached from a kept state with the logged updates after it."""
        held, found = self._updates.get(rank, {}), set()
        for state in self.steps(rank):
            step = state
            while step in held:
                step += 1
                found.add(step)
        return tuple(sorted(found))

    def sound(self, rank: int, order: Receive) -> bool:
        """Return True if the kept state that ``order`` names is present and sound, or if ``order`` names none."""
        if not order.replays:
            return not order.kept or self.verify(rank, order.step)
        here = order.step in self.steps(rank) or order.step in self.replays(rank)
        if here and all(self.verify(rank, step) for step in self.steps(rank)):
            return True
        self._updates.pop(rank, None)
        return False

    def take(self, rank: int, order: Receive) -> int | None:
        """Load the state that a newcomer is ordered to take. Return the number of updates that it holds."""
        if not order.replays:
            return self.load(rank, order.step)
        base = max(step for step in self.steps(rank) if step <= order.step)
        applied = self.load(rank, base)
        for step in range(base, order.step):
            before = self._updates[rank].get(step)
            applied = step + 1 if applied == before == step else None
        self._on_load(rank, order.step, applied)
        return applied

    def opened(self, rank: int, step: int, *, replayed: bool) -> None:
        """Prepare the slots of a rank whose session opens at ``step``.

        If ``replayed``, the session was restored from an earlier state and logged updates, which are kept.
        """
        if replayed:
            self._updates[rank] = {s: a for s, a in self._updates[rank].items() if s < step}
            return
        self.keep_only(rank, step)
        if self.every and step not in self.steps(rank):
            self.commit(rank, step, step)

    def keep_only(self, rank: int, step: int) -> None:
        """Drop the logged updates of a rank, and its states of other steps than ``step``."""
        self._updates.pop(rank, None)
        self._slots[rank] = [state for state in self._slots.get(rank, []) if state.step == step]
