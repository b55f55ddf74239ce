"""The statement ``with step``: one block of user code, run as one step of the job.

Theory. The block computes gradients. The hooked ``optimizer.step()`` votes before it lets a weight change. If the block
must not be committed (a lost peer, a refused vote, a rehearsal), :class:`StepAborted` leaves the block, and
``__exit__`` swallows this exception. The state is then restored, and the script gets the same batch again. An exception
that is raised while the process is poisoned or fenced is treated as a consequence of the fault, and never as an error
of the user's code. Any other exception is raised unchanged.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from holdfast.core.protocol.status_page import PageFlag, Phase
from holdfast.core.worker.position import ScriptEvent
from holdfast.core.worker.vote import Ballot, Tally
from holdfast.errors import GroupError, HoldfastError, PeerLost, StepError
from holdfast.frameworks.common.adapter import Aborted, Adapter, Hooks
from holdfast.frameworks.common.optional_abilities import (
    Accumulates,
    AgreesOnSums,
    CommunicatesInUpdates,
    DescribesUpdates,
    FindsGenerators,
    ProvesBlocks,
    RunsWithoutPeers,
    SeesGradients,
    TakesParts,
)
from holdfast.runtime.worker.script_frames import place_in_script
from holdfast.session.steps.block_proof import Prover
from holdfast.session.steps.empty_blocks import EmptyBlocks
from holdfast.session.steps.equal_updates import EqualUpdates
from holdfast.session.steps.left_blocks import LeftBlocks
from holdfast.session.steps.nonfinite import NonfiniteCheck
from holdfast.session.steps.participant import StepParticipant
from holdfast.session.steps.recomputation import Recomputation
from holdfast.session.steps.voting import VoteCaster
from holdfast.session.variables.hidden_generators import HiddenGenerators
from holdfast.session.variables.input_values import InputValues
from holdfast.session.variables.unassigned_variables import bind, exchange
from holdfast.session.variables.update_variables import UpdateVariables

log = logging.getLogger("holdfast")

_ALONE = (
    "holdfast: this run of the block had no peers, as the first run of a process that joins or resumes: each "
    "collective returned the data of this rank. Check what a collective returns after the block, in `if "
    "step.committed:`"
)


_NOT_RUN = (
    "holdfast: this process has joined or resumed at step %d, and has not run the earlier steps. If their code sets "
    "this variable or attribute, set it in each block, or keep it: in session(state={...}), or in s.own if it is of "
    "one rank"
)


class StepAborted(Aborted):
    """The exception that leaves a block that is not committed: its vote was refused, or it was only a rehearsal."""


class StepOwner(Protocol):
    """The interface of a session that its blocks use."""

    def ballot(self, step: int, *, unsound: bool, nonfinite: bool) -> Ballot:
        """Return the ballot of this rank for the vote of ``step``."""

    @property
    def alike(self) -> bool:
        """True if this rank is known to hold a part of every tensor of the job."""

    def differ(self, step: int) -> None:
        """Send the digests of this rank's state after the vote of ``step`` has shown that copies of it differ."""

    def entered(self, step: int) -> bytes | None:
        """Record that the block of ``step`` began. Return rank-local values for the status page.

        The result is None if they are unchanged.
        """

    def foresee(self) -> bytes | None:
        """Log the update in the memory tier, before the vote.

        Return the rank-local values of the next step for the status page; None if they are unchanged.
        """

    def before_ready(self, tally: Tally) -> bytes | None:
        """Record position and layout before a commit. Return rank-local values for the status page.

        The result is None if they are unchanged.
        """

    def after_ready(self, step: Step, tally: Tally) -> None:
        """Handle the requests of the vote (saves, an exit) after ``step`` is committed."""

    def rewound(self, step: Step) -> None:
        """Set number and batch of ``step`` to those of the job's present step, because the job has gone back to it."""

    def batch_of(self, copy: int) -> Any:
        """Return the batch that model replica ``copy`` draws for the open step.

        Raises: LookupError: the batch is not known.
        """


