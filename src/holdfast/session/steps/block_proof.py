"""The proof of a block: a second run on the same state, batch and random numbers must compute the same bits.

Theory. A fault, a resume and a rehearsal run a block again, so exact results need a block that repeats its results. A
script breaks this if it carries state from one block to the next in a variable (a batch that is drawn ahead, a counter,
a generator). A run without faults does not show the error. So the first block of each process, and one in ``every``
steps, is checked. A *check run* is a run of the block that has no effect. It ends where the block would vote. Its
collectives complete on local data, so that no rank needs to know whether another rank checks. In a job of several
ranks, two check runs are compared, and then the block runs for the job. In a job of one process, one check run is
compared with the run for the job. The results (gradients, buffers, declared state) are compared by digests. If they
differ, two more check runs use deterministic algorithms. Kernels that add in any order then give equal results. An
impure block still gives different results, and is refused before it has made an update.

The script's variables on which the updates depend are also compared. A difference between them may change the results
only at a later step (an array of past losses).

The collectives that the script itself makes also count as results. In a check run they return local data. A script
that keeps such a value for later blocks would compute with wrong data. If each block makes the collective, and only the
first one keeps its result, the runs agree. Such variables are found in the source (``set_once.py``).

Invariants:
1. A check run changes nothing: its effects are undone like those of an aborted step.
2. If the results agree, the number of check runs depends only on the step and the number of ranks. The ranks therefore
   make the collectives outside of the block at the same step.
"""

from __future__ import annotations

import logging
import random
import traceback
import zlib
from collections.abc import Container, Iterator, Mapping, Sequence
from types import FrameType, GeneratorType, ModuleType
from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import HoldfastError, ImpureBlockError
from holdfast.frameworks.common.optional_abilities import TRAINED, ProvesBlocks
from holdfast.runtime.worker.script_attributes import has_static
from holdfast.runtime.worker.script_frames import (
    LIBRARIES,
    OURS,
    as_written,
    frame_of_script,
    place_of,
    position_of,
)
from holdfast.session.steps.undeclared_state import UndeclaredState
from holdfast.session.variables.unassigned_variables import NotAssigned
from holdfast.session.variables.update_variables import UpdateVariables

if TYPE_CHECKING:
    from holdfast.session.steps.step import Step

log = logging.getLogger("holdfast")

RUNS = 2
_TOLD_MAX = 3  # variables in an error
_PLAIN = (bool, int, float, str)
_CLOCK_MIN = 1_000_000_000  # a whole number from here on is a time
_STATE = (
    "what a block changes and uses later goes into session(state={...}) or s.own, from a module into a buffer "
    "(register_buffer)"
)
_BATCH = "draw the batch in the block that uses it, or by s.steps(loader) or s.steps(loader, second)"
_LEFT = (
    "a fault and a resume run a block again: reset at the start of the block what it leaves behind (sums of gradients, "
    "handles, lists), and not after optimizer.step()"
)
_BEHIND = (
    "write `if step.committed:` around the code after the block that is only for a step that counts; "
    "session(verify_block=0) leaves out this check"
)


class Proof(NamedTuple):
    """The digests of one run of a block. Each key describes in words the data that its digest covers.

    Attributes:
        found: digests of the state at the start of the run.
        computed: digests of the results at the point where the block votes, and before each update ahead of the vote.
        deciding: digests of the script's variables on which the updates depend, by name.
    """

    found: Mapping[str, int]
    computed: Mapping[str, int]
    deciding: Mapping[str, int]


