"""The ladder: the ordered list of answers to a fault. Each answer is a rung.

Theory. A rung knows nothing of the other rungs. ``consider`` is a pure function that returns a verdict, or one line
with the reason for a refusal. The ladder is an order of rungs. For some causes of a fault it also has the first rung to
try. The first rung that returns a verdict is taken. The refusals of the rungs before it are logged with the verdict.
Every ladder includes the last resorts (restarts of all ranks), for any configuration, so each fault has an answer.

Invariants:
1. Rungs are tried in order, each at most once. The refusals before the chosen rung are reported.
2. Faults with different causes may occur at once, each cause with its first rung. Of these rungs, the one that is last
   in the ladder is tried first.
3. Every ladder has all last resorts. Last resorts that the configuration does not name are at the end of the ladder.
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
    """The input of a rung: the situation, the history of the run and the settings."""

    situation: Situation
    history: tuple[Answered, ...]
    config: Config

    @property
    def step(self) -> int:
        """The step at which the job continues; 0 if no session has reported a step."""
        return self.situation.step or 0

    @property
    def savable(self) -> bool:
        """True if a last-gasp checkpoint of the present step of the job can be complete."""
        return self.situation.session and bool(self.step) and not self.situation.uncovered

    @property
    def failures(self) -> tuple[str, ...]:
        """One line of evidence for each failure in the situation."""
        return tuple(failure.line for failure in self.situation.failures)

    @property
    def not_in_place(self) -> tuple[str, ...]:
        """One line with the reason why lost ranks cannot be replaced while all others keep their processes.

        The result is empty if the lost ranks can be replaced in this way.
        """
        reason = self.situation.unreplaceable
        return (f"not in place: {reason}",) if reason else ()

    def unsavable(self) -> str:
        """Return why a last-gasp checkpoint cannot be complete; empty if it can be."""
        if not self.situation.session or not self.step:
            return "nothing was committed yet"
        return self.situation.uncovered


class Rung(msgspec.Struct, frozen=True):
    """One way to answer a fault, for example to replace the lost ranks."""

    name: ClassVar[str]
    does: ClassVar[str]  # the line of this rung in docs/ladder.md

    def consider(self, case: Case) -> LadderVerdict | str:
        """Return the verdict of this rung, or one line with the reason why the rung cannot be used."""
        raise NotImplementedError


class Grow(Rung, frozen=True):
    """The rung that restarts the job with more ranks when nodes have come back."""

    name = "grow"
    does = "all workers start again with more ranks, from a checkpoint written now, when nodes came back"

    def consider(self, case: Case) -> LadderVerdict | str:
        """Return a verdict if nodes have room for more ranks and a last-gasp checkpoint can be complete."""
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
    """The rung that runs the step again in the same processes. It is possible if all ranks live."""

    name = "retry"
    does = "the same step again in the same processes, with fresh connections"

    def consider(self, case: Case) -> LadderVerdict | str:
        """Return a verdict if all ranks live and are at the step of the job, and the step was not retried too often."""
        situation = case.situation
        if not situation.session:
            return "the script has no session"
        if situation.minority:
            return "a minority of the nodes only saves"
        if not situation.all_alive:
            return "a rank is lost"
        if situation.apart:
            return situation.apart
        if not situation.all_sound:
            return situation.unequal or "a rank is not at the step, and cannot be brought there"
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
    """The rung that starts the training from nothing: no step was committed yet, or the script has no session."""

    name = "begin"
    does = "all workers start from nothing: the script has no session, or no step was committed yet"

    def consider(self, case: Case) -> LadderVerdict | str:
        """Return a verdict if no committed step would be lost, or the script has no session."""
        if not case.situation.session:
            reason = "the script has no session: all workers start again"
        elif not case.step:
            reason = "nothing was committed yet: all workers start again"
        else:
            return f"{plural(case.step, 'step')} {'is' if case.step == 1 else 'are'} committed"
        return LadderVerdict(action="restart_fresh", reason=reason, evidence=case.failures)


class ReplaceWorker(Rung, frozen=True):
    """The rung that replaces lost ranks while their nodes are still in the job: the usual answer to a death."""

    name = "replace"
    does = (
        "newcomers (a spare, else a fork) take the ranks that are lost, on their own nodes; "
        "the others keep process, weights and compiled code"
    )

    def consider(self, case: Case) -> LadderVerdict | str:
        """Return a verdict if every box has a living holder and the nodes of all lost ranks are still in the job."""
        if case.situation.lost_nodes:
            return f"{', '.join(case.situation.lost_nodes)} is gone"
        return _replaced(case)


class ReplaceNode(Rung, frozen=True):
    """The rung that replaces the ranks of a lost node on other nodes."""

    name = "node"
    does = "the same on another node with free slots, for ranks whose node is lost"

    def consider(self, case: Case) -> LadderVerdict | str:
        """Return a verdict if a node of lost ranks is gone and other nodes have free slots."""
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
    """The rung that replaces lost ranks and takes boxes whose only holder is lost from the memory tier."""

    name = "memory"
    does = (
        "newcomers take what the lost ranks left in shared memory, and make the updates since again from a log; "
        "without one, all go back to it in place"
    )

    def consider(self, case: Case) -> LadderVerdict | str:
        """Return a verdict if states in memory (``--memory-every``) allow the replacement of the lost ranks."""
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
    """The rung that restarts the job with fewer ranks on fewer nodes."""

    name = "shrink"
    does = (
        "fewer ranks on the nodes that are left, the same batch per step (`--shrink-to`), "
        "from a checkpoint written now"
    )

    def consider(self, case: Case) -> LadderVerdict | str:
        """Return a verdict if --shrink-to allows it, nodes are missing, and a last-gasp checkpoint can be complete."""
        if not case.situation.fewer:
            return "the nodes that are left have room for all ranks, or shrinking is not allowed"
        if not case.savable:
            return case.unsavable()
        return _saved(case, f"{case.situation.fewer}; ")


class RestartAll(Rung, frozen=True):
    """The rung that restarts all ranks from a checkpoint of the present step, so that no step is lost."""

    name = "restart"
    does = "the survivors write one checkpoint of this step, all workers start again from it"

    def consider(self, case: Case) -> LadderVerdict | str:
        """Return a verdict if a last-gasp checkpoint can be complete."""
        return _saved(case, "") if case.savable else case.unsavable()


def _saved(case: Case, first: str) -> LadderVerdict:
    return LadderVerdict(
        action="restart_last_gasp",
        reason=f"{first}every part of the state is on a living rank at step {case.situation.step}: no step is lost",
        evidence=(*case.not_in_place, *case.failures),
        save=True,
    )


class Requeue(Rung, frozen=True):
    """The rung that ends the run so that the scheduler starts the job again. It is taken only when it is configured."""

    name = "requeue"
    does = (
        "the survivors write one checkpoint of this step, the run ends with 75 for the scheduler; "
        "only if `--on-fault` names it"
    )

    def consider(self, case: Case) -> LadderVerdict | str:
        """Return a verdict if a last-gasp checkpoint can be complete, or an older checkpoint exists."""
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
    """The rung that restarts all ranks from the memory tier, because no living rank holds a part of the state."""

    name = "memory-restart"
    does = "all workers start again from states of one step in shared memory"

    def consider(self, case: Case) -> LadderVerdict | str:
        """Return a verdict if every rank has a state of one common step in memory."""
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
    """The rung that restarts all ranks from the newest sealed checkpoint."""

    name = "disk"
    does = (
        "all workers start again from the newest valid checkpoint; the steps since are done again and counted"
    )

    def consider(self, case: Case) -> LadderVerdict | str:
        """Return a verdict if a sealed checkpoint exists, or a checkpoint is being written."""
        if not case.situation.checkpoint_known:
            return "no checkpoint was saved"
        return LadderVerdict(
            action="restart_checkpoint",
            reason=f"no last-gasp of step {case.step}: {case.situation.uncovered}",
            evidence=case.failures,
        )


class RecomputeFromStart(Rung, frozen=True):
    """The rung that computes all of the training again: the state is lost or not trusted, and nothing is saved."""

    name = "recompute"
    does = "all workers compute again from the start: no state is left, or its copies differ, and nothing was saved"

    def consider(self, case: Case) -> LadderVerdict | str:
        """Return a verdict if no state can be saved now and no checkpoint exists."""
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
"""Rungs that end every ladder, for any configuration."""

SPELLINGS = {"auto": "", "process": "", "pod": "restart", "job": "requeue"}
"""Values of ``--on-fault`` that name the smallest unit to start again, as in other programs, and the rung of each.

