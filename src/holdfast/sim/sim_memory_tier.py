"""Simulated memory tier: two slots per rank, each for one copy of the rank's state.

A slot records how many updates the parameters really contained when they were copied. An unfinished or damaged copy
cannot be loaded. Each load is checked against the requested step. With a gradient log, each rank logs the input of an
update before it votes on the step. A kept state and the logged updates after it give the state of a later step.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from holdfast.core.protocol.messages import Receive

SLOTS = 2


class SlotState(msgspec.Struct):
    """One slot with a copy of a rank's state.

    Attributes:
        step: the step that the slot claims to hold.
        applied: number of updates that its parameters really contain; None if they were copied in the middle of a
            change.
        damaged: True if a bit of the copy has flipped.
    """

    step: int
    applied: int | None
    damaged: bool = False


class Memory:
    """The slots of all ranks. ``every`` is the number of steps between two kept states; 0 if no state is kept."""

    logs = False  # True: there is also a gradient log

    def __init__(self, every: int, on_load: Callable[[int, int, int | None], None]) -> None:
        self.every = every
        self._slots: dict[int, list[SlotState]] = {}
        # Rank -> step -> number of updates that the parameters contained before the step
        self._updates: dict[int, dict[int, int | None]] = {}
        self._on_load = on_load

    def due(self, step: int) -> bool:
        """Return True if each rank shall keep its state of ``step`` in memory."""
        return self.every > 0 and step % self.every == 0

    def begin(self, rank: int) -> None:
        """Drop all kept states of a rank except the newest one, to free a slot for a new copy."""
        self._slots[rank] = self._slots.get(rank, [])[-(SLOTS - 1) :]

    def commit(self, rank: int, step: int, applied: int | None) -> None:
        """Record that a rank's copy of its state of ``step`` is complete.

        ``applied`` is the number of updates that the copy really contains; None if it was made during a change of the
        parameters.
        """
        self._slots[rank] = [
            *(s for s in self._slots.get(rank, []) if s.step != step),
            SlotState(step, applied),
        ]

    def steps(self, rank: int) -> tuple[int, ...]:
        """Return the steps whose states a rank keeps in memory, in ascending order."""
        return tuple(sorted(state.step for state in self._slots.get(rank, [])))

    def damage(self, rank: int) -> None:
        """Flip a bit in each state that a rank keeps in memory."""
        for state in self._slots.get(rank, []):
            state.damaged = True

    def verify(self, rank: int, step: int) -> bool:
        """Return True if a rank keeps an undamaged state of ``step``. Drop a damaged one."""
        found = [state for state in self._slots.get(rank, []) if state.step == step]
        if found and not found[0].damaged:
            return True
        self._slots[rank] = [state for state in self._slots.get(rank, []) if state.step != step]
        return False

    def load(self, rank: int, step: int) -> int | None:
        """Load the kept state of ``step`` of a rank.

        Returns:
            The number of updates that its parameters contain. None if the copy is damaged, or was made in the middle of
            a change of the parameters.
        """
        found = next(state for state in self._slots[rank] if state.step == step)
        applied = None if found.damaged else found.applied
        self._on_load(rank, step, applied)
        return applied

    def note(self, rank: int, step: int, applied: int | None) -> None:
        """Log the input of a rank's update of ``step``, before the vote on that step.

        The log contains only the last ``every`` steps. ``applied`` is the number of updates in the parameters before
        the update.
        """
        if self.logs and self.every:
            held = self._updates.setdefault(rank, {})
            held[step] = applied
            held.pop(step - self.every, None)

    def replays(self, rank: int) -> tuple[int, ...]:
        """Return the steps that a rank can reach if it applies logged updates to one of its kept states."""
        held, found = self._updates.get(rank, {}), set()
        for state in self.steps(rank):
            step = state
            while step in held:
                step += 1
                found.add(step)
        return tuple(sorted(found))

    def sound(self, rank: int, order: Receive) -> bool:
        """Return True if a newcomer can build its state from memory as ``order`` asks.

        Return True also if ``order`` asks for nothing from memory. Drop a damaged state. Drop the gradient log if the
        logged updates cannot be repeated.
        """
        if not order.replays:
            return not order.kept or self.verify(rank, order.step)
        here = order.step in self.steps(rank) or order.step in self.replays(rank)
        if here and all(self.verify(rank, step) for step in self.steps(rank)):
            return True
        self._updates.pop(rank, None)
        return False

    def take(self, rank: int, order: Receive) -> int | None:
        """Load the kept state that ``order`` names, and repeat the logged updates if ``order`` asks for them.

        Returns:
            The number of updates that the parameters then contain. None if no usable state results.
        """
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

        If ``replayed``, the session was restored from an earlier kept state and logged updates, which stay in memory.
        Otherwise only a kept state of ``step`` stays.
        """
        if replayed:
            self._updates[rank] = {s: a for s, a in self._updates[rank].items() if s < step}
            return
        self.keep_only(rank, step)
        if self.every and step not in self.steps(rank):
            self.commit(rank, step, step)

    def keep_only(self, rank: int, step: int) -> None:
        """Drop the logged updates of a rank, and all its kept states except that of ``step``."""
        self._updates.pop(rank, None)
        self._slots[rank] = [state for state in self._slots.get(rank, []) if state.step == step]