class Prover:
    """The checker of the blocks of one session.

    Args:
        adapter: the framework. If it cannot digest the results of a block, nothing is checked.
        every: steps between two checks; 0 means no checks.
        world_size: ranks of the job.
        deciding: the check of the script's variables on which the updates depend.
    """

    def __init__(self, adapter: object, every: int, world_size: int, deciding: UpdateVariables) -> None:
        self._adapter = adapter if every and isinstance(adapter, ProvesBlocks) else None
        self._undeclared = UndeclaredState(adapter, on=every > 0)
        self._every = every
        self._deciding = deciding
        self._alone = world_size == 1
        self._first = True  # no block of this process has been checked yet
        self._step = -1
        self._checked = -1
        self._found: Mapping[str, int] = {}  # digests at the start of the current run
        self._within: dict[
            str, int
        ] = {}  # digests before each update that the current run makes ahead of its vote
        self._proofs: list[Proof | None] = []  # None: the run broke off
        self._variables: dict[int, _Variables] = {}  # at the start of each run, by its index
        # Counts of the script that have grown in a check: its step, and their values at the start of its second run.
        self._grown: tuple[int, Mapping[str, int | str]] = (-1, {})
        self._told: set[str] = set()  # variables that count runs, and classes that cannot be copied
        # The exception of a second run after a first one without: its step and class.
        self._second: tuple[int, type[BaseException]] | None = None

    def begin(self, step: Step, *, joining: bool) -> None:
        """Take digests of the state before a run of the block of ``step``, if a check is due.

        Args:
            joining: this process is a newcomer that has not joined. Its search for undeclared state comes later,
                because the other ranks wait for this process.

        Raises:
            UsageError: the script changes state that the session does not have (:class:`UndeclaredState`).
        """
        if not joining:  # the peers wait for this process
            self._undeclared.look(step.number)
        self._tell_counters()
        if step.scrap:
            self._first = False  # a spare that rehearses the block
        self._within = {}
        adapter = self._due(step)
        if adapter is not None:
            self._found = adapter.found()
            # A flag that a new process begins with may let the block set weights.
            if self._first and step.number:
                self._found = {**self._found, **adapter.trained()}
            self._variables[len(self._proofs)] = _variables(frame_of_script())

    def alone(self, step: Step) -> bool:
        """Return whether the block of ``step`` now begins a check run. If so, let its collectives use local data."""
        adapter = self._due(step)
        if adapter is None or (self._alone and len(self._proofs) == RUNS - 1):
            return False
        suspected = len(self._proofs) >= RUNS
        return adapter.go_alone(first=self._first, suspected=suspected)

    def updates(self, step: Step, name: str) -> None:
        """Take digests of the results before update ``name``, which the block makes ahead of its vote.

        The block may remove its gradients after the update (``zero_grad``).
        """
        adapter = self._due(step)
        if adapter is not None:
            self._within.update((f"{key} at update {name!r}", n) for key, n in adapter.computed().items())

    def note(self, step: Step) -> None:
        """Take digests of the results of a check run, at the point where the block would vote.

        Raises:
            ImpureBlockError: the runs of this block have different results, or a variable keeps the result of a
                collective that this run has made without peers.
        """
        adapter = self._due(step)
        if adapter is None:
            return
        computed = self._computed(adapter)
        if not computed:
            self._checked = step.number  # the block skips this batch: check the next step that computes
        else:
            self._add(step, adapter, Proof(self._found, computed, self._deciding.numbers()))

    def _refuse_set_once(self, step: Step) -> None:
        """Raise ImpureBlockError if the block sets a variable once, from the result of a collective."""
        if names := sorted(name for name, summed in self._deciding.set_once.items() if summed):
            told = ", ".join(map(as_written, names[:_TOLD_MAX]))
            raise ImpureBlockError(
                f"step {step.number}: the block sets {told} once, from a collective, and its "
                "check, which has no peers, has set it from the data of this rank alone",
                hint="keep it in a dict in session(state={...}), which a run that does not count leaves as it was; "
                "session(verify_block=0) leaves out this check",
            )

    def confirms(self, step: Step) -> bool:
        """Return whether the run for the job may vote: its results equal those of the check run, if there was one."""
        adapter = self._due(step)
        if adapter is None or len(self._proofs) != RUNS - 1:
            return True
        self._add(step, adapter, Proof(self._found, self._computed(adapter), self._deciding.numbers()))
        return self._checked == step.number

    def excuses(self, step: Step, error: BaseException) -> bool:
        """Return whether missing data of peers in a check run may explain ``error``. If so, the run proves nothing."""
        adapter = self._due(step)
        if adapter is None or self._alone or not isinstance(error, Exception | SystemExit):
            return False
        if isinstance(error, ImpureBlockError) or len(self._proofs) >= RUNS:
            return False
        if not (self._first or adapter.partial):
            return False  # the error does not come from missing peers
        log.debug("holdfast: step %d cannot be checked without peers: %s", step.number, error)
        if self._proofs and self._proofs[0] is not None:
            self._second = step.number, type(error)
        self._add(step, adapter, None)
        return True

    def explains(self, step: Step, error: BaseException) -> ImpureBlockError | None:
        """Return the error to raise in place of ``error`` if values that an earlier run has left explain ``error``.

        This is the case if the first run of the block ended without an exception, but the second run and the run for
        the job ended with exceptions of the same class. Missing data of peers cannot explain this. The result is None
        in all other cases, and if ``error`` is an error of Holdfast, which names its own cause.

        Args:
            step: the step whose run for the job has ended.
            error: the exception that has ended this run.
        """
        if isinstance(error, HoldfastError) or step.rehearsal or self._second != (step.number, type(error)):
            return None
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        own = [frame for frame in frames if not frame.f_code.co_filename.startswith((*LIBRARIES, OURS))]
        where = f" at {place_of(own[-1])}" if own else ""
        return ImpureBlockError(
            f"step {step.number}: run again on the same batch, the block ends with {type(error).__name__}{where}: it "
            "uses what the run before has left",
            hint=_LEFT,
        )

    def _computed(self, adapter: ProvesBlocks) -> Mapping[str, int]:
        return {**self._within, **adapter.computed()}

    def _due(self, step: Step) -> ProvesBlocks | None:
        if self._adapter is None or step.scrap or step.parts > 1 or self._checked == step.number:
            return None
        if self._step != step.number:
            self._step, self._proofs, self._variables = step.number, [], {}
        due = self._first or step.number % self._every == self._every - 1
        if due and step.uncopied:
            self._tell_uncopied(step)
            return None
        return self._adapter if due else None

    def _add(self, step: Step, adapter: ProvesBlocks, proof: Proof | None) -> None:
        self._proofs.append(proof)
        done = [proof for proof in self._proofs if proof is not None]
        if len(self._proofs) == RUNS and (len(done) < RUNS or done[0] == done[1]):
            self._grown = step.number, _grown(self._variables[0].counts(), self._variables[1].counts())
            if self._first and not self._alone:
                self._refuse_set_once(step)
            self._passed(step)
        elif len(self._proofs) == 2 * RUNS:
            self._judge(step, adapter, done)

    def _passed(self, step: Step) -> None:
        self._checked, self._first = step.number, False

    def _tell_uncopied(self, step: Step) -> None:
        """Warn once of a batch that cannot be given to a second run of its block, so that the block is not checked."""
        if step.uncopied in self._told:
            return
        self._told.add(step.uncopied)
        log.warning(
            "holdfast: step %d: the block is not checked: its batch holds an object of class %s, which cannot be "
            "copied for another run; give it as a dict, a dataclass or tensors, or write session(verify_block=0)",
            step.number,
            step.uncopied,
        )

    def _tell_counters(self) -> None:
        """Warn of variables and generators that advance with each run: code after the update may use them.

        The results of code after the update are not compared. A variable that counts runs has grown between the starts
        of the first and second run, and again before the third run. A variable that the script sets from the number of
        the step has grown only once.
        """
        step, before = self._grown
        if not before:
            return
        self._grown = -1, {}
        grown = _grown(before, _variables(frame_of_script()).counts())
        counters = [name for name in grown if name not in self._told]
        if counters:
            self._told.update(counters)
            log.warning(
                "holdfast: step %d: not a count of steps: %s. A block runs again after a fault and for its check, and "
                "a process that joins or resumes counts from the start: use step.number, or count "
                "`if step.committed:` in session(state={...}), which also takes generators",
                step,
                ", ".join(counters[:_TOLD_MAX]),
            )

    def _judge(self, step: Step, adapter: ProvesBlocks, proofs: list[Proof]) -> None:
        """Raise or warn after four check runs. The first two differ; the last two used deterministic algorithms.

        Raises:
            ImpureBlockError: the block does not repeat its results.
        """
        first, second, third, fourth = proofs
        self._passed(step)
        cause = adapter.cause()
        # Only the first run differs if it used a value from before the check, and each later run used a value that its
        # predecessor had made (a batch that is drawn ahead).
        names = {**second.deciding, **first.deciding}  # a list that gets objects has no number any longer
        changed = [name for name in names if first.deciding.get(name) != second.deciding.get(name)]
        settled = third == second or bool(cause) or bool(changed)
        if third == fourth and first.found == second.found and not settled:
            log.warning(
                "holdfast: step %d: two runs of the block on the same batch differ (%s), and agree with deterministic "
                "algorithms: kernels add in any order here, and no run is repeatable bit for bit; "
                "torch.use_deterministic_algorithms(True) makes it so",
                step.number,
                difference(first.computed, second.computed),
            )
            self._adapter = None
            return
        behind = difference(third.found, fourth.found) or difference(first.found, second.found)
        if behind.startswith(TRAINED):
            raise ImpureBlockError(
                f"step {step.number}: this process continues the job, and a run of its block without an update has "
                f"changed {behind}",
                hint="write trained weights after optimizer.step(); keep a flag that says whether the block has set "
                "them (`initialized`) in a buffer of the module: an attribute begins again in each process",
            )
        if behind:
            raise ImpureBlockError(
                f"step {step.number}: the block finds another state when it runs again: {behind} changed after a "
                "block that did not count",
                hint=_BEHIND,
            )
        what = difference(third.computed, fourth.computed) or difference(first.computed, second.computed)
        if not what:
            raise ImpureBlockError(
                f"step {step.number}: run again on the same batch, the block {_finds(changed)}",
                hint=_hint(changed),
            )
        cause = (
            cause
            or _changed(self._variables[RUNS], self._variables[RUNS + 1], fourth.deciding, adapter.changed())
            or "it uses what the run before has changed"
        )
        if not all(f"{name} (" in cause for name in changed):
            cause = f"it {_finds(changed)}; {cause}"
        raise ImpureBlockError(
            f"step {step.number}: run again on the same batch, the block computes something else: {cause} "
            f"({what} differ)",
            hint=_hint(changed),
        )