Empty: the whole ladder.
"""

CAUSES = ("crash", "device", "hang", "node", "network", "corruption", "other")
"""Causes that ``cause:rung`` in ``--on-fault`` may name, see ``CAUSE_OF`` in ``core/job/situation.py``."""


class Ladder(msgspec.Struct, frozen=True):
    """The configured ladder: the order of its rungs, and the first rung to try for some causes.

    Attributes:
        order: names of the rungs, in the order of trial.
        first: pairs (cause, name of the rung at which the ladder starts for that cause).
    """

    order: tuple[str, ...] = AUTO
    first: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def parse(spec: str) -> Ladder:
        """Return the ladder for a value of ``--on-fault``.

        The value is a comma-separated list. An item is one of three: the name of a rung, in the order of trial; a
        word that other programs use (``auto``, ``process``, ``pod``, ``job``); or ``cause:rung``, the rung at which
        the ladder starts for that cause.

        Raises:
            UsageError: an item names no rung, or no cause.
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
        if named == ["restart"]:  # a fault that all ranks survived is still retried first
            named = ["retry", "restart"]
        return Ladder(_completed(named) if named else AUTO, tuple(first))

    def rungs(self, causes: Sequence[str]) -> tuple[Rung, ...]:
        """Return the rungs to try, in order, for a fault with these causes."""
        order, first = self.order, dict(self.first)
        starts = [first[cause] for cause in causes if first.get(cause)]
        if starts:
            whole = [rung.name for rung in RUNGS]
            begin = max(starts, key=whole.index)
            above = [name for name in order if whole.index(name) > whole.index(begin)]
            order = _completed([begin, *above])
        return tuple(BY_NAME[name] for name in order)

    def tries(self, *names: str) -> bool:
        """Return True if the ladder includes at least one of the rungs ``names``."""
        return any(name in self.order for name in names)


