"""The proof of a block: run again on the same state, batch and random numbers, it must compute the same bits.

Theory. A fault, a resume and a rehearsal run a block again, so exact results need a block that repeats. State that a
script carries from one block to the next in a variable (a batch that is drawn ahead, a counter, a generator) breaks
this, and an undisturbed run does not show it. So the first block of each process, and one in ``every`` steps, runs for
a check before it runs for the job. With peers it runs twice for the check. In a job of one process it runs once, and is
compared with the run that counts. A run for the check is alone: its collectives complete on own data, so that no rank
needs to know whether another rank checks. It ends where the block would vote. The outputs of both runs (gradients,
buffers, declared state) are compared by digests. If they differ, the block runs twice more with deterministic
algorithms. Then kernels that add in any order agree. An impure block still differs, and is refused before it has made
an update.

Invariants:
1. A run for the check changes nothing: its effects are undone like those of an aborted step.
2. As long as the runs agree, their number depends on the step and the number of ranks alone. The ranks therefore meet
   at the same step in collectives outside of the block.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import ImpureBlockError
from holdfast.frameworks.common.optional_abilities import ProvesBlocks
from holdfast.runtime.worker.script_frames import frame_of_script
from holdfast.session.steps.undeclared_state import UndeclaredState

if TYPE_CHECKING:
    from holdfast.session.steps.step import Step

log = logging.getLogger("holdfast")

RUNS = 2
_TOLD_MAX = 3  # variables in an error
_PLAIN = (bool, int, float, str)
_CLOCK_MIN = 1_000_000_000  # a whole number from here on is a time
_HINT = (
    "draw the batch in the block that uses it, or by s.steps(loader); what else a block changes and uses later goes "
    "into session(state={...}) or s.own; session(verify_block=0) leaves out this check"
)
_BEHIND = (
    "write `if step.committed:` around the code after the block that is only for a step that counts; "
    "session(verify_block=0) leaves out this check"
)


class Proof(NamedTuple):
    """The digests of one run of a block. Each key names in words the data of its digest.

    Attributes:
        found: digests of the state at the start of the run.
        computed: digests of the results when the run reached its vote.
    """

    found: Mapping[str, int]
    computed: Mapping[str, int]


class Prover:
    """The checker of the blocks of one session.

    Args:
        adapter: the framework. If it cannot digest the results of a block, nothing is checked.
        every: steps between two checks; 0: none.
        world_size: ranks of the job.
    """

    def __init__(self, adapter: object, every: int, world_size: int) -> None:
        self._adapter = adapter if every and isinstance(adapter, ProvesBlocks) else None
        self._undeclared = UndeclaredState(adapter, on=every > 0)
        self._every = every
        self._alone = world_size == 1
        self._first = True  # no block of this process has been checked yet
        self._step = -1
        self._checked = -1
        self._found: Mapping[str, int] = {}  # digests at the begin of the current run
        self._proofs: list[Proof | None] = []  # None: the run broke off
        self._variables: dict[int, _Variables] = {}  # by the number of runs before
        self._told: set[str] = set()  # variables that count runs

    def begin(self, step: Step, *, joining: bool) -> None:
        """Take digests of the state at the begin of each run of the block of ``step``, if a check is due.

        Raises:
            UsageError: see :class:`UndeclaredState`.
        """
        if not joining:  # the peers wait for this process
            self._undeclared.look(step.number)
        if step.scrap:
            self._first = False  # a spare that rehearses the block
        adapter = self._due(step)
        if adapter is not None:
            self._found = adapter.found()
            self._variables[len(self._proofs)] = _variables()

    def alone(self, step: Step) -> bool:
        """Return whether the run of the block of ``step`` that begins is for the check. If so, shut out the peers."""
        adapter = self._due(step)
        if adapter is None or (self._alone and len(self._proofs) == RUNS - 1):
            return False
        suspected = len(self._proofs) >= RUNS
        return adapter.go_alone(first=self._first, suspected=suspected)

    def note(self, step: Step) -> None:
        """Take digests of the results of a run for the check, at the point where the block would vote.

        Raises:
            ImpureBlockError: the runs of this block differ.
        """
        adapter = self._due(step)
        if adapter is None:
            return
        computed = adapter.computed()
        if not computed:
            self._checked = step.number  # the block skips this batch: check the next step that computes
        else:
            self._add(step, adapter, Proof(self._found, computed))

    def confirms(self, step: Step) -> bool:
        """Return whether the run for the job agrees with the run before it; otherwise it must not vote."""
        adapter = self._due(step)
        if adapter is None or len(self._proofs) != RUNS - 1:
            return True
        self._add(step, adapter, Proof(self._found, adapter.computed()))
        return self._checked == step.number

    def excuses(self, step: Step, error: BaseException) -> bool:
        """Return whether ``error`` may come from the missing data of peers. The run then proves nothing."""
        adapter = self._due(step)
        if adapter is None or self._alone or not isinstance(error, Exception | SystemExit):
            return False
        if isinstance(error, ImpureBlockError) or len(self._proofs) >= RUNS:
            return False
        if not (self._first or adapter.partial):
            return False  # the error does not come from missing peers
        log.debug("holdfast: step %d cannot be checked without peers: %s", step.number, error)
        self._add(step, adapter, None)
        return True

    def _due(self, step: Step) -> ProvesBlocks | None:
        if self._adapter is None or step.scrap or step.parts > 1 or self._checked == step.number:
            return None
        if self._step != step.number:
            self._step, self._proofs, self._variables = step.number, [], {}
        if not step.repeats:
            return None
        due = self._first or step.number % self._every == self._every - 1
        return self._adapter if due else None

    def _add(self, step: Step, adapter: ProvesBlocks, proof: Proof | None) -> None:
        self._proofs.append(proof)
        done = [proof for proof in self._proofs if proof is not None]
        if len(self._proofs) == RUNS and (len(done) < RUNS or done[0] == done[1]):
            self._tell_counters(step)
            self._passed(step)
        elif len(self._proofs) == 2 * RUNS:
            self._judge(step, adapter, done)

    def _passed(self, step: Step) -> None:
        self._checked, self._first = step.number, False

    def _tell_counters(self, step: Step) -> None:
        """Warn of variables that the first run has counted up. Code after the update that uses them is not compared."""
        counters = [
            name
            for name in _counted_up(self._variables[0], self._variables[1], step.number)
            if name not in self._told
        ]
        if counters:
            self._told.update(counters)
            log.warning(
                "holdfast: step %d: not a count of steps: %s. A block runs again after a fault and for its check, and "
                "a process that joins or resumes counts from the start: use step.number, or count "
                "`if step.committed:` in session(state={...})",
                step.number,
                ", ".join(counters[:_TOLD_MAX]),
            )

    def _judge(self, step: Step, adapter: ProvesBlocks, proofs: list[Proof]) -> None:
        """Raise or warn after four runs: the first two differ, the last two used deterministic algorithms."""
        first, second, third, fourth = proofs
        self._passed(step)
        cause = adapter.cause()
        # If only the first run differs, it used a value from before the check, and each later run used a value that the
        # run before it had made (a batch that is drawn ahead).
        settled = third == second or bool(cause)
        if third == fourth and first.found == second.found and not settled:
            log.warning(
                "holdfast: step %d: two runs of the block on the same batch differ (%s), and agree with deterministic "
                "algorithms: kernels add in any order here, and no run is repeatable bit for bit; "
                "torch.use_deterministic_algorithms(True) makes it so",
                step.number,
                _difference(first.computed, second.computed),
            )
            self._adapter = None
            return
        behind = _difference(third.found, fourth.found) or _difference(first.found, second.found)
        if behind:
            raise ImpureBlockError(
                f"step {step.number}: the block finds another state when it runs again: {behind} changed after a "
                "block that did not count",
                hint=_BEHIND,
            )
        what = _difference(third.computed, fourth.computed) or _difference(first.computed, second.computed)
        cause = (
            cause
            or _changed(self._variables[RUNS], self._variables[RUNS + 1])
            or "it uses what the run before has changed"
        )
        raise ImpureBlockError(
            f"step {step.number}: run again on the same batch, the block computes something else: {cause} "
            f"({what} differ)",
            hint=_HINT,
        )


def _difference(one: Mapping[str, int], other: Mapping[str, int]) -> str:
    """Return the first name whose digests differ, and how many more differ; empty: none."""
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    if not names:
        return ""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


class _Variables(NamedTuple):
    """Variables of the script where its block begins.

    Attributes:
        plain: values by name, with attributes of ``self``.
        inner: attributes of the other objects, by name: the position of a loader of the script.
        drawing: names of iterators and random generators.
    """

    plain: Mapping[str, object]
    inner: Mapping[str, object]
    drawing: Sequence[str]


def _variables() -> _Variables:
    frame = frame_of_script()
    variables = {**frame.f_globals, **frame.f_locals}
    own = _attributes(variables.get("self"))
    plain: dict[str, object] = {}
    inner: dict[str, object] = {}
    drawing: list[str] = []
    for name, value in {**variables, **{f"self.{name}": value for name, value in own.items()}}.items():
        if isinstance(value, _PLAIN) and not name.startswith("__"):
            plain[name] = value
        elif isinstance(value, Iterator | random.Random) or hasattr(value, "bit_generator"):
            drawing.append(name)
        elif name != "self" and not _is_ours(value):
            attributes = _attributes(value)
            inner.update(
                (f"{name}.{key}", item) for key, item in attributes.items() if isinstance(item, _PLAIN)
            )
    return _Variables(plain, inner, drawing)


def _attributes(value: object) -> Mapping[str, object]:
    """Return the attributes of an object that is no class and no module."""
    return {} if isinstance(value, type | ModuleType) else getattr(value, "__dict__", {})


def _is_ours(value: object) -> bool:
    return type(value).__module__.startswith("holdfast.")


def _counted_up(before: _Variables, after: _Variables, step: int) -> list[str]:
    """Return the names of the whole numbers that have grown between two runs of the block of ``step``.

    A number that has grown to the number of the step was set from it; at step 0 that may be a count of runs.
    """
    return [
        name
        for name, value in after.plain.items()
        if type(value) is int and type(then := before.plain.get(name)) is int and then < value < _CLOCK_MIN
        if value not in (step, step + 1) or step == 0 >= then == value - 1
    ]


def _changed(before: _Variables, after: _Variables) -> str:
    """Return a text with the variables that have changed and the iterators that were drawn from; empty: none."""
    then, now = {**before.plain, **before.inner}, {**after.plain, **after.inner}
    names = [name for name, value in now.items() if then.get(name, value) != value]
    names.sort(key=lambda name: isinstance(now[name], float))  # last, as they are mostly times
    told = [f"{name} (was {then[name]}, then {now[name]})" for name in names[:_TOLD_MAX]]
    told += [f"{name} (drawn from)" for name in after.drawing[:_TOLD_MAX]]
    return f"it may use what the run before has changed: {', '.join(told)}" if told else ""