class BlockAbilities(NamedTuple):
    """The optional interfaces of the adapter that blocks use. An entry is None if the adapter lacks the interface.

    The entries are found once per session, because ``isinstance`` with a protocol takes 10 to 50 microseconds.

    Attributes:
        tentative: names of the optimizers whose updates communicate, and so are made before the vote.
    """

    alone: RunsWithoutPeers | None
    accumulates: Accumulates | None
    parts: TakesParts | None
    sees: SeesGradients | None
    describes: DescribesUpdates | None
    sums: AgreesOnSums | None
    tentative: frozenset[str]

    @classmethod
    def of(cls, adapter: Adapter) -> BlockAbilities:
        """Return the abilities of ``adapter``."""
        return cls(
            adapter if isinstance(adapter, RunsWithoutPeers) else None,
            adapter if isinstance(adapter, Accumulates) else None,
            adapter if isinstance(adapter, TakesParts) else None,
            adapter if isinstance(adapter, SeesGradients) else None,
            adapter if isinstance(adapter, DescribesUpdates) else None,
            adapter if isinstance(adapter, AgreesOnSums) else None,
            adapter.tentative if isinstance(adapter, CommunicatesInUpdates) else frozenset(),
        )


class Step:
    """One step, made by ``Session.steps``. The statement ``with step as batch:`` runs its block.

    If a fault aborts the block, the statement swallows the exception, and the loop gives the same step again. Code
    after the block therefore tests ``step.committed``.

    Attributes:
        number: number of updates before this step; the first step of a job is 0.
        committed: True after the block, if all ranks apply the update of this step.
        epoch: index of the pass over the loader from which the batch was drawn.
        last_in_epoch: True for the last batch of an epoch, if the length of the loader is known; otherwise False.
        again: True if the code before the block has already run. Either this process got the step earlier, or the lost
            process that it replaces had begun the block.
        batch: the value of ``batch`` in ``with step as batch``; None in a loop without a loader.
        batches: number of the loader's batches in the list ``batch``; None if ``batch`` is one batch.
        part, parts: index of this block in its step, and number of blocks of the step. A step has several blocks, each
            with its own batch, if the job has fewer ranks than at its start. Only the last block can be committed.

    Example:
        >>> for step in s.steps(loader):  # doctest: +SKIP
        ...     with step as (x, y):
        ...         optimizer.zero_grad()
        ...         loss = loss_fn(model(x), y)
        ...         loss.backward()
        ...         optimizer.step()
        ...     if step.committed and step.number % 100 == 0:
        ...         print(step.number, loss.item())
    """

    def __init__(
        self, blocks: StepRunner, number: int, *, rehearsal: bool = False, scrap: bool = False
    ) -> None:
        self.number = number
        self.committed = False
        self.batch: Any = None
        self.epoch = 0
        self.last_in_epoch = False
        self.again = False
        self.part = 0
        self.parts = 1
        self.batches: int | None = None
        self.shared = False  # a block that is not the last one of the step has ended without a fault
        self.entered = False
        self.tentative: str | None = None
        self.names: set[str] = set()  # of step.update(name)
        self.nonfinite = False  # a named update had gradients with inf or nan
        self.updated: set[str] = set()  # optimizers that have stepped
        self.changed = False  # an optimizer had a gradient, or has changed a weight without one
        self.writes: int | None = (
            None  # write count of the weights before an optimizer without gradients steps; None: there is a gradient
        )
        self.idle = False  # the rehearsal ended without a backward pass and an optimizer.step()
        self.uncopied = ""  # the class of an object in the batch that cannot be copied for another run
        self.rehearsal = rehearsal
        self.prepares = rehearsal  # this run is a rehearsal and no check run
        self.scrap = scrap  # a rehearsal with the update, of a state that will be replaced
        self._blocks = blocks

    def __enter__(self) -> Any:
        self.entered = True
        exchange(inside=True)
        self._blocks.begin(self)
        return self.batch

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        swallowed = self._blocks.end(self, error)
        exchange(inside=False)
        if swallowed:
            self._blocks.set_aside(True)
            bind(trace)
        return swallowed

    @contextmanager
    def update(self, name: str) -> Iterator[None]:
        """Run one of several separate updates of this step (a GAN): ``with step.update("d"): d_optimizer.step()``.

        The update is undone if the vote at the end of the block does not pass. Collectives may follow the update inside
        the block. Each optimizer in it costs a copy of its weights and state.

        Raises:
            StepError: ``name`` was used before in this step, updates are nested, or an optimizer has already stepped
                outside of a named update.

        Example:
            >>> with step as batch:  # doctest: +SKIP
            ...     with step.update("d"):
            ...         d_optimizer.step()
            ...     with step.update("g"):
            ...         g_optimizer.step()
        """
        if name in self.names or self.tentative is not None:
            raise StepError(
                f"step {self.number}: update {name!r} is nested, or was made before in this step",
                hint="one `with step.update(...):` after the other, each with a name of its own",
            )
        if self.updated and not self.names:
            raise StepError(
                f"step {self.number}: update {name!r} after an optimizer.step() without a name",
                hint="give every update of the step a name: `with step.update(...):`",
            )
        self.names.add(name)
        self.tentative = name
        self._tentative_done: set[str] = set()
        try:
            yield
        finally:
            self.tentative = None

    def note_tentative(self, optimizer: str) -> None:
        """Record that ``optimizer`` steps inside :meth:`update`. Raises: StepError: it steps there a second time."""
        if (
            self.tentative is None
        ):  # an unnamed update that communicates: the step votes at the end of the block
            with self.update(optimizer):
                return
        if optimizer in self._tentative_done:
            raise StepError(
                f"step {self.number}: optimizer {optimizer!r} steps twice in update {self.tentative!r}",
                hint="a second `with step.update(...):` for the second optimizer.step()",
            )
        self._tentative_done.add(optimizer)