def _completed(named: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the rungs of a ladder: ``named``, and the rungs that every ladder has.

    Those are ``grow`` (more ranks), ``begin`` (from nothing) and ``LAST_RESORTS`` (restarts of all ranks).
    """
    rest = [name for name in named if name not in ("grow", "begin")]
    place = rest.index("retry") + 1 if "retry" in rest else 0
    return tuple(dict.fromkeys(("grow", *rest[:place], "begin", *rest[place:], *LAST_RESORTS)))


def _words() -> str:
    return ", ".join((*SPELLINGS, *BY_NAME))


def judge(now: float, situation: Situation, history: Sequence[Answered], config: Config) -> LadderVerdict:
    """Choose the rung that answers the fault. ``now`` is in seconds, on the clock of the times in ``history``.

    Returns:
        The verdict, with the refusals of the rungs before the chosen one.
    """
    case = Case(situation, tuple(history), config)
    if situation.left:  # a newcomer would train alone: the other ranks begin no further step
        reason = f"the ranks have agreed to leave at step {case.step}, and it is saved"
        return LadderVerdict(action="requeue", reason=reason, evidence=case.failures)
    stop = stop_for(now, situation, history, config)
    answers = not (situation.again or situation.planned) and (situation.causes or not situation.room)
    # A node that joins or leaves is no fault, and another attempt to save is no second fault.
    if stop is not None and answers:
        progress = case.savable and case.step > situation.base_step
        return msgspec.structs.replace(stop, save=progress)
    if situation.exits and case.savable and (situation.minority or not situation.all_alive):
        # A replacement may need longer than the time until the deadline, only to leave then.
        reason = f"{situation.exits}: the living save step {case.step}, and no lost rank is replaced"
        return LadderVerdict(
            action="requeue", reason=reason, evidence=case.failures, save=True, rung="requeue"
        )
    refused: list[str] = []
    for rung in Ladder.parse(config.on_fault).rungs(situation.causes):
        answer = rung.consider(case)
        if isinstance(answer, LadderVerdict):
            return msgspec.structs.replace(answer, rung=rung.name, refused=tuple(refused))
        refused.append(f"{rung.name}: {answer}")
    raise InternalError(f"no rung answers step {case.step}: {'; '.join(refused)}")