def _finds(changed: Sequence[str]) -> str:
    """Return the part of a sentence that names variables whose values differed between the runs of a block."""
    return f"finds other values of {', '.join(map(as_written, changed[:_TOLD_MAX]))}, on which its updates depend"


def _hint(changed: Sequence[str]) -> str:
    """Return the hint of an error. If variables are known to differ, what to do with them comes first.

    Args:
        changed: the names of these variables. Batches and generators are not among them.
    """
    first, second = (_STATE, _BATCH) if changed else (_BATCH, _STATE)
    return f"{first}; {second}; session(verify_block=0) leaves out this check"


def difference(one: Mapping[str, int], other: Mapping[str, int]) -> str:
    """Return a text with the first name whose two digests differ, and the number of further names.

    The result is empty if all are equal.
    """
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    if not names:
        return ""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


class _Variables(NamedTuple):
    """The variables of the script at the start of a run of its block.

    Attributes:
        plain: bools, numbers and strings by name, including attributes of ``self``.
        inner: bools, numbers and strings in attributes of other objects, by ``name.attribute``: for example the
            position in a loader class of the script.
        drawing: positions of iterators and random generators by name; empty if they are not known.
    """

    plain: Mapping[str, object]
    inner: Mapping[str, object]
    drawing: Mapping[str, str]

    def counts(self) -> dict[str, int | str]:
        """Return the values that may count runs: ints, and positions of generators."""
        ints = {name: value for name, value in self.plain.items() if type(value) is int}
        return {**ints, **{name: position for name, position in self.drawing.items() if position}}


