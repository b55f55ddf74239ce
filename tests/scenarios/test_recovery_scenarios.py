"""Scenarios of a recovery as text: the input has events of the ranks, the output phases and orders of the controller.

A file has blocks with an empty line between them, as in ``test_scenarios.py``: input, a line ``----``, output. Words of
an input line, from left to right:

- ``job ranks=N``: a job of N ranks whose sessions are open at step 0 and whose groups can be rebuilt in place. With
  ``compare`` replacements receive compared copies only. With ``restart`` all workers are restarted at each fault;
- ``dies RANK STATE STEP``, ``exits RANK``: a process ends by a signal, or as it was ordered to;
- ``fails RANK``: the script raises an error that the user must correct; ``breaks RANK``: a collective of this rank
  breaks; ``differs RANK``: this rank holds other process groups than another one;
- ``settles RANK STATE STEP``: an answer to the fence; with ``away`` the script has left its loop;
- ``digests RANK STEP VALUE``, ``writes RANK``, ``offers RANK STEP``: actions of a source. The last share that is
  written seals the checkpoint;
- ``starts RANK STEP``, ``asks RANK``, ``joins RANK STEP``: actions of a replacement; ``starts`` and ``opens RANK STEP``
  also of any other new process;
- ``reaches RANK STEP``: the first step in a generation; ``connects RANK``: a member connects again;
- ``tick NAME``: a timer fires; ``room N``: the node can hold N ranks; ``successor``: another controller takes over;
- ``exit``, ``cancel``: a graceful exit is requested, or cancelled; ``stop``: the run is stopped.

The output has the phases that were entered, the orders, and the orders to start processes. To write the output of
changed files: ``python -m tests.scenarios.test_recovery_scenarios FILE ...``, then read the difference.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from holdfast.core.decide.recovery_phases import RULES, Phase, PhaseRules
from holdfast.core.protocol.health_messages import CopyDigest, StateDigests
from holdfast.core.protocol.messages import (
    AgentBeat,
    AgentHello,
    ExitRun,
    FaultSeen,
    Fence,
    Finish,
    JoinAsked,
    Joined,
    Leave,
    MemberSeen,
    MemberStarted,
    Message,
    Receive,
    Release,
    ResumeInPlace,
    SaveReported,
    Send,
    SessionOpened,
    Settle,
    StartMembers,
    StateOffered,
    StateRefused,
    StepReached,
    StopRun,
    Tick,
    WorkerHello,
)
from holdfast.errors import HoldfastError
from holdfast.exit_codes import Exit
from tests.core.test_controller import NODE, Job, fail, successor
from tests.scenarios.scenario_texts import with_output

HERE = Path(__file__).parent / "recovery"


class RecoveryPlayer:
    """A player of the input of one file."""

    def __init__(self) -> None:
        self.job = Job(1)
        self.save: Settle | None = None
        self.written: set[int] = set()
        self.phase = "idle"

    def play(self, line: str) -> Iterator[str]:
        """Yield the output of one line of input."""
        verb, *words = line.split()
        start = len(self.job.log)
        if verb == "job":
            self._begin(*words)
            start = len(self.job.log)
        else:
            getattr(self, f"_{verb}")(*words)
        if verb == "successor":
            start = 0
        recovery = self.job.controller.recovery
        if recovery.phase != self.phase:
            yield f"{self.phase} -> {recovery.phase}"
        self.phase = recovery.phase
        for command in self.job.log[start:]:
            if isinstance(command, Finish):
                yield f"the run ends with {Exit(command.code).name}"
            elif isinstance(command, Send):
                text = self._order(command.message)
                if text:
                    yield text

    def _order(self, message: Message) -> str:
        """Return an order in words. Return an empty text for a message that no phase sends."""
        if isinstance(message, StartMembers):
            seats = ", ".join(str(seat.rank) for seat in message.members)
            return f"start rank {seats}" + (" beside the others" if message.join else "")
        text = ""
        match message:
            case Fence():
                text = "Fence"
            case Settle():
                self.save, self.written = (message, set()) if message.save else (self.save, self.written)
                words = [f"Settle at step {message.step} then {message.then}"]
                words += ["send digests"] * message.vouch
                words += [f"save from {message.save.sources}"] if message.save else []
                words += [f"go back to {message.rewind}"] if message.rewind >= 0 else []
                text = ", ".join(words)
            case Receive():
                text = f"Receive step {message.step} from ranks {', '.join(message.sources)}"
            case ResumeInPlace():
                text = f"ResumeInPlace at step {message.step}"
            case Leave():
                text = f"Leave with {Exit(message.code).name}"
            case Release():
                text = "Release"
            case _:
                return ""
        member = self.job.controller.job.roster.get(message.member_id)
        return f"to rank {member.rank if member else '?'}: {text}"

    def _member(self, rank: str) -> dict[str, Any]:
        return {"member_id": self.job.members[int(rank)], "generation": self.job.generation}

    def _begin(self, ranks: str, *options: str) -> None:
        config: dict[str, Any] = {"on_fault": "restart"} if "restart" in options else {}
        count = int(ranks.removeprefix("ranks="))
        self.job = Job(count, **config)
        self.job.post(AgentHello(node_id=NODE, slots=count, pid=1))
        self.job.hello()
        self.job.open(0, live=True)
        for rank in range(count):
            self._reaches(str(rank), "1")
        self.job.config = self.job.config.__class__(
            run_id="run", world_size=count, verify="compare" in options, **config
        )
        self.job.controller.job.config = self.job.config
        self.phase = self.job.controller.recovery.phase
        # Only the scenario sends the digests of the sources.
        self.job._vouch = lambda: None  # type: ignore[method-assign]

    def _dies(self, rank: str, state: Any, step: str) -> None:
        self.job.exit(int(rank), state, int(step))

    def _exits(self, rank: str) -> None:
        self.job.exit(int(rank), "ready", 0, code=int(Exit.RESTART))

    def _fails(self, rank: str) -> None:
        fail(self.job, int(rank), user_error=True)

    def _differs(self, rank: str) -> None:
        self.job.post(StateRefused(**self._member(rank), step=5, reason="other groups", alone=True))

    def _breaks(self, rank: str) -> None:
        self.job.post(FaultSeen(**self._member(rank), step=5, what="reset"))

    def _settles(self, rank: str, state: Any, step: str, *how: str) -> None:
        self.job.settle(int(rank), state, int(step), away="away" in how)

    def _digests(self, rank: str, step: str, value: str) -> None:
        copies = (CopyDigest("0,1,2", "w", int(value)),)
        self.job.post(StateDigests(**self._member(rank), step=int(step), copies=copies))

    def _writes(self, rank: str) -> None:
        assert self.save is not None and self.save.save is not None
        self.written.add(int(rank))
        report = SaveReported(
            **self._member(rank),
            save_id=self.save.save.save_id,
            sealed=self.written == set(self.save.save.sources),
            size_bytes=10,
            duration_s=0.1,
        )
        self.job.post(report)

    def _offers(self, rank: str, step: str) -> None:
        self.job.post(StateOffered(**self._member(rank), step=int(step), host="h", port=1))

    def _starts(self, rank: str) -> None:
        self.job.post(MemberStarted(member_id=self.job.members[int(rank)], node_id=NODE, pid=200))
        self._connects(rank)

    def _connects(self, rank: str) -> None:
        self.job.post(WorkerHello(**self._member(rank), rank=int(rank), pid=200, state="ready", step=5))

    def _asks(self, rank: str) -> None:
        self.job.post(JoinAsked(**self._member(rank)))

    def _opens(self, rank: str, step: str) -> None:
        self.job.post(SessionOpened(**self._member(rank), step=int(step), root="/ck", live=True))

    def _joins(self, rank: str, step: str) -> None:
        self._opens(rank, step)
        self.job.post(Joined(**self._member(rank), step=int(step)))

    def _reaches(self, rank: str, step: str) -> None:
        self.job.post(StepReached(**self._member(rank), step=int(step)))

    def _tick(self, name: str) -> None:
        self.job.post(Tick(name=name))

    def _exit(self) -> None:
        self.job.post(ExitRun(grace_s=60.0, source="SIGTERM"))

    def _cancel(self) -> None:
        self.job.post(ExitRun(grace_s=0.0, source="SIGTERM", cancel=True))

    def _stop(self) -> None:
        self.job.post(StopRun(reason="test"))

    def _room(self, count: str) -> None:
        self.job.post(AgentHello(node_id=NODE, slots=int(count), pid=1))

    def _successor(self) -> None:
        before = self.job
        self.job = successor(before, world_size=len(before.members))
        living = tuple(
            MemberSeen(m.member_id, before.generation, m.rank, 100, m.state, m.step)
            for m in before.controller.job.roster.living
        )
        self.phase = "idle"
        self.job.post(AgentHello(node_id=NODE, slots=len(before.members), pid=1, members=living))
        self.job.post(AgentBeat(node_id=NODE))


def played(text: str) -> str:
    """Return ``text`` with the output that its input gives."""
    return with_output(text, RecoveryPlayer().play)


@pytest.mark.parametrize("path", sorted(HERE.glob("*.txt")), ids=lambda path: path.stem)
def test_a_recovery_scenario_ends_as_it_is_written(path: Path) -> None:
    text = path.read_text()
    assert played(text) == text


WITHOUT_EFFECT = {
    ("waiting", "order"),  # no process is left
    ("preparing", "to_replacement"),  # only a source gets a ``Settle``, and a replacement is no source
    ("starting", "until"),  # ends only the record of a fault of a script without a session, not a phase
}


def changed(rules: PhaseRules) -> Iterator[tuple[str, PhaseRules]]:
    """Yield mutants of one row: the field, and the row with another value in it."""
    for order in ("", "fence", "settle", "resume", "leave"):
        if order != rules.order:
            yield "order", rules._replace(order=order)
    if rules.to_replacement is not None:
        yield "to_replacement", rules._replace(to_replacement=None)
    if rules.until:
        yield "until", rules._replace(until="")
    if rules.then:
        for then in ("retry", "replace", "restart"):
            if then != rules.then:
                yield "then", rules._replace(then=then)
        yield "compares", rules._replace(compares=not rules.compares)
    if rules.order in ("settle", "resume"):
        yield "in_place", rules._replace(in_place=not rules.in_place)


def fails(text: str) -> bool:
    """Return True if the output of a scenario differs from its text."""
    try:
        return played(text) != text
    except (HoldfastError, AssertionError):
        return True


@pytest.mark.parametrize("phase", list(RULES))
def test_a_rule_of_a_phase_that_is_another_one_changes_a_scenario(
    monkeypatch: pytest.MonkeyPatch, phase: Phase
) -> None:
    texts = [path.read_text() for path in sorted(HERE.glob("*.txt"))]
    survived = []
    for field, mutant in changed(RULES[phase]):
        with monkeypatch.context() as context:
            context.setitem(cast(dict[Phase, PhaseRules], RULES), phase, mutant)
            if (phase, field) not in WITHOUT_EFFECT and not any(fails(text) for text in texts):
                survived.append((field, getattr(mutant, field)))
    assert survived == [], f"no scenario needs this of {phase}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(played(Path(name).read_text()))
