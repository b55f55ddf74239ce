"""The ladder as data: rungs that each say what they would do in a situation, or why they cannot.

Theory. A rung knows nothing of the others: ``consider`` is a pure function that answers with a verdict, or with one
line why not. The ladder is an order of rungs, and for each cause of a fault the first one that is tried. The first rung
that answers with a verdict is taken; what the ones before it said goes into the log with it. The last resorts are
always there, whatever was configured: a job is never left without an answer.

Invariants:
1. Rungs are tried in order, each at most once; the refusals of those before the chosen one are told.
2. Several faults at once start at the highest of their first rungs.
3. Every ladder holds all last resorts: those that were not named end it, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from holdfast.core.config import Config
from holdfast.core.decide.stop_policy import Answered, LadderVerdict, Situation, stop_for
from holdfast.errors import InternalError, UsageError
from holdfast.text import plural


class Case(msgspec.Struct, frozen=True):
    """What a rung is asked about."""

    situation: Situation
    history: tuple[Answered, ...]
    config: Config

    @property
    def step(self) -> int:
        """Where the job stands."""
        return self.situation.step or 0

    @property
    def savable(self) -> bool:
        """A last-gasp checkpoint of this step can be complete."""
        return self.situation.session and bool(self.step) and not self.situation.uncovered

    @property
    def failures(self) -> tuple[str, ...]:
        """One line of evidence for each failure."""
        return tuple(f"rank {f.rank} at step {f.step}: {f.kind}: {f.what}" for f in self.situation.failures)

    @property
    def not_in_place(self) -> tuple[str, ...]:
        """Why the living cannot simply go on, as evidence."""
        reason = self.situation.unreplaceable
        return (f"not in place: {reason}",) if reason else ()

    def unsavable(self) -> str:
        """Why no last-gasp can be complete."""
        if not self.situation.session or not self.step:
            return "nothing was committed yet"
        return self.situation.uncovered


class Rung(msgspec.Struct, frozen=True):
    """One way to answer a fault."""

    name: ClassVar[str]
    does: ClassVar[str]  # its line in docs/ladder.md

    def consider(self, case: Case) -> LadderVerdict | str:
        """What this rung would do, or why it cannot."""
        raise NotImplementedError


class Grow(Rung, frozen=True):
    """Nodes came back."""

    name = "grow"
    does = "all workers start again with more ranks, from a checkpoint written now, when nodes came back"

    def consider(self, case: Case) -> LadderVerdict | str:
        """Needs room and a complete last-gasp."""
        if not case.situation.room:
            return "there is no room for more ranks"
        if not case.savable:
            return case.unsavable()
        reason = f"{case.situation.room}: all workers start again there"
        return LadderVerdict(
            action="restart_last_gasp",
            reason=reason,
            evidence=case.failures,
            save=True,
            counts=bool(case.situation.causes),
        )


class Retry(Rung, frozen=True):
    """Everybody lives."""

    name = "retry"
    does = "the same step again in the same processes, with fresh connections"

    def consider(self, case: Case) -> LadderVerdict | str:
        """Needs all ranks, alive and sound, and a step that was not retried too often."""
        situation = case.situation
        if not situation.session:
            return "the script has no session"
        if not situation.all_alive:
            return "a rank is lost"
        if not situation.all_sound:
            return situation.unequal or "not every rank stands at the step, or can be brought there"
        retries = sum(1 for a in case.history if a.action == "retry_in_place" and a.step == case.step)
        if retries >= case.config.retries_per_step_max:
            return f"step {case.step} was run again {plural(retries, 'time')} already"
        return LadderVerdict(
            action="retry_in_place",
            reason="every rank is alive and sound: the step is run again",
            evidence=(f"{retries} {'retry' if retries == 1 else 'retries'} of step {situation.step} before",),
        )


def _again(steps: int) -> str:
    return f"{plural(steps, 'step')} {'is' if steps == 1 else 'are'} done again"


class BeginFresh(Rung, frozen=True):
    """Nothing is known, or nothing was done."""

    name = "begin"
    does = "all workers start from nothing: the script has no session, or no step was committed yet"

    def consider(self, case: Case) -> LadderVerdict | str:
        """Only when nothing committed is given up."""
        if not case.situation.session:
            reason = "the script has no session: all workers start again"
        elif not case.step:
            reason = "nothing was committed yet: all workers start again"
        else:
            return f"{plural(case.step, 'step')} {'is' if case.step == 1 else 'are'} committed"
        return LadderVerdict(action="restart_fresh", reason=reason, evidence=case.failures)


class ReplaceWorker(Rung, frozen=True):
    """The usual answer to a death."""

    name = "replace"
    does = (
        "newcomers (a spare, else a fork) take the ranks that are lost, on their own nodes; "
        "the others keep process, weights and compiled code"
    )

    def consider(self, case: Case) -> LadderVerdict | str:
        """Needs a living holder of every box, and the nodes of the lost ranks."""
        if case.situation.lost_nodes:
            return f"{', '.join(case.situation.lost_nodes)} is gone"
        return _replaced(case)


class ReplaceNode(Rung, frozen=True):
    """The same for a lost host."""

    name = "node"
    does = "the same on another node with free slots, for ranks whose node is lost"

    def consider(self, case: Case) -> LadderVerdict | str:
        """Needs free slots elsewhere."""
        if not case.situation.lost_nodes:
            return "no node of a lost rank is gone"
        return _replaced(case)


def _replaced(case: Case) -> LadderVerdict | str:
    situation = case.situation
    if situation.all_alive:
        return "no rank is lost"
    if not case.step:
        return "nothing was committed yet"
    if situation.unreplaceable:
        return situation.unreplaceable
    where = f", on another node than {', '.join(situation.lost_nodes)}" if situation.lost_nodes else ""
    return LadderVerdict(
        action="replace",
        reason=f"every part of the state is on a living rank at step {situation.step}: "
        f"only the lost ranks are replaced{where}",
        evidence=case.failures,
    )


class ReplaceFromMemory(Rung, frozen=True):
    """Boxes with one holder."""

    name = "memory"
    does = (
        "newcomers take what the lost ranks left in shared memory, and make the updates since again from a log; "
        "without one, all go back to it in place"
    )

    def consider(self, case: Case) -> LadderVerdict | str:
        """Needs states in memory (``--memory-every``)."""
        back, step = case.situation.memory_here, case.step
        if case.situation.all_alive:
            return "no rank is lost"
        if case.situation.replayed:
            return LadderVerdict(
                action="replace_from_memory",
                reason=f"the lost ranks have left a state and the gradients since in memory: only they are replaced, "
                f"and make the updates up to step {step} again",
                evidence=(*case.not_in_place, *case.failures),
                memory_step=step,
                replays=True,
            )
        if back < 0:
            return "the lost ranks have left no state in memory that fits those that live"
        what = (
            f"the lost ranks have left their state of step {step} in memory: only they are replaced"
            if back == step
            else f"every rank has a state of step {back} in memory: only the lost ones are replaced, "
            f"all go back from {step}, {_again(step - back)}"
        )
        return LadderVerdict(
            action="replace_from_memory",
            reason=what,
            evidence=(*case.not_in_place, *case.failures),
            memory_step=back,
        )


class Shrink(Rung, frozen=True):
    """Fewer nodes."""

    name = "shrink"
    does = (
        "fewer ranks on the nodes that are left, the same batch per step (`--shrink-to`), "
        "from a checkpoint written now"
    )

    def consider(self, case: Case) -> LadderVerdict | str:
        """Needs --shrink-to, too few nodes for all ranks, and a complete last-gasp."""
        if not case.situation.fewer:
            return "the nodes that are left have room for all ranks, or shrinking is not allowed"
        if not case.savable:
            return case.unsavable()
        return _saved(case, f"{case.situation.fewer}; ")


class RestartAll(Rung, frozen=True):
    """Everybody again, nothing lost."""

    name = "restart"
    does = "the living write one checkpoint of this step, all workers start again from it"

    def consider(self, case: Case) -> LadderVerdict | str:
        """Needs a complete last-gasp."""
        return _saved(case, "") if case.savable else case.unsavable()


def _saved(case: Case, first: str) -> LadderVerdict:
    return LadderVerdict(
        action="restart_last_gasp",
        reason=f"{first}every part of the state is on a living rank at step {case.situation.step}: no step is lost",
        evidence=(*case.not_in_place, *case.failures),
        save=True,
    )


class Requeue(Rung, frozen=True):
    """Let the scheduler start it again. Never taken unless it is asked for."""

    name = "requeue"
    does = "the living write one checkpoint of this step, the run ends with 75 for the scheduler; never by itself"

    def consider(self, case: Case) -> LadderVerdict | str:
        """Needs a complete last-gasp, or a checkpoint."""
        if not case.savable and not case.situation.checkpoint_known:
            return f"{case.unsavable()}, and no checkpoint was saved"
        what = f"step {case.step} is saved" if case.savable else f"no last-gasp: {case.unsavable()}"
        return LadderVerdict(
            action="requeue",
            reason=f"{what}, the scheduler starts the job again",
            evidence=case.failures,
            save=case.savable,
        )


class RestartFromMemory(Rung, frozen=True):
    """What the tier kept, when holders are gone."""

    name = "memory-restart"
    does = "all workers start again from states of one step in shared memory"

    def consider(self, case: Case) -> LadderVerdict | str:
        """Needs a state of one step in memory of every rank."""
        situation = case.situation
        if situation.memory_step < 0:
            return "not every rank has a state of one step in memory"
        return LadderVerdict(
            action="restart_from_memory",
            reason=f"every rank has a state of step {situation.memory_step} in memory: "
            + _again(case.step - situation.memory_step),
            evidence=(*case.not_in_place, situation.uncovered, *case.failures),
            memory_step=situation.memory_step,
        )


class Disk(Rung, frozen=True):
    """The newest sealed checkpoint."""

    name = "disk"
    does = (
        "all workers start again from the newest valid checkpoint; the steps since are done again and counted"
    )

    def consider(self, case: Case) -> LadderVerdict | str:
        """Needs a sealed checkpoint, or one that is being written."""
        if not case.situation.checkpoint_known:
            return "no checkpoint was saved"
        return LadderVerdict(
            action="restart_checkpoint",
            reason=f"no last-gasp of step {case.step}: {case.situation.uncovered}",
            evidence=case.failures,
        )


class RecomputeFromStart(Rung, frozen=True):
    """Nothing is left, or nothing can be trusted, and nothing was saved: as a person would start the command again."""

    name = "recompute"
    does = "all workers compute again from the start: no state is left, or its copies differ, and nothing was saved"

    def consider(self, case: Case) -> LadderVerdict | str:
        """Only when the state of the living is not whole, or not trusted."""
        situation = case.situation
        if case.savable or situation.checkpoint_known:
            return f"step {case.step} is not lost, or another one was saved"
        return LadderVerdict(
            action="restart_fresh",
            reason=f"step {case.step} is lost: {case.unsavable()}, and nothing was saved since the start: "
            "all of it is computed again",
            evidence=case.failures,
        )


RUNGS: tuple[Rung, ...] = (
    Grow(),
    Retry(),
    BeginFresh(),
    ReplaceWorker(),
    ReplaceNode(),
    ReplaceFromMemory(),
    Shrink(),
    RestartAll(),
    Requeue(),
    RestartFromMemory(),
    Disk(),
    RecomputeFromStart(),
)
BY_NAME = {rung.name: rung for rung in RUNGS}
AUTO = tuple(rung.name for rung in RUNGS if rung.name != "requeue")
LAST_RESORTS = ("restart", "memory-restart", "disk", "recompute")
"""They follow whatever was configured."""

SPELLINGS = {"auto": "", "process": "", "pod": "restart", "job": "requeue"}
"""Words that others use: the lowest unit that is started again. Empty: the whole ladder."""

CAUSES = ("crash", "device", "hang", "node", "network", "corruption", "other")
"""What ``cause:rung`` may name: see ``survey.CAUSE_OF``."""


class Ladder(msgspec.Struct, frozen=True):
    """``order`` of rung names; ``first`` by cause: the rung at which the ladder begins then."""

    order: tuple[str, ...] = AUTO
    first: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def parse(spec: str) -> Ladder:
        """Read ``--on-fault``: a word, a list of rungs in the order in which they are tried, ``cause:rung``, or all.

        Raises:
            UsageError: a word that is no rung and no cause.
        """
        named: list[str] = []
        first: list[tuple[str, str]] = []
        for part in filter(None, (piece.strip() for piece in spec.split(","))):
            cause, colon, rung = part.rpartition(":")
            rung = SPELLINGS.get(rung, rung)
            if rung and rung not in BY_NAME:
                raise UsageError(f"--on-fault {part}: no such answer to a fault", hint=f"one of: {_words()}")
            if colon and cause not in CAUSES:
                raise UsageError(f"--on-fault {part}: no such cause", hint=f"one of: {', '.join(CAUSES)}")
            if colon:
                first.append((cause, rung))
            elif rung:
                named.append(rung)
        if named == ["restart"]:  # what everybody survived is a retry all the same
            named = ["retry", "restart"]
        return Ladder(_completed(named) if named else AUTO, tuple(first))

    def rungs(self, causes: Sequence[str]) -> tuple[Rung, ...]:
        """What is tried for a fault of these causes, in order."""
        order, first = self.order, dict(self.first)
        starts = [first[cause] for cause in causes if first.get(cause)]
        if starts:
            whole = [rung.name for rung in RUNGS]
            begin = max(starts, key=whole.index)
            above = [name for name in order if whole.index(name) > whole.index(begin)]
            order = _completed([begin, *above])
        return tuple(BY_NAME[name] for name in order)

    def tries(self, *names: str) -> bool:
        """One of these rungs may be taken."""
        return any(name in self.order for name in names)


def _completed(named: Sequence[str]) -> tuple[str, ...]:
    """With the rungs that are always there: growing first, a fresh begin where nothing can be lost, last resorts."""
    rest = [name for name in named if name not in ("grow", "begin")]
    place = rest.index("retry") + 1 if "retry" in rest else 0
    return tuple(dict.fromkeys(("grow", *rest[:place], "begin", *rest[place:], *LAST_RESORTS)))


def _words() -> str:
    return ", ".join((*SPELLINGS, *BY_NAME))


def judge(now: float, situation: Situation, history: Sequence[Answered], config: Config) -> LadderVerdict:
    """Pick the rung. ``now`` in seconds, on the clock of ``Answered.at_s``."""
    case = Case(situation, tuple(history), config)
    if situation.left:  # a newcomer would train alone: the others do not begin another step
        reason = f"the ranks have agreed to leave at step {case.step}, and it is saved"
        return LadderVerdict(action="requeue", reason=reason, evidence=case.failures)
    stop = stop_for(now, situation, history, config)
    answers = not situation.again and (situation.causes or not situation.room)
    if stop is not None and answers:  # a node that comes is no fault, another attempt to save no other one
        progress = case.savable and case.step > situation.base_step
        return msgspec.structs.replace(stop, save=progress)
    refused: list[str] = []
    for rung in Ladder.parse(config.on_fault).rungs(situation.causes):
        answer = rung.consider(case)
        if isinstance(answer, LadderVerdict):
            return msgspec.structs.replace(answer, rung=rung.name, refused=tuple(refused))
        refused.append(f"{rung.name}: {answer}")
    raise InternalError(f"no rung answers step {case.step}: {'; '.join(refused)}")