def _variables(frame: FrameType) -> _Variables:
    variables = {**frame.f_globals, **frame.f_locals}
    own = _attributes(variables.get("self"))
    plain: dict[str, object] = {}
    inner: dict[str, object] = {}
    drawing: dict[str, str] = {}
    for name, value in {**variables, **{f"self.{name}": value for name, value in own.items()}}.items():
        if isinstance(value, _PLAIN) and not name.startswith("__"):
            plain[name] = value
        elif isinstance(value, NotAssigned) or _is_ours(value):
            continue  # a placeholder or s.steps(...), which have the methods of an iterator
        elif isinstance(value, Iterator | random.Random) or has_static(value, "bit_generator"):
            drawing[name] = position_of(value) if isinstance(value, GeneratorType) else ""
        elif (
            not isinstance(value, type)
            and has_static(value, "manual_seed")
            and has_static(value, "get_state")
        ):
            state = value.get_state().numpy().tobytes()  # of a generator of torch
            drawing[name] = f"at {zlib.crc32(state):08x}"
        elif name != "self":
            attributes = _attributes(value)
            inner.update(
                (f"{name}.{key}", item) for key, item in attributes.items() if isinstance(item, _PLAIN)
            )
    return _Variables(plain, inner, drawing)


def _attributes(value: object) -> Mapping[str, object]:
    """Return the attributes of an object; empty for a class, a module and an object without ``__dict__``."""
    return {} if isinstance(value, type | ModuleType) else getattr(value, "__dict__", {})


