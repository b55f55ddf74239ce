"""``with step``: one block of user code, run as one step of the job.

Theory. The block computes gradients. The hooked ``optimizer.step()`` votes before it lets a weight change. A block that
may not count (a lost peer, a refused vote, a rehearsal) is left by :class:`StepAborted`, which ``__exit__`` swallows.
The state is then restored, and the script gets the same batch again. An exception while the process is poisoned or
fenced is taken for a consequence of the fault, never for an error of the user's code. Any other exception is raised
unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from holdfast.core.protocol.status_page import PageFlag, Phase
from holdfast.core.worker.position import ScriptEvent
from holdfast.core.worker.vote import Ballot, Tally
from holdfast.errors import GroupError, PeerLost, StepError
from holdfast.frameworks.common.adapter import Aborted, Adapter, Hooks
from holdfast.frameworks.common.optional_abilities import (
    Accumulates,
    CommunicatesInUpdates,
    ProvesBlocks,
    RunsWithoutPeers,
    SeesGradients,
    TakesParts,
)
from holdfast.runtime.worker.script_frames import place_in_script
from holdfast.session.steps.block_proof import Prover
from holdfast.session.steps.nonfinite import NonfiniteCheck
from holdfast.session.steps.participant import StepParticipant
from holdfast.session.steps.recomputation import Recomputation
from holdfast.session.steps.unassigned_variables import bind
from holdfast.session.steps.voting import VoteCaster
from holdfast.text import plural


class StepAborted(Aborted):
    """The exception that leaves a block whose vote was refused, or that was only a rehearsal."""


class StepOwner(Protocol):
    """The interface of a session that its blocks use."""

    def ballot(self, step: int, *, unsound: bool, nonfinite: bool) -> Ballot:
        """Return the ballot of this rank for the vote of ``step``."""

    def differ(self, step: int) -> None:
        """Report the state of this rank after the vote of ``step`` has shown that copies of the state differ."""

    def entered(self, step: int) -> bytes | None:
        """Note that the block of ``step`` has begun. Return changed rank-local values for the status page, or None.

        Rank-local values are those that only this rank has, such as its loader's state and ``Session.own``.
        """

    def foresee(self) -> bytes | None:
        """Prepare for the coming vote. Return the rank-local values of the next step for the status page, or None."""

    def before_ready(self, tally: Tally) -> bytes | None:
        """Publish changes at the end of the block. Return the rank-local values for the status page, or None."""

    def after_ready(self, step: Step, tally: Tally) -> None:
        """Save, or leave, after the step is committed."""

    def rewound(self, step: Step) -> None:
        """Give ``step`` the number and batch of the job's present step: the job went back before ``step`` began."""

    def batch_of(self, copy: int) -> Any:
        """Return the batch of the open step that another copy of the model draws. Raises: LookupError: unknown."""


class BlockAbilities(NamedTuple):
    """The optional abilities of an adapter that blocks use; None: the adapter has it not.

    They are looked up once, because ``isinstance`` with a protocol takes 10 to 50 microseconds. ``tentative``: see
    ``CommunicatesInUpdates``.
    """

    alone: RunsWithoutPeers | None
    accumulates: Accumulates | None
    parts: TakesParts | None
    sees: SeesGradients | None
    tentative: frozenset[str]

    @classmethod
    def of(cls, adapter: Adapter) -> BlockAbilities:
        """Return the abilities of ``adapter``."""
        return cls(
            adapter if isinstance(adapter, RunsWithoutPeers) else None,
            adapter if isinstance(adapter, Accumulates) else None,
            adapter if isinstance(adapter, TakesParts) else None,
            adapter if isinstance(adapter, SeesGradients) else None,
            adapter.tentative if isinstance(adapter, CommunicatesInUpdates) else frozenset(),
        )


EMPTY_MAX = 10
NOT_EMPTY = -1
NO_UPDATE = (
    "no optimizer of the session took a step",
    "call loss.backward() and optimizer.step() in the block, with an optimizer that the session was given",
)
NO_GRADIENT = (
    "no gradient was there when the optimizer stepped",
    "call loss.backward() before optimizer.step(), and zero_grad() after it",
)


