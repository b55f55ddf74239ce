"""The drill itself: a training job runs without faults and with them, and the results are compared bit for bit."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.drill.digest import COMPARED, comparable, digest_of_checkpoint, digest_of_results
from holdfast.drill.failure_excerpt import Excerpt, last_words
from holdfast.drill.fault_spec import FaultSpec, InjectedFault, expand, parse_fault
from holdfast.drill.observer import broken
from holdfast.drill.runner import Outcome, Progress, Runner, failed
from holdfast.drill.timeline import InjectedFaultReport, decisions, fault_reports
from holdfast.errors import UnsupportedError, UsageError, UserError
from holdfast.exit_codes import Exit
from holdfast.runtime.node.run_settings import RunSettings

MODULE = "holdfast.drill.train"
NOT_REPEATED = (
    "two undisturbed runs of the script end with different weights, so this drill proves nothing. Seed its random "
    "numbers (torch.manual_seed, random.seed, numpy.random.seed) before it makes the model, and let it read no file "
    "that an earlier run has written"
)
CHANGED = (
    "the faults have changed the result: undisturbed, the script repeats itself. The log of a new process names the "
    "variables that begin again in it"
)
LAYOUTS = ("ddp", "hsdp", "fsdp", "tp", "pp", "pp-tp")
NPROC_STEP = {"hsdp": 2, "tp": 2, "pp": 2, "pp-tp": 4}
"""For each layout, the number that the number of workers must be a multiple of; 1 for other layouts."""


@dataclass(frozen=True)
class Exercise:
    """The training of a drill.

    ``command`` is the part of the command line after ``holdfast run`` and its flags for directories and workers.
    ``nproc`` is the number of workers. ``results``: the script takes ``--result DIR`` and writes one digest file per
    rank there.
    """

    command: tuple[str, ...]
    nproc: int
    results: bool

    @staticmethod
    def builtin(
        *, nproc: int, size: str, layout: str, steps: int, save_every: int = 0, flags: Sequence[str] = ()
    ) -> Exercise:
        """Return the drill's own training. ``flags`` are flags of ``holdfast run``.

        Raises:
            UserError: ``nproc`` does not fit the layout.
        """
        step = NPROC_STEP.get(layout, 1)
        least = 2 * step if layout == "hsdp" else step
        if nproc % step or nproc < least:
            raise UserError(
                f"--layout {layout} needs {least} workers, {least + step} or {least + 2 * step}, not {nproc}",
                hint=f"--nproc {least}",
            )
        arguments = ["--size", size, "--layout", layout, "--steps", str(steps)]
        if save_every:
            arguments += ["--save-every", str(save_every)]
        return Exercise((*flags, "-m", MODULE, *arguments), nproc, results=True)


def small(layout: str, steps: int, save_every: int, nproc: int, flags: Sequence[str] = ()) -> Exercise:
    """Return a training of the tiny model on at least ``nproc`` workers, enough for two copies of its state.

    The layout ``fsdp`` has no copies. With this layout the memory tier keeps each shard every 5 steps, and keeps all
    later gradients.
    """
    memory = ("--memory-every", "5") if layout == "fsdp" else ()
    nproc = max(nproc, 2 * NPROC_STEP.get(layout, 1))
    return Exercise.builtin(
        nproc=nproc, size="tiny", layout=layout, steps=steps, save_every=save_every, flags=(*memory, *flags)
    )


class DrillVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a drill.

    ``digest`` is of the run without faults, ``digest_disturbed`` of the run with faults. ``missed``
    lists faults that were never injected. ``last_words`` has the last log lines of a run that did not end well.
    """

    identical: bool
    steps_lost: int
    steps_redone: int  # steps computed again to the same bits, after a flipped bit or from the memory tier
    digest: str
    digest_disturbed: str
    steps: int
    seed: int
    code: int
    undisturbed_s: float
    disturbed_s: float
    decisions_forward: int
    decisions_back: int
    faults: list[InjectedFaultReport]
    missed: list[str]
    directory: str
    reason: str = ""
    last_words: list[Excerpt] = []

    @property
    def passed(self) -> bool:
        """True if the results are identical, no step was lost, no part of Holdfast broke, and no fault was missed."""
        right = self.identical and self.steps_lost == 0 and self.code == Exit.OK
        return right and not self.missed and not self.reason


