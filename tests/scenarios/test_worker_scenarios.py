"""Scenarios of one rank in a recovery, in text: messages and script events in, commands of the worker machine out.

A file has blocks with an empty line between them, as in ``test_scenarios.py``: input, a line ``----``, output. Words of
an input line, from left to right:

- ``worker step=N``: a process whose session is open at step N, in a loop that can go back to step 0; with ``joining``
  it takes the place of a lost rank;
- ``takes``, ``begins``, ``votes``, ``passes``, ``breaks``, ``commits``, ``fails``: the script is given a step, its
  block begins, and so on, up to the commit or an exception in the block; ``leaves``: an aborted block has ended;
  ``finishes``: there are no more steps;
- the name of an event of ``core/worker/position.py``;
- ``fence G``, ``settle G STEP THEN``, ``resume G STEP``: messages in generation G; ``settle`` with ``digests``,
  ``save`` or ``rewind=N``;
- ``unserved G``, ``waits``, ``restored G STEP``, ``built G``, ``not-built G``, ``differ G``, ``ended G``, ``trained``,
  ``other``: reports of the shell;
- ``after S``: S seconds pass, and timers that are over post their event.

The output has the commands, and the orders that wait. To write the output of changed files:
``python -m tests.scenarios.test_worker_scenarios FILE ...``, then read the difference.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.core.ids import Generation, MemberId, SaveId
from holdfast.core.protocol.layout_messages import Layouts
from holdfast.core.protocol.messages import (
    Command,
    Fence,
    Message,
    ResumeInPlace,
    SaveShare,
    SetTimer,
    Settle,
    Tick,
)
from holdfast.core.worker import decision_orders, worker_machine
from holdfast.core.worker.decision_orders import (
    CarryOut,
    DecisionOrder,
    LookAtWeights,
    OrderBook,
    RefuseOrder,
    Standing,
    WarnOfScript,
)
from holdfast.core.worker.position import REPORTED, ScriptEvent
from holdfast.core.worker.worker_machine import (
    ADVANCED,
    WAIT_REACHED,
    Advanced,
    AnswerFence,
    ApplyUpdate,
    BreakCollectives,
    BuildGroups,
    ContinueStep,
    EndServing,
    GroupsBuilt,
    OrderEnded,
    ReportBroken,
    RestoreState,
    ServingEnded,
    StateRestored,
    WeightsSeen,
    WorkerMachine,
)
from holdfast.errors import HoldfastError
from tests.scenarios.scenario_texts import with_output

HERE = Path(__file__).parent / "worker"
BUILT = {"built": "", "not-built": "a peer is lost", "differ": "other groups"}
ME = MemberId(1)
E = ScriptEvent


def generation(word: str) -> Generation:
    """Return generation ``word`` of the first controller."""
    return Generation(1, int(word))


def save_of(number: Generation, step: int) -> SaveShare:
    """Return the order to write a share."""
    save_id = SaveId("run", number, step, 0, "last-gasp")
    return SaveShare(save_id, root="/ckpt", sources=(0,), layouts=Layouts((), {}), dead_locals={})


class WorkerPlayer:
    """A player of the input of one file."""

    def __init__(self) -> None:
        self.machine = WorkerMachine(ME, generation("1"))
        self.now_s = 0.0
        self.due_s: dict[str, float] = {}

    def play(self, line: str) -> Iterator[str]:
        """Yield the output of one line of input."""
        verb, *words = line.split()
        try:
            found = self._happens(verb, words)
            yield from filter(None, map(self._text, found))
        except HoldfastError as error:
            yield f"{type(error).__name__}: {error.message.splitlines()[0].split(';')[0]}"
        waiting = [order.kind.value for order in self.machine.orders.waiting]
        steps, position = self.machine.steps, self.machine.script.position
        yield f"{steps.state} at step {steps.step}, {position}" + (
            f", waiting: {', '.join(waiting)}" if waiting else ""
        )

    def _happens(self, verb: str, words: list[str]) -> list[Command]:
        if verb == "worker":
            self._begin(words)
            return []
        if verb == "after":
            return self._pass(float(words[0]))
        if verb in (*("fence", "settle", "resume", "unserved", "restored"), *BUILT, "ended"):
            return self._report(self._message(verb, generation(words[0]), words[1:]))
        reports: dict[str, Message] = {
            "waits": WAIT_REACHED,
            "trained": WeightsSeen(trained=True),
            "other": WeightsSeen(trained=False),
        }
        if verb in reports:
            return self._report(reports[verb])
        return [command for word in (verb, *words) for command in self._moves(word)]

    def _begin(self, words: list[str]) -> None:
        self.machine = WorkerMachine(ME, generation("1"), joining="joining" in words)
        self.now_s, self.due_s = 0.0, {}
        script = self.machine.script
        script.handle(E.LOOP_OPENED)
        script.allow_rewind(0)
        script.handle(E.RETURNED)
        self.machine.steps.open(int(words[0].removeprefix("step=")))

    def _message(self, verb: str, number: Generation, words: list[str]) -> Message:
        match verb:
            case "fence":
                return Fence(member_id=ME, generation=number, reason="a rank is lost")
            case "settle":
                rewind = [int(word.removeprefix("rewind=")) for word in words if word.startswith("rewind=")]
                step = int(words[0])
                return Settle(
                    member_id=ME,
                    generation=number,
                    step=step,
                    then=words[1],  # type: ignore[arg-type]
                    vouch="digests" in words,
                    save=save_of(number, step) if "save" in words else None,
                    rewind=rewind[0] if rewind else -1,
                )
            case "resume":
                return ResumeInPlace(member_id=ME, generation=number, step=int(words[0]))
            case "unserved":
                return ServingEnded(number)
            case "restored":
                return StateRestored(int(words[0]), number)
            case "ended":
                return OrderEnded(number)
        return GroupsBuilt(number, BUILT[verb], differ=verb == "differ")

    def _pass(self, seconds_s: float) -> list[Command]:
        self.now_s += seconds_s
        over = [name for name, due_s in self.due_s.items() if due_s <= self.now_s]
        found: list[Command] = []
        for name in over:
            del self.due_s[name]
            found += self._report(Tick(name=name))
        return found

    def _moves(self, word: str) -> list[Command]:
        steps, script = self.machine.steps, self.machine.script
        event: ScriptEvent | None = None
        match word:
            case "takes":
                script.handle(E.STEP_TAKEN)
                event = E.STEP_GIVEN
            case "begins":
                event = E.BLOCK_BEGUN if steps.begin() else E.HELD
            case "votes":
                steps.enter_vote()
            case "passes":
                steps.vote_passed()
            case "breaks":
                steps.vote_broken()
            case "commits":
                steps.end_block()
                script.handle(E.BLOCK_ENDED)
            case "fails":
                steps.fail()
            case "finishes":
                steps.finish()
            case "leaves":
                event = E.BLOCK_LEFT
            case _:
                event = E(word)
        if event is not None:
            script.handle(event)
        if steps.fenced is None:
            return []
        return self._report(ADVANCED if event is None else Advanced(event))

    def _report(self, event: Message) -> list[Command]:
        found = list(self.machine.handle(self.now_s, event))
        for command in found:
            if isinstance(command, SetTimer):
                self.due_s[command.name] = self.now_s + command.delay_s
        return found

    @staticmethod
    def _text(command: Command) -> str:
        match command:
            case AnswerFence():
                answer = command.answer
                away = ", away" * answer.away
                back = f", can go back to {answer.rewind}" if answer.rewind >= 0 else ""
                return f"-> answer: {answer.state} at step {answer.step}{back}{away}"
            case BreakCollectives():
                return "-> break the collectives"
            case CarryOut():
                start = " of the start of the aborted block" * command.aborted
                return f"-> carry out: {command.order.kind.value}{start}"
            case RefuseOrder():
                return f"-> refuse: {command.order.kind.value}: {command.reason}"
            case LookAtWeights():
                return "-> look at the weights"
            case WarnOfScript():
                return f"-> warn of the code after the block of step {command.step}"
            case SetTimer():
                return f"-> timer {command.name}: {command.delay_s:g} s"
            case ApplyUpdate():
                return "-> apply the update"
            case EndServing():
                return "-> end serving the state"
            case RestoreState():
                return f"-> restore the state of step {command.step}"
            case BuildGroups():
                return f"-> build the groups of {command.generation}"
            case ReportBroken():
                return f"-> report{' that no retry helps' * command.differ}: {command.reason}"
            case ContinueStep():
                return f"-> continue in {command.generation}"
        return f"-> {type(command).__name__}"


def played(text: str) -> str:
    """Return ``text`` with the output that its input gives."""
    return with_output(text, WorkerPlayer().play)


TEXTS = {path: path.read_text() for path in sorted(HERE.glob("*.txt"))}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_a_scenario_of_a_worker_ends_as_it_is_written(path: Path) -> None:
    assert played(TEXTS[path]) == TEXTS[path]


def is_caught() -> bool:
    """Return whether the scenarios see the change that a test has made."""
    return any(played(text) != text for text in TEXTS.values())


def test_no_scenario_differs_without_a_change() -> None:
    assert TEXTS and not is_caught()


@pytest.mark.parametrize("name", ["SCRIPT_TIMEOUT_S", "WEIGHTS_TIMEOUT_S", "WEIGHTS_POLL_S"])
def test_each_limit_is_in_a_scenario(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(decision_orders, name, 1000.0)
    assert is_caught()


@pytest.mark.parametrize("state", sorted(decision_orders.COMPLETE))
def test_each_complete_state_is_in_a_scenario(monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    monkeypatch.setattr(decision_orders, "COMPLETE", decision_orders.COMPLETE - {state})
    assert is_caught()


def test_an_order_that_outlives_its_fence_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OrderBook, "drop", lambda book: None)
    assert is_caught()


def test_an_order_that_does_not_wait_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(book: OrderBook, order: DecisionOrder, at: Standing, found: list[Command]) -> bool:
        return False

    for wait in ("_waits_for_script", "_waits_for_weights"):
        with monkeypatch.context() as context:
            context.setattr(OrderBook, wait, hasty)
            if wait == "_waits_for_weights":  # it would be asked again without an end
                context.setattr(decision_orders, "waits_for", lambda settle, script: ())
            assert is_caught(), wait


def test_an_order_to_continue_that_counts_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    built = WorkerMachine._built

    def keeping(machine: WorkerMachine, event: GroupsBuilt, found: list[Command]) -> None:
        order = machine._resume
        built(machine, event, found)
        machine._resume = order

    monkeypatch.setattr(WorkerMachine, "_built", keeping)
    assert is_caught()


def test_a_script_that_continues_while_its_state_is_served_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def eager(machine: WorkerMachine, resume: ResumeInPlace, found: list[Command]) -> None:
        machine._resume = resume

    monkeypatch.setattr(WorkerMachine, "_order_to_continue", eager)
    assert is_caught()


def test_an_answer_that_is_not_given_again_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for event in REPORTED:
        with monkeypatch.context() as context:
            context.setattr(worker_machine, "REPORTED", REPORTED - {event})
            assert is_caught(), event


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(played(Path(name).read_text()))
