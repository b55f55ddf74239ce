"""Scenarios of the script's position as text: the input has events, the output positions and answers.

A file has blocks with an empty line between them. A block is one or more lines of input, a line ``----``, and the
output. Lines that begin with ``#``, and blocks without ``----``, are comments. Words of an input line, from left to
right:

- ``worker``: a new process; with ``joining`` it takes the place of a lost rank until ``joined``;
- ``loop step=N``: a loop of steps opens that can go back to step N; with ``endless`` its number of steps is not known;
- ``ended``: the loop has ended for the whole job;
- ``blocks=N``: N steps that commit, each without code before and after its block;
- ``again``: the script gets a step again after it has already run code before the block of this step;
- the name of an event of ``core/worker/position.py``;
- ``ask``: the answers of a survivor in this position; ``ask aborted``: with the block of its step aborted.

To write the output of changed files, run ``python -m tests.scenarios.test_scenarios FILE ...``, then read the
difference.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast, get_args

import pytest

from holdfast.core.worker.position import (
    ATTENDANCES,
    NO_REWIND,
    RULES,
    Attendance,
    Awaited,
    PositionRules,
    ScriptEvent,
    ScriptMachine,
    ScriptPosition,
)
from holdfast.errors import HoldfastError
from tests.scenarios.scenario_texts import with_output

HERE = Path(__file__).parent
BLOCK = (ScriptEvent.STEP_TAKEN, ScriptEvent.STEP_GIVEN, ScriptEvent.BLOCK_BEGUN, ScriptEvent.BLOCK_ENDED)

AWAITED = {"step": "its block", "block": "its next step", "loop": "its next loop", "": "nothing"}
WITHOUT_EFFECT = {
    (position, "can_rewind") for position in ("outside", "between_loops", "after_loop", "next_loop")
}
"""Positions in which no loop is open, so that ``can_rewind`` has no effect."""


class Player:
    """A player of the input of one file."""

    def __init__(self) -> None:
        self.machine = ScriptMachine()

    def play(self, line: str) -> Iterator[str]:
        """Yield the output of one line of input."""
        words = line.split()
        if words[0] == "ask":
            yield from self._answers(aborted="aborted" in words)
            return
        if words[0] == "worker":
            self.machine = ScriptMachine(joining="joining" in words)
        elif words[0] == "loop":
            self._open_loop(int(words[1].removeprefix("step=")), endless="endless" in words)
        else:
            for word in words:
                try:
                    self._happen(word)
                except HoldfastError as error:
                    yield f"{type(error).__name__}: {error.message.splitlines()[0].split(';')[0]}"
        yield f"{self.machine.position.value}, {self.machine.attendance.value}"

    def _open_loop(self, step: int, *, endless: bool) -> None:
        self.machine.handle(ScriptEvent.LOOP_OPENED)
        self.machine.allow_rewind(step)
        self.machine.run_loop(unfinished=not endless)
        self.machine.handle(ScriptEvent.RETURNED)

    def _happen(self, word: str) -> None:
        machine = self.machine
        if word.startswith("blocks="):
            for _ in range(int(word.removeprefix("blocks="))):
                for event in (*BLOCK, ScriptEvent.RETURNED):
                    machine.handle(event)
        elif word == "again":
            machine.handle(ScriptEvent.STEP_GIVEN, again=True)
        elif word == "joined":
            machine.join()
        elif word == "ended":
            machine.end_loop()
        else:
            machine.handle(ScriptEvent(word))

    def _answers(self, *, aborted: bool) -> Iterator[str]:
        machine = self.machine
        moment = {"now": "the state of now", "boundary": "the state of the boundary"}[
            machine.gives(aborted=aborted)
        ]
        wait = f"waits for {AWAITED[machine.rules.awaited]}, then "
        yield f"to a replacement: {wait if machine.awaits(replaces=True) else ''}{moment}"
        yield f"to a save: {wait if machine.awaits(replaces=False) else ''}the state of the boundary"
        step = machine.offers_rewind
        yield f"goes back: {'no' if step == NO_REWIND else f'to step {step} or later'}"
        if machine.may_hold_other_weights:
            yield "the model may hold other weights"
        if machine.away:
            yield "away: no decision counts on the script"
        if machine.unfinished:
            yield "the loop is unfinished"
        if machine.joining:
            yield f"a collective is {'refused' if machine.rules.guarded else 'made alone'}"
        elif machine.repeats:
            yield "a collective is warned of: the script repeats it"


def played(text: str) -> str:
    """Return ``text`` with the output that its input gives."""
    return with_output(text, Player().play)


@pytest.mark.parametrize("path", sorted(HERE.glob("*.txt")), ids=lambda path: path.stem)
def test_a_scenario_ends_as_it_is_written(path: Path) -> None:
    text = path.read_text()
    assert played(text) == text


def changed(rules: PositionRules) -> Iterator[tuple[str, PositionRules]]:
    """Yield mutants of one row: the field, and the row with another value in it."""
    yield "can_rewind", rules._replace(can_rewind=not rules.can_rewind)
    yield "guarded", rules._replace(guarded=not rules.guarded)
    yield "gives", rules._replace(gives="boundary" if rules.gives == "now" else "now")
    for awaited in get_args(Awaited):
        if awaited != rules.awaited:
            yield "awaited", rules._replace(awaited=awaited)


@pytest.mark.parametrize("position", list(RULES))
def test_a_rule_that_is_another_one_changes_a_scenario(
    monkeypatch: pytest.MonkeyPatch, position: ScriptPosition
) -> None:
    texts = [path.read_text() for path in HERE.glob("*.txt")]
    for field, mutant in changed(RULES[position]):
        with monkeypatch.context() as context:
            context.setitem(cast(dict[ScriptPosition, PositionRules], RULES), position, mutant)
            caught = any(played(text) != text for text in texts)
        assert caught or (position.value, field) in WITHOUT_EFFECT, f"no scenario needs {field}: {mutant}"


@pytest.mark.parametrize("pair", list(ATTENDANCES), ids=lambda pair: f"{pair[0]}-{pair[1]}")
def test_each_row_of_the_attendance_is_in_a_scenario(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[Attendance, ScriptEvent]
) -> None:
    monkeypatch.delitem(cast(dict[tuple[Attendance, ScriptEvent], Attendance], ATTENDANCES), pair)
    failed = 0
    for path in HERE.glob("*.txt"):
        try:
            failed += played(path.read_text()) != path.read_text()
        except HoldfastError:  # in `loop` or `blocks=N`
            failed += 1
    assert failed


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(played(Path(name).read_text()))