def require_torch() -> None:
    """Refuse to run without torch.

    Raises:
        UnsupportedError: torch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise UnsupportedError(
            "torch is not installed; the drill trains a real model", hint="pip install 'holdfast[torch]'"
        )


class Drill:
    """The runs of one drill, below one directory.

    Args:
        base: the directory, which the drill makes.
        exercise: the training.
        seed: seed of all random choices of faults.
        progress: called with the name of a run, its current step, and the number of faults injected so far.
    """

    def __init__(self, base: Path, exercise: Exercise, seed: int, progress: Progress) -> None:
        self.base = base
        self.exercise = exercise
        self.seed = seed
        self._runner = Runner(base, exercise.nproc, exercise.command, progress)
        self._reference: Outcome | None = None
        self._digest = ""
        self._repeats: bool | None = None

    def undisturbed(self) -> Outcome:
        """Return the outcome of the run without faults; the first call makes the run.

        Raises:
            ScriptError: the run without faults failed, so a drill would prove nothing.
            UsageError: the directory cannot be made.
        """
        if self._reference is None:
            self._make()
            outcome = self._run("undisturbed", ())
            if outcome.code != Exit.OK or outcome.stalled:
                raise failed(outcome.directory, outcome.code)
            self._digest = self._digest_of(outcome)
            self._reference = outcome
        return self._reference

    def _make(self) -> None:
        try:
            self.base.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"cannot make the drill's directory {self.base}: {error.strerror}",
                hint="choose a writable place with --run-dir",
            ) from error

    def plan(self, specs: Sequence[FaultSpec]) -> list[InjectedFault]:
        """Return the faults to inject.

        Without ``--fault`` a random rank is killed at a random moment. A script of the user gets a second kill, after
        the block of a later step: the code that follows there is not a part of the drill's own training.
        """
        steps = self.undisturbed().step
        if not specs:
            step = random.Random(self.seed).randrange(steps // 4, max(steps // 4 + 1, steps * 3 // 4))
            specs = [parse_fault(f"kill:rank=random@step={step}")]
            later = step + max(1, steps // 8)
            if not self.exercise.results and later < steps:
                specs.append(parse_fault(f"kill:rank=random@step={later},phase=ready"))
        return expand(specs, world_size=self.exercise.nproc, steps=steps, seed=self.seed)

    def disturbed(self, name: str, faults: Sequence[InjectedFault]) -> DrillVerdict:
        """Run the training with ``faults``, and return the comparison with the run without faults.

        If the results of a script of the user differ, one more run without faults shows whether they differ anyway.
        """
        reference = self.undisturbed()
        outcome = self._run(name, faults)
        reason = "; ".join(broken(outcome.events))
        if outcome.stalled:
            reason = "nothing moved any more: the run was ended"
        wanted, digest = self._digest, ""
        if outcome.code == Exit.OK:
            wanted, digest = self._digests(reference, outcome)
        if digest not in ("", wanted) and not self.exercise.results:
            reason = reason or (CHANGED if self._repeats_itself() else NOT_REPEATED)
        reports = fault_reports(outcome.injected, outcome.events)
        counts = decisions(outcome.events)
        return DrillVerdict(
            identical=bool(digest) and digest == wanted,
            steps_lost=sum(r.steps_lost for r in reports if not r.redone),
            steps_redone=sum(r.steps_lost for r in reports if r.redone),
            digest=wanted,
            digest_disturbed=digest,
            steps=outcome.step,
            seed=self.seed,
            code=outcome.code,
            undisturbed_s=round(reference.duration_s, 3),
            disturbed_s=round(outcome.duration_s, 3),
            decisions_forward=counts["forward"],
            decisions_back=counts["back"],
            faults=reports,
            missed=[str(fault) for fault in faults[len(reports) :]],
            directory=str(outcome.directory),
            reason=reason,
            last_words=last_words(outcome.directory) if outcome.code != Exit.OK or outcome.stalled else [],
        )

    def _repeats_itself(self) -> bool:
        """Return whether a second run without faults ends with the results of the first; the first call makes it."""
        if self._repeats is None:
            again = self._run("repeated", ())
            self._repeats = again.code == Exit.OK and self._digest_of(again) == self._digest
        return self._repeats

    def _run(self, name: str, faults: Sequence[InjectedFault]) -> Outcome:
        extra = ("--result", str(self._results(name))) if self.exercise.results else ()
        return self._runner.run(name, extra, faults, self.seed)

    def _results(self, name: str) -> Path:
        return (self.base / f"{name}.results").absolute()

    def _digests(self, reference: Outcome, outcome: Outcome) -> tuple[str, str]:
        if not self.exercise.results:
            return self._digest, self._digest_of(outcome)
        compared = comparable(self._results(outcome.directory.name), self.exercise.nproc)
        return self._digest_of(reference, compared), self._digest_of(outcome, compared)

    def _digest_of(self, outcome: Outcome, compared: Sequence[str] = COMPARED) -> str:
        if self.exercise.results:
            return digest_of_results(self._results(outcome.directory.name), self.exercise.nproc, compared)
        if not outcome.root:
            raise UserError(
                "the script has no holdfast.session with a checkpoint directory: there is nothing to compare",
                hint="wrap its model and optimizer in holdfast.session(...), see README.md",
            )
        run = RunSettings.load(outcome.directory).saves_as
        return digest_of_checkpoint(Path(outcome.root), run, outcome.step)
