"""The memory tier around the machines: two slots per rank, as far as the protocol can tell.

A state says which step its parameters really had when it was copied; a copy under way, and a damaged one, cannot be
loaded. What a load gives is compared with what was asked for. With a log, each rank notes what an update is made from
before it votes: a state and the updates since give the state of a later step.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from holdfast.core.protocol.messages import Receive

SLOTS = 2


class SlotState(msgspec.Struct):
    """One slot: ``step`` is what the marker says, ``applied`` what the parameters are."""

    step: int
    applied: int | None
    damaged: bool = False


class Memory:
    """The slots of all ranks. ``every``: steps between two states; 0: nothing is kept."""

    logs = False  # of updates, beside the states

    def __init__(self, every: int, on_load: Callable[[int, int, int | None], None]) -> None:
        self.every = every
        self._slots: dict[int, list[SlotState]] = {}
        self._updates: dict[
            int, dict[int, int | None]
        ] = {}  # rank -> step -> what the parameters were before it
        self._on_load = on_load

    def due(self, step: int) -> bool:
        """A state of ``step`` is to be kept."""
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

    def note(self, rank: int, step: int, applied: int | None) -> None:
        """The update of ``step`` is about to be voted for; the ring holds those since the newest state."""
        if self.logs and self.every:
            held = self._updates.setdefault(rank, {})
            held[step] = applied
            held.pop(step - self.every, None)

    def replays(self, rank: int) -> tuple[int, ...]:
        """Steps that a state and the updates since lead to."""
        held, found = self._updates.get(rank, {}), set()
        for state in self.steps(rank):
            step = state
            while step in held:
                step += 1
                found.add(step)
        return tuple(sorted(found))

    def sound(self, rank: int, order: Receive) -> bool:
        """What a newcomer is told to take is there, or is nothing of this."""
        if not order.replays:
            return not order.kept or self.verify(rank, order.step)
        here = order.step in self.steps(rank) or order.step in self.replays(rank)
        if here and all(self.verify(rank, step) for step in self.steps(rank)):
            return True
        self._updates.pop(rank, None)
        return False

    def take(self, rank: int, order: Receive) -> int | None:
        """Load the state that a newcomer is ordered to take. Return the updates that its parameters then hold."""
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
        """A session opens there; ``replayed``: from what is in memory of earlier steps, which stays."""
        if replayed:
            self._updates[rank] = {s: a for s, a in self._updates[rank].items() if s < step}
            return
        self.keep_only(rank, step)
        if self.every and step not in self.steps(rank):
            self.commit(rank, step, step)

    def keep_only(self, rank: int, step: int) -> None:
        """The job stands at ``step``: states of other steps, and updates, do not count."""
        self._updates.pop(rank, None)
        self._slots[rank] = [state for state in self._slots.get(rank, []) if state.step == step]
