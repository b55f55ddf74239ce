"""The loops of a script over its steps: the next batch, and the position of the job in its loops and data.

Theory. A script may have several loops one after the other. The *place* of the job is the number of the loop and the
position of its feed. A process that starts again runs the script again. The loop in the loaded place (the *saved loop*)
seeks its position, and the loops before it yield nothing. When the job goes back without a restart, the open loop also
seeks.

A restarted process also repeats the code between two loops (a scheduler's step after an epoch). The loaded state
already includes the effect of that code. So learning rates, schedulers, buffers and the user's state are restored
when the saved loop opens, as after an aborted block. All ranks may restart between two loops, or at a step before
which the script ran code. Then that code runs again, from copies of the state from before the code
(``Adapter.remember``). A script may count the end of a loop from the current step (``until=s.step + N``). The place
therefore holds the steps at which the loop began and ends, and a process that joins the loop later uses that end.

Invariants:
1. A step that runs again gets the same batch.
2. A loop is left only when no recovery is under way, or when the loop could not rewind (go back to an earlier step)
   anyway. A rank that leaves a loop with ``break`` reports that it can no longer rewind.
3. All ranks run the code before the block of a step on the same state. A rank that has begun the block records this in
   its rank-local values. A process that replaces only this rank does not run the code again. If all ranks restart, or
   go back to an earlier step, all run the code again, with learning rates, schedulers and user state from before it.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple, cast

from holdfast.core.protocol.status_page import Phase
from holdfast.core.worker.position import ScriptEvent, ScriptPosition
from holdfast.errors import HoldfastError, StateError, StepError, UsageError
from holdfast.frameworks.common.adapter import Adapter, Feed
from holdfast.frameworks.common.state_tree import Plain
from holdfast.runtime.node.status_page import LOCAL_SIZE_BYTES_MAX
from holdfast.runtime.worker.script_frames import frame_of_script
from holdfast.session.checkpoints.after_block import AfterBlock
from holdfast.session.checkpoints.memory_tier import MemoryTier
from holdfast.session.exit_requests import RECORD
from holdfast.session.loops.batch_digest import Drawn
from holdfast.session.loops.combined_feed import feed_of, feed_of_copy, rescaled, same_loaders, start_of_epoch
from holdfast.session.loops.dataset_check import compare_with_checkpoint, compare_with_ranks
from holdfast.session.loops.loaded_state import LoadedState
from holdfast.session.loops.loop_bounds import (
    ENDLESS,
    Bound,
    LoopMembers,
    bound_of,
    compare_bounds,
    counted_from_here,
)
from holdfast.session.loops.own_values import OwnValues
from holdfast.session.loops.script_source import Helper, has_ended, helper, leaves
from holdfast.session.loops.turn_position import IDIOM, TurnPosition
from holdfast.session.steps.accumulation import AccumulatingFeed, RefilledBatches
from holdfast.session.steps.batches import Batches
from holdfast.session.steps.loop_ends import LoopEnds
from holdfast.session.steps.participant import StepParticipant
from holdfast.session.steps.step import Step, StepRunner
from holdfast.session.variables.update_variables import KEY as OF_UPDATES
from holdfast.store.format.json_values import encode_values
from holdfast.text import plural

log = logging.getLogger("holdfast")


_NOT_COUNTED = (
    "holdfast: before this, the block of step {} had a run that does not count (step.committed is False): a block "
    "also runs for its check, up to optimizer.step(), and again after a fault. Code after the block, also in a helper "
    "of the script around the steps, runs each time. Set what it always needs, such as the values of a meter, in the "
    "block before optimizer.step(). Put what only a step that counts needs in `if step.committed:`"
)
_NOTHING_DONE = (
    "holdfast: the steps of the loop before this were done before this process joined or resumed (at step {}). What "
    "the loop fills, such as meters, is empty here. Keep it with the rank: "
    'meters = s.attach("train", MetricLogger())'
)
_OF_THE_SCRIPT = {"own": "s.own", "attached": "what s.attach keeps"}
"""Rank-local values that the script has given, with their names in warnings and errors."""


def without_room(local: Mapping[str, Plain], size_bytes: int) -> str:
    """Return the warning that the encoded rank-local values, ``size_bytes`` long, do not fit on the status page."""
    largest = _largest(local)
    what, consequence = {
        "loader": ("the data loader's state", "reads the batches of that epoch again"),
        **{
            key: (name, "would begin without it: the next step is refused")
            for key, name in _OF_THE_SCRIPT.items()
        },
    }.get(largest, (largest, "begins without them"))
    return (
        f"{what} is too large: the values that only this rank has take {size_bytes} bytes, the status page holds "
        f"{LOCAL_SIZE_BYTES_MAX}; should this rank be lost, its replacement {consequence}"
    )


def _largest(local: Mapping[str, Plain]) -> str:
    return max(local, key=lambda name: len(encode_values(local[name])))


NOT_OF_LOOPS = ("begun", "drawn", RECORD)
"""Keys of loaded rank-local values that a process does not take over into :attr:`Loops.local` when it begins."""


class _OpenLoader(NamedTuple):
    """The loader of the open loop.

    Attributes:
        user: the loader that the script gave; None if the blocks draw their own batches.
        batches: number of the loader's batches in a list (``Session.steps``); None if there are no lists.
        refilled: the check that the loader does not write a batch into the tensors of an earlier batch. It is made at
            the first step that has several parts.
        feed: the feed of the loop in an epoch, once the loop has ended. It is kept, because it could only read its data
            again to find the position at which the next epoch continues.
    """

    user: Any
    batches: int | None
    refilled: RefilledBatches
    feed: Feed | None = None


class Loops:
    """The loops of one session.

    Args:
        rank: protocol state of this rank.
        adapter: the framework.
        parts: number of ranks whose work this rank does, itself included. It draws one batch for each of them per step.
        tier: the memory tier. If it is on, the job may go back to an earlier step within a loop that has a feed.
        verify_data: compare the drawn batches with those that the earlier process drew.

    Attributes:
        place: the place of the job: a dict with number (``loop``), data position (``at``), start and end (``bound``)
            of its loop, and the finished turns.
        walk: the position of the script among its epochs and phases.
        local: the rank-local values of the last committed step.
        mine: the rank-local values that the script sets itself: ``Session.own`` and attached objects.
        loaded: the state that this process has loaded.
        begun: feed for the next loop, from which a spare has drawn; if None, the loop makes a feed.
    """

    def __init__(
        self, rank: StepParticipant, adapter: Adapter, parts: int, tier: MemoryTier, verify_data: bool
    ) -> None:
        self.place: dict[str, Any] = {"loop": -1}
        self.walk = TurnPosition()
        self.local: dict[str, Plain] = {}
        self.mine = OwnValues()
        self.loaded = LoadedState(adapter)
        self._rank = rank
        self._adapter = adapter
        self._parts = self._parts_then = parts
        self._tier = tier
        self._before = LoopMembers.ANOTHER_JOB
        self._first: Bound | None = None  # of the first loop; None: not known, or of another number of ranks
        # The first loop is over, and its end seems to be counted from the current step.
        self._counts_from_here = False
        self._feed: Feed | None = None
        self._others: dict[int, Feed | None] = {}  # feeds of other model replicas, from the same loader
        self._loader = _OpenLoader(None, None, RefilledBatches(adapter))
        self.begun: Feed | None = None  # see the class
        self._data: list[int | str] | None = None  # of the open loop: length and content of its dataset
        self._bound: Bound = (0, None)  # of the open loop
        self._epochs: int | None = None
        self._began: tuple[Any, dict[str, Plain]] = (
            None,
            {},
        )  # position and rank-local values at the start of the open loop
        self._batches = Batches(adapter)
        self._proof = Drawn(adapter, adapter.rank, verify=verify_data)
        self._drawn, self._part = -1, 0  # step of the drawn batches, and index of the next block
        self._given: Step | None = None  # the step that the script has at present
        # The step at which the script has left its loop, the variable of a generator that has ended the loop by a count
        # of its turns, and whether an exception may have ended it.
        self._left_behind: tuple[Step | None, str, bool] = None, "", False
        self._tried = -1  # the newest step that the script was given
        self._after: Plain = None  # ``Feed.local_state`` after the step that is voted on
        self._told = b""  # encoded rank-local values on the status page
        self._local_too_large = False

    def stand_at(
        self,
        session: Mapping[str, Any],
        local: Mapping[str, Any],
        *,
        begun: bool = False,
        before: LoopMembers = LoopMembers.SURVIVORS,
    ) -> None:
        """Take over the place of the job and the rank-local values from the loaded state.

        Args:
            session, local: plain values of the session, equal on all ranks, and rank-local values.
            begun: the earlier process had begun the block of the loaded step.
            before: the processes that were in the loop of the loaded place before this process.
        """
        self._before = before
        self.place = dict(session.get("place", {"loop": -1}))
        self.walk.stand_at(self.place.get("turns"))
        self._rank.stand_at_turn(self.walk.passed)
        self._parts_then = int(session.get("parts", 1))
        world = int(session.get("world", self._adapter.world_size))
        # With other ranks a loader has another length, and an epoch another end.
        self._first = self.place.get("first") if world == self._adapter.world_size else None
        if at := self.place.get("at"):
            self.place["at"] = rescaled(at, world, self._adapter.world_size)
        self.local = {key: value for key, value in local.items() if key not in NOT_OF_LOOPS}
        same = world == self._adapter.world_size and self._parts == self._parts_then
        self._proof.stand_at(local.get("drawn") if same else None)
        self.mine.go_back(self.local)
        self._tried = int(session.get("step", 0)) - (not begun)

    def go_back(self, session: Mapping[str, Any], local: Mapping[str, Any]) -> None:
        """Go back to an earlier step of the open loop.

        Args:
            session, local: the values saved with that step, as for :meth:`stand_at`.
        """
        loop, turns = self.place["loop"], self.walk.record
        self.stand_at(session, local)
        self.walk.stand_at(turns)  # the open loop stays open, and so does its turn
        self._rank.stand_at_turn(self.walk.passed)
        if self.place["loop"] != loop:  # the state was kept when this loop began
            self.place = {"loop": loop, "at": self._began[0]}
            self._say_what_it_is()
            self.local = dict(self._began[1])
        elif (own := self._proof.position(int(session.get("step", 0)), loop)) is not None:
            self.place["at"] = own
        if self._feed is not None:
            self._feed.seek(self.place["at"], self.local.get("loader"))
        self._batches.forget()
        self._drawn = -1

    # ------------------------------------------------------------------ the generator

    def run(
        self,
        loader: Any,
        epochs: int | None,
        until: int | None,
        batches: int | None,
        after_block: AfterBlock,
        blocks: StepRunner,
    ) -> Iterator[Step]:
        """Return an iterator over the steps of the next loop of the script.

        Args:
            loader, epochs, until, batches: arguments of ``Session.steps``; None in ``epochs`` and ``until`` means no
                limit.
            after_block: the work after a block. The loop ends early when all ranks have agreed to leave.
            blocks: runs the blocks of the steps.
        """
        return self._run(self.walk.next_loop(), loader, epochs, until, batches, after_block, blocks)

    def _run(
        self,
        loop: int,
        loader: Any,
        epochs: int | None,
        until: int | None,
        batches: int | None,
        after_block: AfterBlock,
        blocks: StepRunner,
    ) -> Iterator[Step]:
        saved_loop = self.place["loop"]
        if saved_loop > loop:
            if self.begun is not None:
                self.begun.close()
                self.begun = None
            if loop == 0 and self._first is not None:
                self._counts_from_here = counted_from_here(self._rank.step, until, self._first)
            self.pass_over()
            return  # the checkpoint was written in a later loop of the script
        after_block.ends.opened(loop)
        self._come_in(blocks, loop)
        self._bound = self._end_of(loop, until)
        follows = self.walk.epochs is not None and self.place.get("epochs") == self.walk.epochs
        feed = self._feed = self._open(loader, batches, again=follows)
        data, self._data = self.place.get("data"), self._compare(feed, loop)
        self._proof.begin(loader, loop)
        self._drawn, self._epochs = -1, None if epochs is None else epochs * ((self.walk.epoch or 0) + 1)
        local = self._go_to_start(feed, loop, epochs, known=follows and data == self._data)
        if saved_loop < loop:
            self.place = {"loop": loop, "at": None if feed is None else feed.place()}
            self.local = {**self._at_start(blocks), **({} if local is None else {"loader": local})}
        self._say_what_it_is()
        if feed is not None and feed.rewinds and self._tier.on:  # a block that draws its own cannot go back
            self._began = (self.place["at"], {**self._at_start(blocks), "loader": feed.local_state()})
            self._allow_rewind()
        self._adapter.remember(self._rank.step)  # this place includes what the code since the last loop did
        end, begun_at = self._bound[1], self._rank.step
        self._begin_loop(unfinished=feed is not None or end is None or end < ENDLESS)
        if self.walk.inside and saved_loop < loop:
            self.renew()
        after_block.come_back()  # the script may have left the last loop after a block
        turns, around, steps = 0, None, self._each(end, after_block, blocks)
        try:
            for step in steps:
                turns, around = turns + 1, helper(frame_of_script())
                yield step
            if saved_loop == loop and self._rank.step == begun_at and not after_block.exit_agreed:
                blocks.variables.passes_end()
                blocks.variables.passes_over(joins=self._rank.joining)
                if self._adapter.rank == 0:
                    log.info("holdfast: no step is left to do in this loop: it was over at step %d", begun_at)
            self._end_loop()
            self._forget_loop()
            if feed is not None and not feed.repeatable and self.walk.epochs is not None:
                self._loader = self._loader._replace(feed=feed)
            if self.walk.inside and after_block.exit_agreed:
                raise SystemExit(0)  # the rest of this epoch follows when the job has finished its steps
        except GeneratorExit:
            steps.close()
            self._note_left(frame_of_script(), around, begun_at, turns, after_block)
            raise
        finally:
            self._out_of_loop()
            self._feed = None
            for one in (feed, *self._others.values()):
                if one is not None and one is not self._loader.feed:
                    one.close()
            self._others = {}
        if self.walk.inside:
            self._rank.end_epoch()

    def _open(self, loader: Any, batches: int | None, *, again: bool) -> Feed | None:
        """Return the feed of the loop that begins; None if its blocks draw their own batches.

        Args:
            loader, batches: see :meth:`run`.
            again: this loop follows the loop of the epoch before, and takes over the feed that was kept.
        """
        feed, self.begun, kept = self.begun, None, self._loader
        if again and feed is None and same_loaders(kept.user, loader) and kept.batches == batches:
            feed = kept.feed
        if kept.feed is not None and kept.feed is not feed:
            kept.feed.close()
        if feed is None and loader is not None:
            feed = feed_of(self._adapter, loader, batches)
        self._loader = _OpenLoader(loader, batches, RefilledBatches(self._adapter))
        return feed

    def _follow(self, feed: Feed, passes: int | None, *, known: bool) -> Plain:
        """Move ``feed`` to its start in an epoch of the script after the first. Return the rank-local part of that.

        A loop of whole passes begins with the data of its epoch, which have an order of their own. A loop that only
        ends at a step continues where the loop of the epoch before has ended. Further loaders always continue.

        Args:
            passes: number of passes in each epoch; None if the loop ends at a step.
            known: the job has the position at the end of the epoch before, and the loop has the same data.
        """
        at, local = (self.place["at"], self.local.get("loader")) if known else (None, None)
        if at is None or passes is not None:
            at, local = start_of_epoch((self.walk.epoch or 0) * (passes or 1), at, local)
        feed.seek(at, local)
        return local

    def _go_to_start(self, feed: Feed | None, loop: int, passes: int | None, *, known: bool) -> Plain:
        """Move ``feed`` to the position at which this process begins ``loop``. Return the rank-local part of that.

        Args:
            passes, known: see :meth:`_follow`.
        """
        if self.place.get("at") is not None:
            self.place["at"] = self._own_position(loop, continues=passes is None and bool(self.walk.epoch))
        if feed is None:
            return None
        if self.place["loop"] == loop:
            self._seek(feed)
        elif self.walk.epoch:
            return self._follow(feed, passes, known=known)
        return None

    def _own_position(self, loop: int, *, continues: bool) -> Mapping[str, int]:
        """Return the position of this rank in the data of the saved loop, when it begins ``loop``.

        The place of the job has the position of one rank. Another rank may be elsewhere, if its loader is shorter and
        begins again earlier. The record of its earlier process then shows its own position.

        Args:
            continues: in this epoch the loop continues where the loop of the epoch before has ended.
        """
        step, saved = self._rank.step, self.place["loop"]
        own = self._proof.position(step, saved)
        if own is None and continues and saved == loop and step == self._bound[0]:
            own = self._proof.position(step, loop - 1)
        at: Mapping[str, int] = self.place["at"]
        return at if own is None else own

    def _at_start(self, blocks: StepRunner) -> dict[str, Plain]:
        """Return the rank-local values at the start of a loop. The state may be saved before its first block.

        They contain the values that the check of the updates has of the loops before, and the record of the batches.
        """
        drawn = {} if self._proof.record is None else {"drawn": self._proof.record}
        of_updates = {key: value for key, value in self.local.items() if key == OF_UPDATES}
        return {**drawn, **of_updates, **blocks.of_rank(), **self.mine.entries(self.mine.attached())}

    def finish(self) -> None:
        """When the script ends, record that it does not return to a loop that it has left early.

        A newcomer would still enter that loop. Also close the feed that is kept for a next epoch.
        """
        if self._loader.feed is not None:
            self._loader.feed.close()
        if self._rank.script.unfinished:
            self._rank.moved(ScriptEvent.STRAYED)

    def _note_left(
        self, caller: FrameType, around: Helper | None, first: int, turns: int, after_block: AfterBlock
    ) -> None:
        """Record that the script has left the open loop in ``caller``.

        Args:
            around: the generator of the script around the steps.
            first: step at which this process began the loop.
            turns: turns that the loop has taken in this process.
            after_block: the work after a block. If all ranks have agreed to leave the job, they do not meet here.
        """
        raised = not leaves(caller)
        self._left_behind = self._given, "", raised
        if self._given is not None and not self._given.entered:
            self._proof.forget()
        if after_block.exit_agreed:
            return
        if around is not None and has_ended(around, caller):
            counter = around.has_counted(first, turns, self._rank.step - first)
            self._left_behind = self._given, counter, raised
        if self.walk.inside:
            self._leave(certain=not raised)
        if not (self.walk.several or self._rank.script.by_framework):
            after_block.ends.left(waits=not raised)

    def _leave(self, *, certain: bool) -> None:
        """End the open loop, which the script has left by ``break`` or ``return``.

        If ``certain`` is False, an exception may have ended the loop instead. Then do nothing if a fault is known, or
        if the last block has not committed: a script that continues after such a block is refused.
        """
        given = self._given
        torn = given is not None and given.entered and not given.committed
        if certain or not (torn or self._adapter.poisoned or self._rank.fenced):
            self.place["left"] = True
            self._tier.amend(self._rank.step)
            self._end_loop()
            if certain:
                self._forget_loop()

    def _allow_rewind(self) -> None:
        """Record that the open loop can go back to the present step, at which it begins."""
        with self._rank.changed:
            self._rank.script.allow_rewind(self._rank.step)

    def _begin_loop(self, *, unfinished: bool) -> None:
        with self._rank.changed:
            self._rank.script.run_loop(unfinished=unfinished)

    def _forget_loop(self) -> None:
        """Record that the open loop is over for the whole job."""
        with self._rank.changed:
            self._rank.script.end_loop()

    def _out_of_loop(self) -> None:
        """Record that the script is out of the loop, either at its end or early."""
        left = self._rank.script.unfinished
        self._rank.moved(ScriptEvent.LOOP_LEFT if left else ScriptEvent.LOOP_OVER)

    def require_whole(self) -> None:
        """When the script calls the session again, check that it did not leave its last loop in the middle of a step.

        Raises:
            StepError: the script has left a loop after an aborted block, so that the step would be missing; or a
                generator of the script has ended the loop by a count of its turns.
        """
        (step, counter, _), self._left_behind = self._left_behind, (None, "", False)
        if counter:
            raise StepError(
                f"a generator around s.steps(...) has ended the loop at step {self._rank.step}, by {counter}: it "
                "counts turns of the loop, and a block that runs again for its check or after a fault takes a turn",
                hint="let s.steps(loader, until=N) end the loop: give the generator a number that it does not reach. "
                "The same command then continues at this step",
            )
        if step is not None and step.entered and not step.committed:
            raise StepError(
                f"the script has left its loop after the block of step {step.number}, which has not committed: the "
                "step would be missing",
                hint="a block runs again after a fault and for its check: `if step.committed and ...: break`",
            )

    @property
    def strays(self) -> bool:
        """True if the script has left a loop that a newcomer would enter."""
        return self._rank.script.unfinished and not self.place.get("left", False)

    def fall(self) -> None:
        """Record that the script did not leave the open loop by ``break``, but by an exception that ends the session.

        A later process of this rank then enters the loop again.
        """
        if self._rank.script.unfinished:
            self.place["left"] = False

    @property
    def after_block(self) -> bool:
        """True if the script is in the code after a committed block, or an exception has ended its loop there."""
        given, (left, _, raised) = self._given, self._left_behind
        if given is None or not given.committed:
            return False
        return self._rank.script.position is ScriptPosition.AFTER_BLOCK or (raised and left is given)

    def explain(self, error: Exception | SystemExit) -> None:
        """Add a note to an exception that the script has raised between two blocks, if the session may be its cause.

        The note says that the last run of a block was not committed, or that this process has skipped the last loop.
        A script may not be prepared for either of them.
        """
        if isinstance(error, HoldfastError) or self._rank.state != "ready":
            return
        step = self._given
        if step is not None and step.entered and not step.committed:
            error.add_note(_NOT_COUNTED.format(step.number))
        elif self._drawn == -1 and self.place.get("over"):
            error.add_note(_NOTHING_DONE.format(self._rank.step))

    def _is_over(self, end: int | None) -> bool:
        """Return whether the loop is over: it has reached ``end``, or was left early in an unfinished turn."""
        return (end is not None and self._rank.step >= end) or self.place.get("left", False)

    def renew(self) -> None:
        """Replace the state of the present step in the memory tier, if there is one, by the present state."""
        self._tier.renew(self._rank.step)

    def note_turns(self) -> None:
        """Write the record of finished epochs and phases into the place of the job."""
        self.place["turns"] = self.walk.record

    def require_all(self) -> None:
        """Check, at the end of the script, that it has reached the place of the job. Raises: UsageError: it has not."""
        unused = not self.walk.loops and self.place.get("over", False)
        if not unused and (missing := self.walk.missing(self.place["loop"])):
            raise UsageError(
                f"the script has ended at step {self._rank.step}, without {missing}: steps would be missing",
                hint=f"the session leaves out what is done: {IDIOM}, in the order of the start",
            )

    def _end_loop(self) -> None:
        """Copy the state, and seed random numbers, at the end of a loop. The code after the loop may run again."""
        self.place["over"] = True
        if self.walk.inside:
            self._adapter.between(self._rank.step, 0, again=True)
        self._adapter.remember(self._rank.step, whole=self.walk.inside)

    def pass_over(self) -> None:
        """Skip a loop that the job has finished. First copy the state, to undo the effect of code after the loop."""
        self.loaded.copy(self._rank.step)
        self._rank.moved(ScriptEvent.LOOP_AHEAD)

    def _come_in(self, blocks: StepRunner, loop: int) -> None:
        """Open the job's present loop, on the loaded state if this process continues the job.

        Args:
            blocks: runs the blocks of the steps.
            loop: number of the loop.
        """
        step, opened = self._rank.step, self.place["loop"]
        again = opened == loop
        starts = not again and step == 0 and loop == 0
        blocks.variables.enters_loop(starts=starts, puts_back=self.mine.own is not None)
        blocks.generators.enters_loop()
        self.loaded.opens_loop(step, again=again)
        blocks.inputs.enters_loop(step, loop, opened=opened, in_epoch=bool(self.walk.epoch))
        self._rank.moved(ScriptEvent.LOOP_OPENED)
        self.mine.put()

    def _say_what_it_is(self) -> None:
        """Write dataset, start and end of the open loop, and those of the first loop, into the place of the job."""
        if self.place["loop"] == 0:
            self._first = self._bound
        self.place.update(
            data=self._data, bound=self._bound, first=self._first, over=False, epochs=self.walk.epochs
        )
        self.note_turns()

    def _end_of(self, loop: int, until: int | None) -> Bound:
        """Return the steps at which this loop began and ends. Raises: UsageError: another rank has another end."""
        place, here = self.place, self._rank.step
        bound = (here, until)
        if place["loop"] == loop and "bound" in place:
            bound = bound_of(
                loop, here, until, place["bound"], self._before, counts_from_here=self._counts_from_here
            )
        compare_bounds(self._rank.client, self._adapter.rank, self._adapter.world_size, loop, bound[1])
        return bound

    def _compare(self, feed: Feed | None, loop: int) -> list[int | str] | None:
        """Compare the dataset of this loop with those of the other ranks and of the checkpoint.

        Return its length and digest. None if length and content digest are not known. Raises: UsageError: another
        rank that shares the sampler has another dataset.
        """
        now = None if feed is None else feed.identity()
        if now is None:
            return None
        compare_with_ranks(self._rank.client, self._adapter.rank, loop, now)
        if self.place["loop"] == loop:
            compare_with_checkpoint(self.place.get("data"), now)
        return [now.length, now.content]

    def _seek(self, feed: Feed) -> None:
        at = self.place["at"]
        if at is None:
            log.warning("holdfast: the checkpoint was written without a loader: this one begins at its start")
            return
        if not (self._proof.reread(self._rank.step, feed, self._load) and feed.place() == at):
            feed.seek(at, self.local.get("loader"))
        self._tell_share(at, feed.place())

    def _tell_share(self, then: Mapping[str, int], now: Mapping[str, int]) -> None:
        """Warn if a step of this job has another number of samples than a step of the checkpoint's job.

        Args:
            then, now: data positions of the checkpoint and of this job, with their numbers of samples (``share``).
        """
        if "share" not in then or "share" not in now:
            return
        before, here = then["share"] * self._parts_then, now["share"] * self._parts
        if before == here:
            return
        way = (
            f"accumulate {plural(before // here, 'batch')} per step"
            if before % here == 0
            else f"give the loader {before / here:g} times the batch size"
        )
        log.warning(
            "holdfast: a step of the checkpoint's job had %s, one of this job has %d: training continues at "
            "the same sample, but learning rate and schedule were made for %d; to keep them, %s",
            plural(before, "sample"),
            here,
            before,
            way,
        )

    def _each(
        self, end: int | None, after_block: AfterBlock, blocks: StepRunner
    ) -> Generator[Step, None, None]:
        while True:
            if after_block.exit_agreed or self._is_over(end) or not self._draw():
                if not (after_block.exit_agreed or self._meet_at_end(end, after_block.ends)):
                    continue
                if self._rank.leave_loop():
                    return
                continue  # a recovery came first: the job may have gone back into this loop
            if not self._rank.take_step():
                continue  # code before the block must run in the generation, and at the step, of the block
            step = Step(blocks, self._rank.step)
            self.fill(step)
            # Also for a repeated step, in this process or in a replacement.
            self._adapter.between(step.number, step.part, again=step.again)
            self._rank.moved(ScriptEvent.STEP_GIVEN, again=step.again)
            self._given = step
            yield from blocks.give(step)
            self._given = None
            self._part = self._part + 1 if step.shared else 0
            if not step.entered:
                raise StepError(
                    f"step {step.number} was not entered",
                    hint="for step in s.steps(...): with step as batch: ...",
                )
            if step.committed:
                self._note_counted(blocks.variables.passed())
                after_block.come_back()
            if self._local_too_large and (largest := _largest(self.local)) in _OF_THE_SCRIPT:
                raise StateError(
                    f"{_OF_THE_SCRIPT[largest]} takes more than the {LOCAL_SIZE_BYTES_MAX} bytes that are kept for the "
                    "replacement of a lost rank, which would begin without them",
                    hint="keep there what the rank cannot make again (positions, seeds, sums), large values in a file",
                )

    def _meet_at_end(self, end: int | None, ends: LoopEnds) -> bool:
        """Meet the other ranks at the end of the loop. Return False if the job has gone back into the loop."""
        if self.walk.several:
            return True
        if self._is_over(end):
            ends.left(waits=False)
            return True
        return ends.exhausted(self._rank.step - self._bound[0])

    def _draw(self) -> bool:
        """Draw the batches of this step, one for each rank whose work this rank does.

        Return False if no batch is left.
        """
        if self._drawn == self._rank.step:
            return True
        before = {} if self._feed is None else self._feed.place()
        batches = [None] if self._feed is None else self._load(self._feed)
        if batches and self._feed is not None:
            self._proof.drew(self._rank.step, batches, before, self._feed.place())
        if batches:
            self._batches.put(batches)
            self._part, self._drawn = 0, self._rank.step
        return bool(batches)

    def _draw_again(self) -> None:
        """Draw the batches of this step again, because the block has changed them in place.

        Raises:
            StepError, DataError: the loader gives other batches than before.
        """
        feed = self._feed
        if feed is None:
            return
        feed.seek(self.place["at"], self.local.get("loader"))
        batches = self._load(feed)
        if len(batches) != len(self._batches):
            raise StepError(
                f"step {self._rank.step}: the loader does not draw the same batch again",
                hint="leave the batch as it is in the block: labels = batch['labels'], x = x * 2 in place of x.mul_(2)",
            )
        self._proof.drew(self._rank.step, batches, self.place["at"], feed.place())
        self._batches.again(batches)

    def batch_of(self, copy: int) -> Any:
        """Return the batch that model replica ``copy`` draws for this step. Raises: LookupError: it is not known."""
        if self._feed is None:
            return None  # the block draws its own batch
        if copy not in self._others:
            self._others[copy] = feed_of_copy(self._adapter, self._loader.user, copy, self._loader.batches)
        feed = self._others[copy]
        if feed is None:
            raise LookupError(copy)
        feed.seek(self.place["at"])
        try:
            return feed.draw(self._epochs)
        except StopIteration as end:
            raise LookupError(copy) from end

    def _load(self, feed: Feed) -> list[Any]:
        batches: list[Any] = []
        self._rank.enter(Phase.LOADING)
        try:
            while len(batches) < self._parts and not (batches and feed.last_in_epoch):
                batches.append(feed.draw(self._epochs))
                if self._parts > 1:
                    self._loader.refilled.drew(batches)
        except StopIteration:
            pass  # the end of the last epoch: its last step has fewer blocks, or there is no step
        finally:
            if not self._rank.fenced:
                self._rank.enter(Phase.READY)
        return batches

    def fill(self, step: Step) -> None:
        """Set number, batch and data position of ``step`` to those of the job's present step."""
        self._draw()
        step.number, step.part = self._rank.step, self._part
        step.parts = len(self._batches)
        if self._batches.spoiled(self._part):
            self._draw_again()
        step.batch = self._batches.give(self._part)
        step.uncopied = self._batches.uncopied(self._part)
        step.batches = len(step.batch) if isinstance(self._feed, AccumulatingFeed) else None
        if self._feed is not None:
            step.epoch, step.last_in_epoch = self._feed.epoch, self._feed.last_in_epoch
        step.again = step.number <= self._tried
        self._tried = max(self._tried, step.number)

    # ------------------------------------------------------------------ in a step, and after it

    def entered(self, step: int) -> bytes | None:
        """Record that the block of ``step`` has begun. Return rank-local values for the status page.

        The result is None if they are unchanged. The values are ``Session.own``, the values of attached objects, the
        loader's state and the digests of batches.
        """
        if self.local.get("begun") == step:  # its aborted run may have changed these values
            self.mine.go_back(self.local)
            return None
        self.local["begun"] = step
        self.mine.put()
        self.local.update(self.mine.entries(self.mine.attached()))
        if self._proof.record is not None:
            self.local["drawn"] = self._proof.record
        return self._payload(self.local)

    @property
    def ends_epoch(self) -> bool:
        """True if the step whose block is open ends an epoch."""
        return self._feed is not None and self._feed.last_in_epoch

    def foresee(self, of_updates: Mapping[str, Plain]) -> bytes | None:
        """Return, before the vote, the next step's rank-local values for the status page; None if they are unchanged.

        A rank that is lost during the update can no longer report them.

        Args:
            of_updates: rank-local values of the check of the updates.
        """
        self._after = None if self._feed is None else self._feed.local_state()
        values = (
            ("own", self.mine.at_vote()),
            ("attached", self.mine.attached() or None),
            ("loader", self._after),
        )
        local = {**{key: value for key, value in values if value is not None}, **of_updates}
        if not local:
            return None  # the page keeps the values of this step
        if self._proof.record is not None:
            local["drawn"] = self._proof.record
        return self._payload(local)

    def taken_over(self) -> bytes | None:
        """Return, for the status page, the rank-local values with which this process begins or goes back.

        The result is None if there are no values. If this process is lost before its next block, its status page is
        the only source of these values.
        """
        self._told = b""
        local = dict(self.local)
        if self._proof.record is not None:
            local["drawn"] = self._proof.record
        return self._payload(local) if local else None

    def note(self, of_updates: Mapping[str, Plain]) -> bytes | None:
        """Set the place of the job after this step. Return rank-local values for the status page.

        The result is None if they are unchanged.

        Args:
            of_updates: see :meth:`foresee`.
        """
        try:
            attached = self.mine.attached()
        except UsageError:  # the update is made: the error follows where the script asks for the next step
            attached = cast("dict[str, Any]", self.local.get("attached", {}))
        if self._adapter.rank == 0 and self._adapter.world_size > 1:
            self.mine.warn_if_late()
        self.local = {**self.mine.entries(attached), **of_updates}
        if self._feed is not None:
            self.place["at"] = self._feed.place()
            if self._after is not None:
                self.local["loader"] = self._after
            if self._proof.record is not None:
                self.local["drawn"] = self._proof.record
        return self._payload(self.local) if self.local else None

    def _note_counted(self, of_updates: Mapping[str, Plain]) -> None:
        """Record the changes that code after a committed block made to attached objects. They belong to that step.

        Args:
            of_updates: rank-local values of the check of the updates; empty if they have not changed.
        """
        changed = dict(of_updates)
        attached = self.mine.attached()
        if attached and attached != self.local.get("attached"):
            changed["attached"] = attached
        if changed:
            self.local.update(changed)
            self._rank.note_local(self._payload(self.local), self._rank.step)

    def digests_of(self, step: int) -> list[int]:
        """Return the digests of the batches that this rank has drawn for ``step``.

        The result is empty if the digests are not known, or if the loader gives plain numbers, which are not data.
        """
        record = self._proof.record
        if record is None or record["step"] != step or self._proof.numbered:
            return []
        return cast("list[int]", record["digests"])

    def _payload(self, local: Mapping[str, Plain]) -> bytes | None:
        """Return ``local`` encoded for the status page; None if the page already has these values, or has no room."""
        if self._rank.client is None or self._local_too_large:
            return None
        payload = encode_values(local, "locals")
        if payload == self._told:
            return None
        self._told = payload
        if len(payload) > LOCAL_SIZE_BYTES_MAX:
            self._local_too_large = True
            log.warning("holdfast: %s", without_room(local, len(payload)))
            return None
        return payload