def _is_ours(value: object) -> bool:
    return type(value).__module__.startswith("holdfast.")


def _grown(before: Mapping[str, int | str], after: Mapping[str, int | str]) -> dict[str, int | str]:
    """Return the counts that are larger in ``after`` and the generators that have advanced, each with its new value."""
    return {name: value for name, value in after.items() if name in before and _advanced(before[name], value)}


def _advanced(before: int | str, after: int | str) -> bool:
    if isinstance(before, int) and isinstance(after, int):
        return before < after < _CLOCK_MIN
    return before != after


def _changed(before: _Variables, after: _Variables, deciding: Container[str], of_model: Sequence[str]) -> str:
    """Return a text with the possible causes of different results: changed variables, and all iterators.

    The result is empty if there are none.

    Args:
        before, after: the variables at the starts of two runs of the block.
        deciding: names of the variables on which the updates depend. They come first.
        of_model: numbers in attributes of the model that have changed, as texts.
    """
    then, now = {**before.plain, **before.inner}, {**after.plain, **after.inner}
    # A variable that the block has not assigned yet is a nan.
    names = [name for name, value in now.items() if repr(then.get(name, value)) != repr(value)]
    # Floats last, as they are mostly times.
    names.sort(key=lambda name: (name not in deciding, isinstance(now[name], float)))
    certain = [name for name in names if name in deciding]
    told = [f"{as_written(name)} (was {then[name]}, then {now[name]})" for name in names]
    told = [*told[: len(certain)], *of_model, *told[len(certain) :]][:_TOLD_MAX]
    told += [f"{name} (drawn from)" for name in list(after.drawing)[:_TOLD_MAX]]
    return f"it may use what the run before has changed: {', '.join(told)}" if told else ""