class StepRunner:
    """The runner of the blocks of a session: it begins a block, votes, and commits or aborts the step.

    Args:
        rank: protocol state of this rank.
        adapter: the framework.
        votes: casts the votes of this rank.
        owner: the session.
        finite: the check of gradients for inf and nan.
        verify: arguments ``verify_block`` and ``verify_ranks`` of the session: steps between two checks that a block
            repeats its results in this process, and on other ranks; 0 means no check.
    """

    def __init__(
        self,
        rank: StepParticipant,
        adapter: Adapter,
        votes: VoteCaster,
        owner: StepOwner,
        finite: NonfiniteCheck,
        verify: tuple[int, int] = (0, 0),
    ) -> None:
        self._finite = finite
        self._rank = rank
        self._recompute = Recomputation(adapter, verify[1], owner.batch_of)
        self._votes = votes
        self._adapter = adapter
        self._owner = owner
        self._able = BlockAbilities.of(adapter)
        self._current: Step | None = None
        self._tally = Tally(passed=False)
        self._went_back = False  # the open block has made a backward pass
        self._empty = EmptyBlocks()
        self._equal = EqualUpdates(
            adapter.rank,
            self._able.describes,
            rank.client,
            scaled=adapter.scaled,
            searches=verify[0] > 0,
            generators=adapter if isinstance(adapter, FindsGenerators) else None,
        )
        self._prover = Prover(adapter, verify[0], adapter.world_size, self._equal.variables)
        self._left = LeftBlocks(adapter, on=verify[0] > 0)
        # Step and block index of the newest rehearsal without a backward pass and an update.
        self._idle = (-1, 0)

    @property
    def variables(self) -> UpdateVariables:
        """The check of the script's variables on which the updates depend."""
        return self._equal.variables

    @property
    def generators(self) -> HiddenGenerators:
        """The check of the random generators of the script."""
        return self._equal.generators

    @property
    def inputs(self) -> InputValues:
        """The check of the variables that the code before a loop over steps sets."""
        return self._equal.inputs

    def of_rank(self) -> dict[str, Any]:
        """Return the rank-local values of the inputs of the open loop, and of the generators that have moved."""
        return {**self.inputs.of_rank(), **self.generators.of_rank()}

    @property
    def current(self) -> Step | None:
        """The step whose block is open, or None."""
        return self._current

    def hooks(self) -> Hooks:
        """Return the functions that the adapter calls at backward passes, updates, waits and compilations."""
        return Hooks(
            self._backward,
            self._update,
            self._updated,
            self._rank.timer.waited,
            partial(self._rank.flag, PageFlag.COMPILING),
        )

    # ------------------------------------------------------------------ begin

    def set_aside(self, on: bool) -> None:
        """Complete the script's collectives on local data (``on``), or with the other ranks again.

        Used for the code after a block that is not committed. That code runs again with its step. Each rank runs it a
        different number of times, and a replacement not at all, so ranks cannot meet in a collective there.
        """
        if self._able.alone is not None:
            self._able.alone.set_aside(on)

    def give(self, step: Step) -> Iterator[Step]:
        """Yield ``step`` to the script. Afterwards, the script's collectives run with the other ranks again."""
        try:
            yield step
        finally:
            self.set_aside(False)

    def begin(self, step: Step) -> None:
        """Begin the block of ``step``. During a recovery, wait first until the job continues.

        Raises:
            StepError: another block is open, or the script caught an exception that had left a block.
        """
        if self._current is not None:
            raise StepError(
                f"step {step.number} begins inside step {self._current.number}",
                hint="leave the block of a step (`with step as batch:`) before the next one",
            )
        self._left.begin(step)
        joining = self._rank.joining
        if joining:
            self._equal.joins()
        self._prover.begin(step, joining=joining)
        alone = step.rehearsal or (joining and self._is_alone(step))
        if joining and not alone:
            self._rank.join()
        while True:
            # Copy first: once the state machine is in COMPUTE, a fault is answered from these copies.
            if self._able.accumulates is not None:
                self._able.accumulates.expect(step.batches)
            if self._able.parts is not None:
                self._able.parts.share(step.part, step.parts)
            self._adapter.begin(step.number)
            if self._rank.begin():
                break
            self._rank.await_resume()
            if self._rank.step != step.number:
                self._owner.rewound(step)
        self._rank.note_local(self._owner.entered(step.number), step.number)
        self._current, self._went_back = step, False
        self._equal.opens()
        step.rehearsal = alone or (not joining and self._is_alone(step))
        if not step.rehearsal:
            if not self._meet(step):
                if self._rank.step != step.number:
                    self._owner.rewound(step)
                self.begin(step)
                return
            step.rehearsal = self._recompute.runs
        self._recompute.seed(step)
        self._adapter.shield()
        self._rank.enter(Phase.FORWARD)

    def _is_alone(self, step: Step) -> bool:
        step.prepares = self._rehearse(step)
        return step.prepares or self._prover.alone(step) or self._recompute.alone(step)

    def _meet(self, step: Step) -> bool:
        """Meet the other ranks before a run for the job: agree on the order of sums, and compare check runs if due.

        Returns:
            False after a fault: the block begins again.
        """
        self._rank.enter(Phase.MEET)
        try:
            if self._able.sums is not None and step.number > 0:
                self._able.sums.agree()
            if self._recompute.meet(step):
                return True
        except PeerLost:
            pass
        except BaseException as error:
            self._give_up(step, error)
            raise
        self._abort(step)
        return False

    def _rehearse(self, step: Step) -> bool:
        if self._idle == (step.number, step.part):
            return False  # the block skips this batch, on all ranks: rehearse the next step that computes
        return step.number > 0 and self._adapter.rehearse()

    # ------------------------------------------------------------------ hooks

    def _backward(self) -> None:
        self._went_back = True
        if self._rank.state == "compute":
            self._rank.enter(Phase.BACKWARD)

    def _update(self, optimizer: str) -> None:
        step = self._current
        if step is not None:
            step.writes = self._writes()
        if step is None:
            raise StepError(
                f"optimizer {optimizer!r} steps outside of a step",
                hint="for step in s.steps(...): with step: ... optimizer.step()",
            )
        self._equal.steps(optimizer, step.tentative or "")
        if step.tentative is not None or optimizer in self._able.tentative:
            self._refuse_late(step, optimizer)
            step.note_tentative(optimizer)
            self._prover.updates(step, step.tentative or optimizer)
            step.nonfinite = self._finite.look_within(optimizer) or step.nonfinite
            if not self._rank.copy(partial(self._adapter.record, optimizer)):
                raise StepAborted("a fault came before the update")
            return
        if step.scrap:
            return
        if self._rank.state == "updating":
            if optimizer in step.updated:
                raise StepError(
                    f"step {step.number}: optimizer {optimizer!r} steps twice without a name",
                    hint="`with step.update('first'): ...` around each of them, or one optimizer.step() per block",
                )
            return
        self._vote(step, optimizer)

    def _writes(self) -> int | None:
        """Return a count of writes to weights, to detect a change without a gradient.

        The result is None if the count is not needed.
        """
        if self._empty.over or self._able.sees is None:
            return None
        return self._able.sees.gradients.weights_alone()

    def _refuse_late(self, step: Step, optimizer: str) -> None:
        if self._rank.state == "updating":
            raise StepError(
                f"step {step.number}: update of {optimizer!r} after the step has voted",
                hint="give every update of the step a name: `with step.update(...):`",
            )

    def _updated(self, optimizer: str) -> None:
        step = self._current
        if step is None:
            return
        step.updated.add(optimizer)
        step.changed = step.changed or step.writes is None or step.writes != self._writes()
        if step.scrap and step.tentative is None and optimizer not in self._able.tentative:
            raise StepAborted("rehearsal")  # the code after the update runs only in a step that counts
        if step.tentative is None and self._rank.state == "updating":
            self._rank.enter(Phase.COMMIT)

    # ------------------------------------------------------------------ vote

    def _vote(self, step: Step, optimizer: str = "") -> None:
        """Vote on the update of ``step``. Return normally if the update may be made. Raises: StepAborted: it must not.

        Args:
            optimizer: the optimizer that is about to step; empty if the vote is at the end of the block.
        """
        rank, adapter = self._rank, self._adapter
        if step.rehearsal:
            self._prover.note(step)
            self._recompute.note()
            raise StepAborted("rehearsal")
        if not self._prover.confirms(step):
            step.rehearsal = True
            raise StepAborted("its check")
        if step.part + 1 < step.parts:
            step.shared = not adapter.poisoned
            raise StepAborted("a part of a step")
        computed_ns = time.monotonic_ns()
        if optimizer:
            self._finite.begin(optimizer)  # the device is not idle between its last gradient and this check
        adapter.prepare_vote()
        rank.computed(computed_ns)
        rank.note_local(self._owner.foresee(), step.number + 1)
        rank.freed()
        if adapter.poisoned or not rank.enter_vote():
            raise StepAborted(adapter.reason)
        rank.enter(Phase.VOTE)
        nonfinite = step.nonfinite or (bool(optimizer) and self._finite.end())
        ballot = self._owner.ballot(step.number, unsound=adapter.poisoned, nonfinite=nonfinite)
        ballot = self._equal.ballot(ballot, alike=self._owner.alike)
        self._tally = Tally(passed=False)
        try:
            tally = self._finite.read(self._votes.cast(ballot))
        except PeerLost:
            state = rank.vote_broken()
            self._tally = Tally(passed=False, nonfinite=nonfinite)
        else:
            state = rank.voted(tally)
            self._tally = tally
            if tally.differ:
                self._owner.differ(step.number)
            self._equal.read(tally, step.number)
        if state == "in_doubt" and not rank.await_decision():
            raise StepAborted("the step was not committed")
        if rank.state == "aborted" and not self._tally.nonfinite:
            raise StepAborted(self._tally.reason)
        if state == "in_doubt" and not self._tally.passed and self._finite.is_unsure(self._tally):
            raise StepAborted("other ranks may leave this update out, and this rank lacks the result")
        if self._tally.nonfinite:
            self._finite.agreed(step.number)
        adapter.enter_update()
        rank.enter(Phase.UPDATE)

    # ------------------------------------------------------------------ end

    def end(self, step: Step, error: BaseException | None) -> bool:
        """Leave the block of ``step``: vote if needed, then commit or abort. Return True to swallow ``error``."""
        rank = self._rank
        if error is None:
            try:
                if rank.state == "compute":
                    self._note_idle(step)
                    self._vote(step)
                if rank.state == "updating":
                    self._commit(step)
                    return False
            except StepAborted:
                pass
            except BaseException as late:
                if not self._is_fault(late):
                    self._give_up(step, late)
                    raise
            self._abort(step)
            return True
        if self._is_fault(error) or self._excuses(step, error):
            self._abort(step)
            return True
        if step.rehearsal and not isinstance(error, HoldfastError):
            error.add_note(_ALONE)
        if isinstance(error, NameError | AttributeError) and step.number and not self._equal.has_committed:
            error.add_note(_NOT_RUN % step.number)
        self._give_up(step, error)
        if (impure := self._prover.explains(step, error)) is not None:
            raise impure from error
        return False

    def _excuses(self, step: Step, error: BaseException) -> bool:
        """Return whether missing data of peers may explain ``error``.

        An error with another cause is raised again in the run for the job, and there it ends the script.
        """
        if not step.rehearsal:
            return False
        excused = self._recompute.excuses(error) or self._prover.excuses(step, error)
        if (
            not step.prepares
            or isinstance(error, HoldfastError)
            or not isinstance(error, Exception | SystemExit)
        ):
            return excused
        step.idle = True  # a spare then rehearses after it is called
        if step.scrap or self._able.sums is None or self._able.sums.excuse():
            log.debug("holdfast: step %d cannot be rehearsed without peers: %s", step.number, error)
            return True
        return excused

    def _note_idle(self, step: Step) -> None:
        if step.rehearsal and not step.updated and not self._went_back:
            step.idle = True
            self._idle = (step.number, step.part)

    def refuse_empty(self, *, ended: bool = True) -> None:
        """Raise an error if the blocks so far have changed no weight.

        Args:
            ended: the training ends here.

        Raises:
            StepError: no block has changed a weight since step 0, or since this process began.
        """
        if not self._adapter.scaled and isinstance(self._adapter, ProvesBlocks):
            self._empty.require_change(ended=ended)

    def _note_empty(self, step: Step) -> None:
        """Count the block of ``step``, which has just been committed, if it changed no weight."""
        if step.updated and step.changed:
            self._empty.over = True
        elif not self._empty.over:
            self._empty.add(step.number, stepped=bool(step.updated), place=place_in_script())
            self.refuse_empty(ended=False)

    def _is_fault(self, error: BaseException) -> bool:
        if isinstance(error, Aborted):
            return True
        if self._rank.client is None:  # there is no controller that could order a retry
            return False
        # A script may catch the exception of a fault, and exit.
        if not isinstance(error, Exception | SystemExit):
            return False
        return self._adapter.poisoned or self._rank.fenced or self._adapter.is_fault(error)

    def _give_up(self, step: Step, error: BaseException) -> None:
        """Record that ``error``, an exception of the user's code, leaves the block."""
        self._rank.moved(ScriptEvent.BLOCK_LEFT)
        state = self._rank.fail()
        if state != "ready":
            self._left.ended(step, error)
        if step.names and state == "aborted":
            self._adapter.abort()  # undo the updates of this step: the state of the step before it can be saved
        else:
            self._adapter.release()
        self._current = None

    def _commit(self, step: Step) -> None:
        self._adapter.end()
        self._equal.committed(ended=step.last_in_epoch)  # a part of the state that is kept now
        self._rank.commit(self._owner.before_ready(self._tally))
        self._current = None
        step.committed = True
        self._note_empty(step)
        self._owner.after_ready(step, self._tally)

    def redo(self) -> None:
        """Abort the open block and begin it again, for a framework that computes the update in its graph.

        Raises:
            StepError: no block is open.
        """
        step = self._current
        if step is None:
            raise StepError(
                "no step is open that could begin again", hint="call it inside `with step as batch:`"
            )
        self._abort(step)
        step.rehearsal = False  # its rehearsal has run: the newcomer joins now
        self.begin(step)

    def _abort(self, step: Step) -> None:
        """Abort ``step``: restore the state from its start, and wait until the step may run again."""
        rank, adapter = self._rank, self._adapter
        rank.freed()
        state = rank.fail()
        if state == "in_doubt" and rank.await_decision():
            state = (
                rank.fail()
            )  # the decision was to apply the update, but the block was left: fail() returns "torn"
        if state in ("torn", "updating"):
            rank.await_end(Phase.TORN)
        adapter.abort()
        if not step.rehearsal:
            self._left.aborted(step)
        self._current = None
        rank.moved(ScriptEvent.BLOCK_LEFT)
        if step.rehearsal and not adapter.poisoned and self._end_rehearsal() and rank.retry_now():
            return
        if step.shared and not adapter.poisoned and rank.retry_now():
            return
        step.shared = False
        rank.repeated()
        rank.await_resume()

    def _end_rehearsal(self) -> bool:
        if self._rank.joining:
            return True  # collectives stay on own data until it has joined
        try:
            self._adapter.end_rehearsal()
        except GroupError:
            return False  # a fault came first: the recovery rebuilds the groups
        return True
