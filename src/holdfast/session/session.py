"""The session: the object that a training script uses.

The session connects the framework's adapter, the protocol state of this rank, the saver, the search for a checkpoint
and the watch for exit requests. A job of one process without a launcher has no control plane.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

from holdfast.core.protocol.messages import Leave, SessionOpened
from holdfast.core.protocol.status_page import PageFlag, Phase
from holdfast.core.worker.position import ScriptEvent
from holdfast.core.worker.vote import Ballot, Tally
from holdfast.errors import (
    HoldfastError,
    PeerLost,
    StepError,
    StoreWriteError,
    UnsupportedError,
    UsageError,
)
from holdfast.exit_codes import Exit
from holdfast.frameworks.common.adapter import Adapter, Collected
from holdfast.frameworks.common.optional_abilities import (
    BeginsEqual,
    HasGroups,
    SharesRandomNumbers,
    StandsIn,
    TakesParts,
)
from holdfast.frameworks.common.random_streams import Streams
from holdfast.frameworks.common.state_tree import Plain
from holdfast.runtime.node.deferred_rank import DeferredRank
from holdfast.runtime.node.disabled import refuse_session
from holdfast.runtime.worker import script_end
from holdfast.runtime.worker.library_mode import join_or_start_agent
from holdfast.runtime.worker.process_place import seat_here
from holdfast.runtime.worker.script_frames import place_of_error
from holdfast.runtime.worker.torchrun_root import note_root
from holdfast.runtime.worker.user_exception import lost_peer, show, tell, words_of_exit
from holdfast.runtime.worker.worker_client import WorkerClient, leave_process
from holdfast.session.checkpoints.after_block import AfterBlock
from holdfast.session.checkpoints.checkpointer import Checkpointer
from holdfast.session.checkpoints.job_root import root_of_job
from holdfast.session.checkpoints.memory_tier import MemoryTier
from holdfast.session.checkpoints.resume import Candidates, Resumed, ResumeSearch, candidates
from holdfast.session.checkpoints.save_schedule import SaveSchedule
from holdfast.session.checkpoints.state_transfer import take_over
from holdfast.session.exit_requests import ExitWatch, known_of
from holdfast.session.loops.iterators import ScriptLoops
from holdfast.session.loops.loop import Loops
from holdfast.session.loops.loop_bounds import before_of
from holdfast.session.loops.plain_attributes import parts_of
from holdfast.session.loops.replica_state_check import ReplicaStateCheck
from holdfast.session.loops.turns import Turns
from holdfast.session.run_context import run_of
from holdfast.session.settings import SessionSettings
from holdfast.session.steps.loop_ends import LoopEnds
from holdfast.session.steps.nonfinite import NonfiniteCheck
from holdfast.session.steps.out_of_step_collectives import CollectiveGuard
from holdfast.session.steps.participant import StepParticipant
from holdfast.session.steps.participant_calls import ParticipantCalls
from holdfast.session.steps.pause import Pause
from holdfast.session.steps.replica_check import Verifier
from holdfast.session.steps.section import Sections
from holdfast.session.steps.step import Step, StepRunner
from holdfast.session.steps.voting import VoteCaster
from holdfast.store.backends.location import ROOT_VARIABLE, absolute
from holdfast.store.backends.registry import open_store
from holdfast.store.manage.lineage import Lineage
from holdfast.text import plural

log = logging.getLogger("holdfast")

STAY_S = 90.0
"""Longest wait for an order in a process whose script has raised. A last-gasp checkpoint may take 60 s."""
T = TypeVar("T")
OFFERED = (
    "attach",
    "epochs",
    "exiting",
    "new_epoch",
    "own",
    "phase",
    "root",
    "save",
    "section",
    "state",
    "step",
    "steps",
)
"""The public attributes and methods of a session."""
PARTS_VARIABLE = "HOLDFAST_PARTS"
"""Environment variable that the launcher sets when nodes are missing: number of ranks whose work each rank does."""


class Session(ScriptLoops):
    """The session of a script, made by :func:`holdfast.session`; a context manager.

    Attributes:
        state: the dict that was given as ``holdfast.session(state={...})``: objects and values of the whole job, by
            name. A checkpoint holds them once, with the values of any one rank. A load fills tensors, arrays and
            containers in place. A loaded number or string only replaces the entry ``s.state["name"]``, so the script
            must read it there. Changes by a block that is aborted are undone. Loaders, and objects of more than 65536
            numbers, are not copied for this. Change these only after ``optimizer.step()``.
        root: directory or URL of the checkpoints; if None, nothing is saved.

    Example:
        >>> with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpts/") as s:  # doctest: +SKIP
        ...     for step in s.steps(loader, until=10_000):
        ...         with step as (x, y):
        ...             optimizer.zero_grad()
        ...             loss_fn(model(x), y).backward()
        ...             optimizer.step()
    """

    def __init__(
        self, adapter: Callable[[], Adapter], extras: dict[str, Any], settings: SessionSettings
    ) -> None:
        self.state = extras
        self._make_adapter = adapter
        self._settings = settings
        self._resumed: Resumed | None = None
        self._spare: DeferredRank | None = None
        self._rehearsing = self._attached = self._entered = False
        self._watch: ExitWatch | None = None  # made when the session opens
        self._entered_by: tuple[FrameType, int] | None = None
        self._collecting: int | None = None  # step of the state that is being read

    def __dir__(self) -> list[str]:
        """Return the names for users; all other methods are for the library's own modules."""
        return [*OFFERED, *(name for name in super().__dir__() if name.startswith("__"))]

    # ------------------------------------------------------------------ open

    def __enter__(self) -> Self:
        refuse_session()
        settings, caller = self._settings, sys._getframe(1)
        self._entered_by = caller, caller.f_lasti
        self._adapter = self._make_adapter()
        self._parts = int(os.environ.get(PARTS_VARIABLE, "1"))
        if self._parts > 1 and not isinstance(self._adapter, TakesParts):
            raise UnsupportedError(
                f"this framework cannot continue with a {self._parts}th of the ranks",
                hint="start without --shrink-to",
            )
        self._client, library = self._join()
        if self._client is not None:
            self._client.open_session()
        client = self._client
        run = run_of(client, library)
        root = os.environ.get(ROOT_VARIABLE)
        self.root = (settings.checkpoint if root is None else absolute(root)) or run.checkpoints
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        every = run.memory_every if settings.memory is None else settings.memory
        self._finite = NonfiniteCheck(self._adapter, settings.nonfinite)
        self._pace = SaveSchedule(
            settings.policies if self.root else (), faults=restarts, run_s=max(0.0, run.age_s)
        )
        self._rank = StepParticipant(self._adapter, client)
        self._tier = MemoryTier(
            self._rank, self._adapter, run.shared, every, self._values, self._locals, run.pull
        )
        self._sections = Sections(self._rank)
        self._between = CollectiveGuard(self._rank)
        self._loops = Loops(self._rank, self._adapter, self._parts, self._tier, settings.verify_data)
        self._votes = VoteCaster(self._rank, self._adapter)
        self._verifier = Verifier(self._rank, self._adapter, self._votes, run.verify_every)
        self._saver = Checkpointer(
            self._rank, self._adapter, self.root, run.saves_as, self._finite.keeps(settings.keep),
            lambda collected: self._values(collected, self.step), self._locals, self._pace, self._votes,
            self._verifier, self._tier, copies=settings.copies,
            watched=client is not None and not library,
        )  # fmt: skip
        self._pause = Pause(self._rank)
        ends = LoopEnds(self._rank, self._adapter.world_size)
        self._behind = AfterBlock(self._rank, self._pace, self._tier, self._saver, self._pause, ends)
        verify = settings.verify_block, settings.verify_ranks
        self._blocks = StepRunner(self._rank, self._adapter, self._votes, self, self._finite, verify)
        variables = self._blocks.variables
        variables.leave_out(lambda: (self,))  # Session.own
        self._turns = Turns(self._rank, self._adapter, self._loops, self._votes, self._behind, variables)
        self._common = ReplicaStateCheck(self._adapter, client, self.state)
        self._entered = True
        self._rank.connect(self._calls())
        if client is not None and client.stand_in is not None and not client.stand_in.called:
            self._stand_by(client.stand_in)
            script_end.entered(self)
            return self
        self._prepare_root()
        if library and client is not None and client.local_rank == 0 and self.root is not None:
            note_root(str(self.root))
        if self._rank.joining and client is not None:
            self._take_over(client)
        else:
            restarted = client is not None and not library and (bool(client.saves.resume) or restarts > 0)
            self._load(lambda: candidates(settings.resume, self.root, client, run.saves_as, restarted))
        self._open()
        script_end.entered(self)
        return self

    def _join(self) -> tuple[WorkerClient | None, bool]:
        """Return the connection to the agent (None without an agent), and whether sessions start the agents."""
        client = WorkerClient.current()
        if client is not None or self._adapter.world_size == 1:
            return client, False
        seat = seat_here((self._adapter.rank, self._adapter.world_size))
        exchange = self._adapter.vote if isinstance(self._adapter, HasGroups) else None
        return join_or_start_agent(seat, exchange), True

    def _prepare_root(self) -> None:
        """Take the place of the job's checkpoints, and check before the first save that it can be written.

        Raises:
            UsageError: another rank of the same start saves in another place.
            StoreWriteError: no checkpoint can be saved.
        """
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        if self._client is not None:
            later = self._rank.joining or restarts > 0
            self.root = self._saver.root = root_of_job(self._client, self.root, later=later)
        if self.root is None:
            self._say("holdfast: no checkpoint directory: nothing is saved, also not when a rank is lost")
            return
        try:
            open_store(self.root).probe()
        except StoreWriteError as error:
            raise StoreWriteError(
                f"no checkpoint can be saved: {error.message}",
                hint=error.hint or "give another place, by --root or holdfast.session(checkpoint=...)",
            ) from error
        self._saver.claim(begins=not restarts and not self._rank.joining)

    def _load(self, look: Callable[[], Candidates]) -> None:
        self._resume_or_begin(look)
        if isinstance(self._adapter, SharesRandomNumbers) and self._adapter.world_size > 1:
            before = None if self._resumed is None else self._streams_in(self._resumed.session)
            self._adapter.draw_from(before or self._adapter.compare_generators())

    def _streams_in(self, session: Mapping[str, Any]) -> Streams | None:
        return Streams.of_plain(session.get("streams"), self._adapter.world_size * self._parts)

    def _resume_or_begin(self, look: Callable[[], Candidates]) -> None:
        search = ResumeSearch(self._adapter, self._client, self._adapter.vote, self._tier.load)
        self._resumed = search.run(look, self.root)
        if self._resumed is None:
            if self.root is not None:
                why = "as asked" if self._settings.resume == "never" else f"no checkpoint in {self.root}"
                self._say(f"holdfast: starting fresh, {why}")
            self._step = 0
            if isinstance(self._adapter, BeginsEqual):
                self._adapter.begin_equal()
            return
        found = self._resumed
        self._stand_at(found)
        self._say(f"holdfast: resumed at step {found.step} from {found.path}{found.caveat}")
        if found.session.get("seed") != self._settings.seed:
            log.warning(
                "holdfast: the checkpoint was written with seed %s, this run has %d: random numbers will differ",
                found.session.get("seed"),
                self._settings.seed,
            )
        before = self._workers_then(found.session)
        if before != self._adapter.world_size * self._parts:
            said = "holdfast: the checkpoint was written by %s, this run has %d: no longer bit for bit the same run"
            log.warning(said, plural(before, "rank"), self._adapter.world_size)

    @staticmethod
    def _workers_then(session: Mapping[str, Any]) -> int:
        """Return the number of ranks of the saved job, including missing ranks whose work other ranks did."""
        return int(session.get("world", 1)) * int(session.get("parts", 1))

    def _take_over(self, client: WorkerClient) -> None:
        """Load the state of this newcomer from the survivors or the memory tier, instead of from a checkpoint."""
        order = self._rank.await_receive()
        found = take_over(self._rank, self._adapter, client, self._tier, order)
        if isinstance(self._adapter, SharesRandomNumbers):
            # Before the feed of a spare goes to its position: with other streams it begins again.
            self._adapter.draw_from(self._streams_in(found.session))
        self._stand_at(found)
        self._votes.inherit(order)
        log.info("holdfast: joins at step %d", order.step)

    def _calls(self) -> ParticipantCalls:
        """Return the functions of this session that its side of the step protocol calls."""
        saver = self._saver
        return ParticipantCalls(
            carry_out=saver.carry_out,
            refuse=saver.refuse,
            trained=saver.holds_weights,
            end_serving=saver.resumed,
            rewind=self._rewind,
            kept=self._tier.steps,
            outside=self._between.outside,
            loop=self._behind.ends.place,
            joined=self._verifier.slice,  # the first plan takes long: no vote should wait for it
        )

    def _attach(self) -> None:
        """Install the hooks of the framework, once. A spare installs them before it is called."""
        if not self._attached:
            self._attached = True
            self._adapter.attach(self._blocks.hooks(), self._rank.fault_seen, self._between.collective)

    # ------------------------------------------------------------------ spare

    def _stand_by(self, stand_in: DeferredRank) -> None:
        """Prepare a spare for rehearsals. All other setup is done when the spare is called into the job."""
        self._spare = stand_in
        self._attach()
        self._rank.open(0)

    def _go_on_stage(self) -> None:
        """In a spare, wait until it is called, and make this process a newcomer. In other processes, do nothing."""
        spare, self._spare = self._spare, None
        client = self._client
        if spare is None or client is None:
            return
        spare.wait()
        if isinstance(self._adapter, StandsIn):
            self._adapter.become(client.rank)
        self._rank.take_place(client.generation)
        self._tier.know_rank()
        self._prepare_root()
        self._take_over(client)
        self._open()

    def _stand_at(self, found: Resumed) -> None:
        self._resumed = found
        run = self._saver.lineage.run
        self._saver.lineage = Lineage.of_run(run, found.session, found.path.name)
        self._step = found.step
        before = before_of(found.path.name, run, joining=self._rank.joining)
        self._loops.stand_at(found.session, found.local, begun=found.begun, before=before)
        if self._settings.verify_block:
            self._loops.loaded.loaded()
        self._sections.stand_at(found.session)
        self._finite.stand_at(found.session)
        same = self._workers_then(found.session) == self._adapter.world_size * self._parts
        local = found.local if same else {}
        self._blocks.variables.stand_at(found.session, local)
        self._blocks.inputs.stand_at(local)
        self._blocks.generators.stand_at(local)

    def _open(self) -> None:
        rank, saver = self._rank, self._saver
        self._attach()
        self._watch = ExitWatch(
            rank.ask_exit, self._settings.exit_file, self._settings.grace_s, self._out_of_grace
        )
        local = None if self._resumed is None else self._resumed.local
        self._watch.start(known_of(local, self.root, self._adapter.rank), self._say)
        with self._reading(self._step):
            self._tier.start(self._step)
        rank.note_local(self._loops.taken_over(), self._step)
        rank.open(self._step)
        if self._resumed is not None and self.root is not None and self._resumed.path.parent == self.root:
            saver.saved(self._step)
        if self._client is not None:
            self._client.send(
                SessionOpened(
                    member_id=rank.member_id,
                    generation=rank.machine.generation,
                    step=self._step,
                    root="" if self.root is None else str(self.root),
                    live=self._adapter.live,
                )
            )
        self._votes.tell()
        saver.start()
        self._pace.start(self._step)
        rank.enter(Phase.READY)

    def _rewind(self, step: int) -> None:
        """Go back to the kept state of ``step``, as all ranks do. Raises: CheckpointInvalid: it is damaged."""
        log.warning("holdfast: back from step %d to %d, from memory", self.step, step)
        found = self._tier.load(step)
        self._verifier.forget()
        self._behind.forget()
        self._loops.go_back(found.session, found.local)
        self._rank.note_local(self._loops.taken_over(), step)
        self._tier.start(step)
        self._pace.start(step)

    def _say(self, line: str) -> None:
        log.log(logging.INFO if self._adapter.rank == 0 else logging.DEBUG, line)

    def _out_of_grace(self) -> None:
        log.error(
            "holdfast: asked to exit, but no checkpoint could be saved within %g s", self._settings.grace_s
        )
        leave_process(Exit.UNSAVED)

    # ------------------------------------------------------------------ use

    @property
    def step(self) -> int:
        """Number of committed updates. Inside a user's ``state_dict``, the step whose state is being read."""
        self._asked()
        return self._rank.step if self._collecting is None else self._collecting

    @contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """Make :attr:`step` return ``step`` while the ``with`` body reads the state of that step."""
        self._collecting = step
        try:
            yield
        finally:
            self._collecting = None

    @property
    def place_in_data(self) -> Mapping[str, int] | None:
        """Position of the job in the data of its open loop, as ``Feed.place`` returns it; None if it is not known."""
        self._asked()
        at: Mapping[str, int] | None = self._loops.place.get("at")
        return at

    @property
    def exiting(self) -> bool:
        """True when all ranks have agreed to leave the job, so that no step follows."""
        self._asked()
        return self._behind.exit_agreed

    @property
    def new_epoch(self) -> bool:
        """True if the job has made no step in the open epoch or phase; outside of both: no step at all.

        The code between ``s.epochs(N)`` and ``s.steps(loader)`` also runs in a process that joins or resumes in the
        middle of an epoch. Put that code under this condition if it writes weights, or computes values for the steps
        from the weights. Keep its results in ``state``. The code runs again if a fault comes before the end of the
        first step of the epoch.

        Example:
            >>> for epoch in s.epochs(90):  # doctest: +SKIP
            ...     if s.new_epoch:
            ...         kept["targets"] = cluster(model)  # with session(state={"kept": kept})
            ...     for step in s.steps(loader):
            ...         ...
        """
        self._asked()
        return self._rank.step == self._loops.walk.begun_at

    def _asked(self) -> None:
        """Check that the session is entered. A spare first waits until it is called. Raises: UsageError."""
        self._require_entered()
        if not self._rehearsing:
            self._go_on_stage()

    def _require_entered(self) -> None:
        if not self._entered:
            raise UsageError(
                "the session was made, but not entered", hint="with holdfast.session(...) as s: ..."
            )

    @property
    def own(self) -> Plain:
        """Plain values of this rank alone, which its replacement and a resumed process get back.

        ``own`` is None if nothing was set. Values of the whole job belong into ``state``. Set ``own`` in the block of
        a step, before ``optimizer.step()``: if the block is aborted, the earlier values are restored. If a rank is
        lost after its update and before it sets ``own``, its replacement gets the values of the previous step. The
        values may take at most 128 KiB.

        Example:
            >>> s.own = {"samples": s.own["samples"] + len(x) if s.own else len(x)}  # doctest: +SKIP
        """
        self._asked()
        return self._loops.mine.own

    @own.setter
    def own(self, value: Plain) -> None:
        """Set the values that are saved with the step that ends next."""
        self._loops.mine.set(value)

    def keep_own(self, value: Plain) -> None:
        """Set ``own`` for a library that drives the loop. If a step runs again, the library sets ``own`` again."""
        self._loops.mine.own = value

    def attach(self, name: str, item: T) -> T:
        """Preserve the values of an object of this rank across faults and restarts. Return the object.

        Attach objects that add up values from step to step: meters, sums, last losses. A replacement or resumed process
        attaches an object under the same name. When its loop over steps begins, the object gets the values of the
        earlier process, provided that both attached the object in the same epoch or phase. If a block is aborted and
        runs again, the object has the values from before the first run.

        Args:
            name: name of the object in this session. A further object of the same name replaces the first one.
            item: a container or an object with attributes. Its values are numbers and strings, in lists, deques,
                tuples, dicts and further objects. With ``own`` they take at most 128 KiB.

        Raises:
            UsageError: the object holds a value of another type; the error names the value.

        Example:
            >>> meters = s.attach("train", MetricLogger())  # doctest: +SKIP
        """
        self._require_entered()
        self._loops.mine.attach(name, item, self._loops.walk.slot.way)
        self._blocks.variables.leave_out(partial(parts_of, item))
        return item

    def redo(self) -> None:
        """Abort the open step and begin it again, for a framework that computes the update in its graph.

        Raises:
            StepError: no step is open.
        """
        self._require_entered()
        self._blocks.redo()

    def save(self) -> None:
        """Request a checkpoint of the step whose vote comes next, and return at once. A request of one rank is enough.

        All ranks save when the script asks for the following step. So do not wait for the checkpoint after the block.

        Raises:
            UsageError: the session has no checkpoint directory.
        """
        self._asked()
        if self.root is None:
            raise UsageError(
                "save() without a checkpoint directory", hint="holdfast.session(checkpoint='ckpts/')"
            )
        self._pace.asked = True

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Announce work between two steps that may take long (an evaluation): ``with s.section("eval"):``.

        Otherwise the work could be taken for a hang. The time that a section may take without progress is learned by
        ``name``; the first run may take one hour. If a collective in a section loses a peer, it raises PeerLost, and
        all ranks restart at the next step. A section before the block of that step, or after the loop, then runs again.
        A section after a block (``if step.committed and step.last_in_epoch``) does not, which causes a warning.

        Raises:
            StepError: the call is inside the block of a step, or inside another section.

        Example:
            >>> if step.number % 50 == 0 and not step.again:  # doctest: +SKIP
            ...     with s.section("eval"):  # before the block
            ...         evaluate(model)
        """
        self._asked()
        nested = self._rank.script.in_section
        if self._blocks.current is not None or nested:
            raise StepError(
                f"section {name!r} inside {'another section' if nested else 'a step'}",
                hint="announce sections between steps: with s.section(name): ...",
            )
        with self._sections.run(name):
            yield

    @property
    def streams(self) -> Streams | None:
        """The streams of random numbers of all copies of the model, for integrations.

        The value is None if each copy has its own stream.
        """
        return self._adapter.streams if isinstance(self._adapter, SharesRandomNumbers) else None

    def framework_stands(self) -> None:
        """Record that the library which drives the loop has finished its setup, or other work before the next block."""
        self._rank.moved(ScriptEvent.FRAMEWORK_DONE)
        self._adapter.remember(self._rank.step)

    def rewound(self, step: Step) -> None:
        """Set number and batch of ``step`` to those of the job's present step, because the job has gone back to it."""
        self._loops.fill(step)

    # ------------------------------------------------------------------ a block's questions

    def ballot(self, step: int, *, unsound: bool, nonfinite: bool) -> Ballot:
        """Return the ballot of this rank for the vote of ``step``."""
        plan, digest = self._verifier.slice(step)
        return Ballot(
            step=step,
            plan=plan,
            digest=digest,
            unsound=unsound,
            exit=bool(self._rank.exit_source),
            save=self._pace.asked,
            due=self._pace.due(step + 1),
            busy=self._saver.busy,
            nonfinite=nonfinite,
            keep=self._tier.due(step + 1),
            hold=self._pause.asked,
        )

    @property
    def alike(self) -> bool:
        """True if this rank is known to hold a part of every tensor of the job."""
        return self._verifier.complete

    def differ(self, step: int) -> None:
        """Send the digests of this rank's state after the vote of ``step`` has shown that copies of it differ."""
        self._verifier.tell(step)

    def entered(self, step: int) -> bytes | None:
        """Record that the block of ``step`` began. Return rank-local values for the status page.

        The result is None if they are unchanged.
        """
        self._behind.ends.compare()
        return self._loops.entered(step)

    def batch_of(self, copy: int) -> Any:
        """Return the batch that model replica ``copy`` draws for the open step.

        Raises: LookupError: the batch is not known.
        """
        return self._loops.batch_of(copy)

    def foresee(self) -> bytes | None:
        """Log the update in the memory tier, before the vote.

        Return the rank-local values of the next step for the status page; None if they are unchanged.
        """
        self._tier.foresee(self._rank.step)
        return self._loops.foresee(self._of_updates())

    def _of_updates(self) -> dict[str, Any]:
        of_updates = self._blocks.variables.of_rank(ended=self._loops.ends_epoch)
        return {**of_updates, **self._blocks.of_rank()}

    def before_ready(self, tally: Tally) -> bytes | None:
        """Before the commit, record the data position, publish a changed layout, and keep the state in memory if due.

        Returns:
            Rank-local values for the status page; None if they are unchanged.
        """
        self._sections.pass_by(self.step - 1, tell=self._adapter.rank == 0)
        payload = self._loops.note(self._of_updates())
        following = self.step + 1
        with self._reading(following):
            self._votes.tell()
            self._tier.committing(following, tally.keep)
        return payload

    def after_ready(self, step: Step, tally: Tally) -> None:
        """After ``step`` is committed, handle the requests of the vote: saves, an exit.

        At the first steps, also compare user state, buffers and batches between ranks.
        """
        self._common.committed(self._loops.digests_of(step.number))
        if not self._rank.fenced:  # otherwise the vote after the recovery repeats the requests
            self._behind.committed(tally)

    def _values(self, collected: Collected, step: int) -> dict[str, object]:
        session = {
            "step": step,
            "seed": self._settings.seed,
            "world": self._adapter.world_size,
            "parts": self._parts,
            "place": dict(self._loops.place),
            "section": self._sections.unfinished,
            "cut": self._sections.line,
            "lineage": self._saver.lineage.ancestors,
            **self._finite.values(),
            **self._blocks.variables.kept(),
        }
        if (streams := self.streams) is not None:
            session["streams"] = streams.plain()
        return {**collected.values, "session": session}

    def _locals(self) -> dict[str, object]:
        answered = {} if self._watch is None else self._watch.record(leaves=self._behind.exit_agreed)
        return {**self._loops.local, **answered}

    # ------------------------------------------------------------------ close

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        script_end.left(self)
        self._entered_by = None
        if self._watch is None and error is not None:
            self._adapter.detach()
            return  # a spare that was not called, or got no state: it holds nothing of this job
        ended = error is None or self._is_end(error)
        try:
            self._asked()
            if ended:
                try:
                    self._finish()
                except Exception as late:
                    self._fall(late)
                    raise
                self._tier.close()
            elif isinstance(error, Exception | SystemExit):
                self._fall(error)
        finally:
            if self._watch is not None:  # still None if a called spare has failed in the `try` above
                self._watch.stop()
            self._adapter.detach()
            self._saver.close()
        if ended and self._behind.exit_agreed:
            if self._rank.orphaned:
                raise SystemExit(int(Exit.ORPHANED))
            raise SystemExit(int(Exit.REQUEUE if self._behind.exit_sealed else Exit.UNSAVED))

    def _is_end(self, error: BaseException) -> bool:
        """Return whether ``error`` ends the training normally, as ``sys.exit(0)`` between two steps does."""
        return isinstance(error, SystemExit) and error.code in (None, 0) and self._rank.state == "ready"

    def _fall(self, error: Exception | SystemExit) -> None:
        """After an exception of the script, preserve the state of the last committed step if possible.

        ``sys.exit()`` counts as an exception if it does not end the training normally: many scripts call it on all
        ranks for a loss that is not finite.
        """
        rank = self._rank
        self._loops.explain(error)
        if self._loops.after_block:
            self._sections.cut_after_block(place_of_error(error))
        rank.moved(ScriptEvent.STRAYED)
        state = rank.fail()
        broken = self._adapter.poisoned or rank.fenced or self._adapter.is_fault(error)
        if not (broken and lost_peer(error)):
            self._loops.fall()  # also if a fault of another rank has come between this exception and here
        if self._client is not None and broken:
            what = error.message if isinstance(error, HoldfastError) else str(error)
            log.error("holdfast: %s: %s; waiting for the order to leave", type(error).__name__, what)
            rank.await_end()
        elif self._client is not None and not rank.joining:
            self._stay(self._client, error)
        elif state != "torn":
            self._saver.rescue(state == "aborted")

    def _stay(self, client: WorkerClient, error: Exception | SystemExit) -> None:
        """Keep this process alive after its script has raised ``error``, until no other rank needs its state."""
        rank = self._rank
        between = rank.state == "ready"

        def leave(order: Leave) -> None:
            show(error)
            leave_process(order.code)

        client.on(Leave, leave)
        what = ""
        if isinstance(error, SystemExit):
            what = words_of_exit(error, f"{'before' if between else 'inside'} the block of step {rank.step}")
        tell(client, error, what, stays=True, between=between)
        rank.await_word(STAY_S)

    def _finish(self) -> None:
        """Save the final state and wait until all ranks have finished. After a recovery, do both again."""
        rank, saver = self._rank, self._saver
        if not self._behind.exit_agreed:
            self._turns.close()
            self._loops.require_all()
        self._loops.finish()
        rank.flag(PageFlag.LEFT, True)
        self._behind.come_back()
        if not self._behind.exit_agreed:
            self._blocks.refuse_empty()
        self._sections.pass_by(rank.step - 1, tell=self._adapter.rank == 0)
        sealed = self._behind.exit_sealed
        while True:
            if rank.joining:
                rank.join()
            if rank.fenced:
                rank.await_resume()
            if not self._behind.exit_agreed and rank.step:
                self._common.publish_end()
                if not saver.verify():
                    continue
                self._common.compare_end()
                try:
                    if not saver.is_written():
                        sealed = saver.save("final", wait=True)
                        saver.require_sealed(sealed)
                except PeerLost:
                    rank.await_fence()
                    continue
            if rank.finish("exit" if self._behind.exit_agreed else "done", sealed):
                return
