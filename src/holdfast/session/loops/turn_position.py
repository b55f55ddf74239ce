"""The position of the script among its epochs and phases, which run once in the life of the job and may be nested.

Theory. A *part* is one ``s.epochs(N)`` or one phase. A *turn* is one epoch, or the one run of a phase. A process that
starts again runs the script again, and must skip the turns that the job has finished. So each part has a key, its
*way*: the path of numbers that leads through the enclosing parts and turns to this part. Each part has a record with
two main values: the number of its turns that the whole job has finished, and the number of the next loop over steps.
With these values a process begins in the middle of the script as if it had run from the start. The loops over steps are
numbered in the order of the script. Skipped loops are also counted.

A *slot* is a place for one loop over steps: the session outside of all parts, or one turn. A slot has only one loop,
because the session could not skip the code between two loops.

Life of the data: records are made in a running job. They are a part of the place of the job in each state that is saved
or given (``place["turns"]``). Records of parts inside a turn are dropped when that turn has ended.

Invariants:
1. A record is never changed, only replaced, because another thread may be encoding it for a save.
2. ``passed``, the number of finished turns, rises by one with each turn that the whole job has finished. It never falls
   in one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.errors import UsageError
from holdfast.text import plural

Record = dict[str, Any]

IDIOM = (
    "for epoch in s.epochs(N): for step in s.steps(loader): ..., and for _ in s.phase('warmup'): ... around what "
    "runs once"
)


class LoopSlot:
    """A slot for one loop over steps: the session outside of all parts, or one turn of a part.

    Attributes:
        way: key of the turn; empty for the session.
        title: name of the slot in error messages.
        parts: number of parts that the script has begun in this slot.
        has_loop: the script has begun a loop over steps in this slot.
    """

    def __init__(self, way: str, title: str) -> None:
        self.way = way
        self.title = title
        self.parts = 0
        self.has_loop = False


class ScriptPart:
    """A part of the script (``s.epochs(N)`` or a phase) that the script is running.

    Attributes:
        way: key of the part.
        kind: ``epochs``, or ``phase`` with its name.
        turns: total number of turns of the part.
        done: number of turns that the whole job has finished.
        planned: total number of turns of this part in the loaded state, as the script gave it before the job was
            started again. It equals ``turns`` if the loaded state has no such part, or if the part is over.
        closed: the script has left the part, by ``break`` or an exception.
        slot: the slot of the open turn; None between two turns.
    """

    def __init__(self, way: str, kind: str, turns: int, done: int) -> None:
        self.way = way
        self.kind = kind
        self.turns = turns
        self.done = done
        self.planned = turns
        self.closed = False
        self.slot: LoopSlot | None = None

    @property
    def title(self) -> str:
        """Name of the open turn in error messages."""
        return f"epoch {self.done}" if self.kind == "epochs" else self.kind


class TurnPosition:
    """The position of the script of one session among its parts, turns and loops over steps.

    Attributes:
        loops: number of loops over steps so far, including skipped ones.
        several: another library drives the loops, so a slot may have any number of them.
    """

    def __init__(self) -> None:
        self.loops = 0
        self.several = False
        self._record: dict[str, Record] = {}
        self._passed = 0
        self._seen: set[str] = set()
        self._bottom = LoopSlot("", "the session")
        self._open: list[ScriptPart] = []

    # ------------------------------------------------------------------ the record

    @property
    def record(self) -> Record:
        """The number of finished turns and the records of all parts, for the place of the job."""
        return {"passed": self._passed, "parts": dict(self._record)}

    @property
    def passed(self) -> int:
        """Number of turns that the whole job has finished."""
        return self._passed

    def stand_at(self, record: Mapping[str, Any] | None) -> None:
        """Take over :attr:`record` from the loaded state; None if the job had no parts."""
        record = record or {}
        self._record = dict(record.get("parts", {}))
        self._passed = int(record.get("passed", 0))

    def missing(self, loop: int) -> str:
        """Return the name of a part or loop that the job has reached and this script has not; empty if there is none.

        Args:
            loop: number of the newest loop over steps that the job has opened.
        """
        unseen = [each for way, each in self._record.items() if way not in self._seen]
        if unseen:
            return f"{_name(unseen[0])} of the job"
        if loop >= self.loops:
            return f"loop {loop} over steps, where the job is (this script had {plural(self.loops, 'loop')})"
        return ""

    # ------------------------------------------------------------------ in the script

    @property
    def slot(self) -> LoopSlot:
        """The slot in which the script is: the open turn, or the session."""
        inner = self._open[-1].slot if self._open else None
        return inner or self._bottom

    @property
    def inside(self) -> bool:
        """True while the script is in a turn of a part."""
        return bool(self._open)

    @property
    def epoch(self) -> int | None:
        """Number of the innermost open epoch; None if there is none."""
        return next((part.done for part in reversed(self._open) if part.kind == "epochs"), None)

    @property
    def epochs(self) -> str | None:
        """Key of the part ``s.epochs(N)`` whose open epoch has the loop over steps itself; None if there is none."""
        return self._open[-1].way if self._open and self._open[-1].kind == "epochs" else None

    @property
    def begun_at(self) -> int:
        """The step at which the job has begun the innermost open turn; 0 if no turn is open."""
        return int(self._record[self._open[-1].way]["step"]) if self._open else 0

    @property
    def left(self) -> ScriptPart | None:
        """The innermost open part if the script has left that part by ``break`` or an exception; otherwise None."""
        return self._open[-1] if self._open and self._open[-1].closed else None

    def next_loop(self) -> int:
        """Count the loop over steps that the script begins, and return its number.

        Raises:
            UsageError: the script has already had a loop over steps in the same turn, or in the session outside of all
                parts.
        """
        slot = self.slot
        if slot.has_loop and not self.several:
            raise UsageError(
                f"a second loop over steps in {slot.title}: what stands between the two would run again at each start",
                hint=IDIOM,
            )
        slot.has_loop = True
        self.loops += 1
        return self.loops - 1

    def enter(self, kind: str, turns: int) -> ScriptPart:
        """Return the part (``s.epochs(N)`` or a phase) that the script begins at its present position.

        Raises:
            UsageError: the record of the job has another part at this position.
        """
        slot = self.slot
        way = f"{slot.way}{slot.parts}"
        slot.parts += 1
        known = self._record.get(way)
        if known is not None and known["kind"] != kind:
            raise UsageError(
                f"{_name(known)} stood where this script has {_name({'kind': kind, 'turns': turns})}",
                hint="resume with the parts in the order in which the job began, or begin with resume='never'",
            )
        self._seen.add(way)
        part = ScriptPart(way, kind, turns, 0 if known is None else int(known["done"]))
        if known is not None:
            self.loops = int(known["loops"])
            if known["over"] and not self._goes_further(known, turns):
                part.turns = part.done
            elif not known["over"]:
                part.planned = int(known["turns"])
        self._open.append(part)
        return part

    def _goes_further(self, known: Mapping[str, Any], turns: int) -> bool:
        """Return whether a finished part, which was not left early, has more turns in the present script."""
        return bool(known["done"] == known["turns"] < turns)

    def begin(self, part: ScriptPart, step: int) -> int:
        """Begin the next turn of ``part`` at ``step``. Return the step at which the job began that turn."""
        known = self._record.get(part.way)
        part.slot = LoopSlot(f"{part.way}.{part.done}.", part.title)
        if known is None or known["done"] != part.done or known["over"]:
            self._write(part, step, over=False)
            return step
        return int(known["step"])

    def end(self, part: ScriptPart, step: int) -> None:
        """Record that the whole job has finished the open turn of ``part`` at ``step``."""
        inside = f"{part.way}."
        self._record = {way: each for way, each in self._record.items() if not way.startswith(inside)}
        self._passed += 1
        part.done += 1
        part.slot = None
        self._write(part, step, over=part.closed or part.done >= part.turns)

    def leave(self, part: ScriptPart) -> None:
        """Remove ``part`` from the open parts, because it has no further turn."""
        self._open.remove(part)

    def _write(self, part: ScriptPart, step: int, *, over: bool) -> None:
        entry = {
            "kind": part.kind,
            "turns": part.turns,
            "done": part.done,
            "loops": self.loops,
            "step": step,
            "over": over,
        }
        self._record = {**self._record, part.way: entry}


def _name(entry: Mapping[str, Any]) -> str:
    return f"s.epochs({entry['turns']})" if entry["kind"] == "epochs" else str(entry["kind"])