class Step:
    """One step, made by ``Session.steps``. ``with step as batch:`` runs its block.

    Attributes:
        number: updates done before it.
        committed: True after the block, when its update counts for the whole job.
        epoch: pass over the loader that the batch belongs to.
        last_in_epoch: True for the last batch of an epoch, where the length of the loader is known.
        again: True when the code before the block has already run: this process got this step earlier, or the process
            that it replaces had begun the block.
        batch: the value of ``batch`` in ``with step as batch``.
        batches: number of batches of the loader in the list ``batch``; None: ``batch`` is one batch.
        part, parts: index and number of the blocks of this step. With fewer ranks than the job began with, a step has
            several blocks, each with its own batch. Only the last block can be committed.
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
        self.idle = False  # the rehearsal has computed nothing
        self.repeats = True  # the batch can be handed out again at once
        self.rehearsal = rehearsal
        self.scrap = scrap  # a rehearsal with the update, of a state that will be replaced
        self._blocks = blocks

    def __enter__(self) -> Any:
        self.entered = True
        self._blocks.begin(self)
        return self.batch

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        swallowed = self._blocks.end(self, error)
        if swallowed:
            self._blocks.set_aside(True)
            bind(trace)
        return swallowed

    @contextmanager
    def update(self, name: str) -> Iterator[None]:
        """Make one of several separate updates of this step (a GAN), tentative until the block ends and all have voted.

        Collectives may follow it inside the block. Costs a copy of the weights and state of each optimizer used.

        Raises:
            StepError: the name was used before in this step, updates are nested, or the step has voted already.
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
        """Note that an optimizer steps inside :meth:`update`. Raises: StepError: it has already stepped there."""
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
    """Runs blocks: begins them, votes, commits or aborts.

    Args:
        rank: protocol state of this rank.
        adapter: the framework.
        votes: casts the votes of this rank.
        owner: the session.
        finite: the check of gradients for inf and nan.
        verify: steps between two checks that a block computes the same when it runs again, and steps between two checks
            that it does so on other ranks; 0: no check.
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
        self._prover = Prover(adapter, verify[0], adapter.world_size)
        self._recompute = Recomputation(adapter, verify[1], owner.batch_of)
        self._votes = votes
        self._adapter = adapter
        self._owner = owner
        self._able = BlockAbilities.of(adapter)
        self._current: Step | None = None
        self._tally = Tally(passed=False)
        self._left = ""  # the exception by which the script left a block, in words
        self._empty, self._empty_at = 0, ""  # blocks without a changed weight, and place of the last
        self._stepped = False  # an optimizer stepped in the last of these blocks
        self._idle = (-1, 0)  # the newest step, and its block, whose rehearsal computed nothing

    @property
    def current(self) -> Step | None:
        """The step whose block is open, or None."""
        return self._current

    def hooks(self) -> Hooks:
        """Return the functions that the adapter calls at backward passes and updates."""
        return Hooks(
            self._backward,
            self._update,
            self._updated,
            self._rank.timer.waited,
            partial(self._rank.flag, PageFlag.COMPILING),
        )

    # ------------------------------------------------------------------ begin

    def set_aside(self, on: bool) -> None:
        """Run the script's collectives without peers, or with them again.

        The code after a block that has not committed runs again with its step. Each rank runs it a different number of
        times, and a replacement not at all, so a collective there has no peers.
        """
        if self._able.alone is not None:
            self._able.alone.set_aside(on)

    def give(self, step: Step) -> Iterator[Step]:
        """Give ``step`` to the script. Its collectives have peers again when it is back."""
        try:
            yield step
        finally:
            self.set_aside(False)

    def begin(self, step: Step) -> None:
        """Enter the block; wait first while the job recovers."""
        if self._current is not None:
            raise StepError(
                f"step {step.number} begins inside step {self._current.number}",
                hint="leave the block of a step (`with step as batch:`) before the next one",
            )
        if self._left:
            raise StepError(
                f"{self._left} that the script caught", hint="catch it inside the block, or leave the loop"
            )
        joining = self._rank.joining
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
        self._current = step
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
        return self._rehearse(step) or self._prover.alone(step) or self._recompute.alone(step)

    def _meet(self, step: Step) -> bool:
        """Compare the results of ranks where a check is due. Return False after a fault: the block begins again."""
        self._rank.enter(Phase.VOTE)
        try:
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
        if step.tentative is not None or optimizer in self._able.tentative:
            self._refuse_late(step, optimizer)
            step.note_tentative(optimizer)
            step.nonfinite = self._finite.look_within(optimizer) or step.nonfinite
            self._adapter.record(optimizer)
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
        """Return a count of writes to weights, to find a change without a gradient; None: it is not needed."""
        if self._empty == NOT_EMPTY or self._able.sees is None:
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
        """Vote, and return if weights may change, by ``optimizer`` if it is named. Raises: StepAborted."""
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
        adapter.prepare_vote()
        rank.computed(computed_ns)
        rank.note_local(self._owner.foresee(), step.number + 1)
        rank.freed()
        if adapter.poisoned or not rank.enter_vote():
            raise StepAborted(adapter.reason)
        rank.enter(Phase.VOTE)
        nonfinite = step.nonfinite or (bool(optimizer) and self._finite.look(optimizer))
        ballot = self._owner.ballot(step.number, unsound=adapter.poisoned, nonfinite=nonfinite)
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
        if state == "in_doubt" and not rank.await_decision():
            raise StepAborted("the step was not committed")
        if rank.state == "aborted" and not self._tally.nonfinite:
            raise StepAborted(self._tally.reason)
        if state == "in_doubt" and not self._tally.passed and self._finite.is_unsure(self._tally):
            raise StepAborted("the others may leave this update out, and this rank has not heard it")
        if self._tally.nonfinite:
            self._finite.agreed(step.number)
        adapter.enter_update()
        rank.enter(Phase.UPDATE)

    # ------------------------------------------------------------------ end

    def end(self, step: Step, error: BaseException | None) -> bool:
        """Leave the block. Return True to swallow ``error``."""
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
        self._give_up(step, error)
        return False

    def _excuses(self, step: Step, error: BaseException) -> bool:
        return step.rehearsal and (self._recompute.excuses(error) or self._prover.excuses(step, error))

    def _note_idle(self, step: Step) -> None:
        if step.rehearsal and not step.updated:
            step.idle = True
            self._idle = (step.number, step.part)

    def refuse_empty(self, *, excused: bool = False) -> None:
        """Raise an error if every block since the training began has changed no weight.

        Args:
            excused: the training ends early, as asked: raise nothing.

        Raises:
            StepError: no block has changed a weight.
        """
        if (
            self._empty > 0
            and not excused
            and not self._adapter.scaled
            and isinstance(self._adapter, ProvesBlocks)
        ):
            missing, call = NO_GRADIENT if self._stepped else NO_UPDATE
            raise StepError(
                f"{plural(self._empty, 'block')} from step 0 on, and {missing} in "
                f"{'it' if self._empty == 1 else 'them'} ({self._empty_at})",
                hint=call,
            )

    def _note_empty(self, step: Step) -> None:
        """Count the block that has just been committed if it changed no weight."""
        if step.updated and step.changed:
            self._empty = NOT_EMPTY
        elif self._empty == step.number:
            self._empty += 1
            self._stepped = bool(step.updated)
            self._empty_at = place_in_script()
            self.refuse_empty(excused=self._empty < EMPTY_MAX)
        else:
            self._empty = NOT_EMPTY  # the training began before this block

    def _is_fault(self, error: BaseException) -> bool:
        if isinstance(error, Aborted):
            return True
        if self._rank.client is None:  # there is no controller that could order a retry
            return False
        if not isinstance(error, Exception):
            return False
        return self._adapter.poisoned or self._rank.fenced or self._adapter.is_fault(error)

    def _give_up(self, step: Step, error: BaseException) -> None:
        """Record that the user's own exception leaves the block."""
        self._rank.moved(ScriptEvent.BLOCK_LEFT)
        if self._rank.fail() != "ready":
            self._left = f"step {step.number} was left by a {type(error).__name__}"
        self._adapter.release()
        self._current = None

    def _commit(self, step: Step) -> None:
        self._adapter.end()
        self._rank.commit(self._owner.before_ready(self._tally))
        self._current = None
        step.committed = True
        self._note_empty(step)
        self._owner.after_ready(step, self._tally)

    def redo(self) -> None:
        """Abort the open block and begin it again at once, for a framework that computes the update in its graph."""
        step = self._current
        if step is None:
            raise StepError(
                "no step is open that could begin again", hint="call it inside `with step as batch:`"
            )
        self._abort(step)
        step.rehearsal = False  # its rehearsal has run: the newcomer joins now
        self.begin(step)

    def _abort(self, step: Step) -> None:
        """Restore the state, and return when the step may run again."""
        rank, adapter = self._rank, self._adapter
        rank.freed()
        state = rank.fail()
        if state == "in_doubt" and rank.await_decision():
            state = (
                rank.fail()
            )  # the decision was to apply, but the block was left: fail() then says that the state is torn
        if state in ("torn", "updating"):
            rank.await_end(Phase.TORN)
        adapter.abort()
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
